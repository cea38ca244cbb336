"""Exact history for clients that keep none: answers this server gave come back as their own ids.

A client that sends a conversation again sends text, and text need not encode to the ids that were
generated. So the ids of the latest answers are remembered, under the conversation up to and with
the answer. Where such a conversation comes again, and the template writes the answer just as it was
generated, its ids are put between those of the text around it; all that was computed is found
again, as in a session.

Correctness rests on comparing texts alone: the ids that are put together must decode to the very
text that the template rendered, or the text is encoded as if nothing were remembered.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from radixkv.request import Namespace
from radixkv.server.continuation import served_ids
from radixkv.server.messages import TemplateMessage
from radixkv.server.prompts import INLINE_CHARS, PromptBuilder

if TYPE_CHECKING:
    from radixkv.engine import AsyncEngine
    from radixkv.server.generation import Answer

__all__ = ["AnswerHistory", "ChatPrompt", "HistoryReport", "encode_chat"]

MAX_TOKENS = 4_000_000  # 4 bytes each
MAX_ANSWERS = 100_000
MAX_REPORTS = 1000
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """An answer that was given.

    Attributes:
        prompt_chars, prompt_digest: of the rendered prompt that it answers.
        text: its text as the model wrote it, markers of tool calls included.
        ids: int32, without the end token.
    """

    prompt_chars: int
    prompt_digest: bytes
    text: str
    ids: array[int]


@dataclass(frozen=True, slots=True)
class HistoryReport:
    """What became of the remembered answers in one prompt.

    Attributes:
        exact: answers whose generated ids are in the prompt.
        rewritten: indexes of messages that are remembered answers, and that the template renders
            otherwise than they were generated.
    """

    exact: int = 0
    rewritten: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered and encoded conversation, and what is needed to remember its answer.

    Attributes:
        ids: of the whole prompt.
        chars, digest: of its text.
        key: of the conversation up to the answer; None if an answer can't be remembered.
    """

    ids: list[int]
    chars: int = 0
    digest: bytes = b""
    key: bytes | None = None
    report: HistoryReport = field(default_factory=HistoryReport)


class AnswerHistory:
    """The latest answers, least recently used first, and reports of the latest requests.

    Event loop only; the answers themselves never change.
    """

    def __init__(self, *, max_tokens: int = MAX_TOKENS, max_answers: int = MAX_ANSWERS) -> None:
        """Remember at most `max_answers` answers with `max_tokens` tokens in all."""
        self._max_tokens = max_tokens
        self._max_answers = max_answers
        self._answers: OrderedDict[bytes, KnownAnswer] = OrderedDict()
        self._reports: OrderedDict[str, HistoryReport] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: bytes) -> KnownAnswer | None:
        """Return the answer of a conversation, and mark it used."""
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        return answer

    def remember(
        self,
        engine: AsyncEngine,
        prompts: PromptBuilder,
        prompt: ChatPrompt,
        message: TemplateMessage,
        answer: Answer,
        *,
        skip_special_tokens: bool,
    ) -> None:
        """Remember an answer that is complete, unless its ids don't spell the text that was given.

        Args:
            engine: that gave it.
            prompts: to decode with.
            prompt: what it answers.
            message: it, as the template takes it when it comes back.
            answer: its text and ids.
            skip_special_tokens: whether special tokens were left out of the text.
        """
        if prompt.key is None or not answer.token_ids:
            return
        text = answer.full_text()
        ids = list(answer.token_ids)
        if isinstance(answer.stop_reason, str):
            ids = served_ids(prompts, engine, ids, text, skip=skip_special_tokens)
        elif ids[-1] in engine.tokenizer.eos_token_ids or ids[-1] == answer.stop_reason:
            ids.pop()
        if not ids or prompts.decode(ids, skip_special_tokens=False) != text:
            return
        known = KnownAnswer(prompt.chars, prompt.digest, text, array("i", ids))
        key = _next_key(prompt.key, message)
        previous = self._answers.pop(key, None)
        if previous is not None:
            self.num_tokens -= len(previous.ids)
        self._answers[key] = known
        self.num_tokens += len(ids)
        while self.num_tokens > self._max_tokens or len(self._answers) > self._max_answers:
            _, oldest = self._answers.popitem(last=False)
            self.num_tokens -= len(oldest.ids)

    def report(self, request_id: str, report: HistoryReport) -> None:
        """Keep a request's report for `report_of`."""
        if not (report.exact or report.rewritten):
            return
        self._reports[request_id] = report
        while len(self._reports) > MAX_REPORTS:
            self._reports.popitem(last=False)

    def report_of(self, request_id: str) -> HistoryReport | None:
        """Return the report of a request; None if it had no remembered answers, or long ago."""
        return self._reports.get(request_id)


async def encode_chat(
    prompts: PromptBuilder,
    history: AnswerHistory,
    namespace: Namespace,
    messages: list[TemplateMessage],
    tools: list[dict[str, Any]] | None,
    *,
    add_generation_prompt: bool = True,
    continue_final: bool = False,
) -> ChatPrompt:
    """Return the prompt of a conversation, with the ids of the answers that are remembered.

    Args:
        prompts: renders and encodes, on a thread if the conversation is long.
        history: of the server.
        namespace: answers are remembered for each apart.
        messages: in the template's form.
        tools: in the template's form.
        add_generation_prompt: whether an answer is to begin.
        continue_final: whether the last message is to go on instead.

    Raises:
        ApiError: 400, too long, no chat template, or no last message that could go on.
        RequestRejectedError: the template refuses the messages, in its own words.
    """
    chars = sum(len(message["content"]) for message in messages)
    prompts.check_chars(chars, "messages")
    key = _first_key(namespace, tools)
    found: list[tuple[int, KnownAnswer]] = []
    messages = list(messages)
    for i, message in enumerate(messages):
        key = _next_key(key, message)
        if message["role"] == "assistant" and (known := history.get(key)) is not None:
            found.append((i, known))
            if not prompts.supports_tools:
                # Calls are text for such a template, so the model's own text can stand for them.
                messages[i] = {**message, "content": known.text}

    def work() -> ChatPrompt:
        if continue_final:
            text = prompts.render_open(messages, tools)
        else:
            text = prompts.render(messages, tools, add_generation_prompt=add_generation_prompt)
        prompts.check_chars(len(text), "messages")
        ids, digest, report = _encode(prompts, text, found)
        known = key if add_generation_prompt and not continue_final else None
        return ChatPrompt(ids, len(text), digest, known, report)

    return await prompts.offload(chars + (INLINE_CHARS if tools else 0), work)


def _encode(
    prompts: PromptBuilder, text: str, found: Sequence[tuple[int, KnownAnswer]]
) -> tuple[list[int], bytes, HistoryReport]:
    """Return the ids and the digest of `text`, and what became of the answers `found` in it."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    hashed = end = 0
    ids: list[int] = []
    rewritten: list[int] = []
    for index, known in found:
        start = known.prompt_chars
        matches = hashed <= start
        if matches:
            digest.update(text[hashed:start].encode(errors="surrogatepass"))
            hashed = start
            matches = digest.digest() == known.prompt_digest
        # Unequal before `end` can't be: there the text was compared already.
        if not (matches and start >= end and text.startswith(known.text, start)):
            rewritten.append(index)
            continue
        if start > end:
            ids += prompts.encode(text[end:start])
        ids += known.ids
        end = start + len(known.text)
    digest.update(text[hashed:].encode(errors="surrogatepass"))
    if not end:
        return prompts.encode(text), digest.digest(), HistoryReport(0, tuple(rewritten))
    if end < len(text):
        ids += prompts.encode(text[end:])
    if prompts.decode(ids, skip_special_tokens=False) != text:
        # Some tokenizers write a piece otherwise than the same text within another one.
        return prompts.encode(text), digest.digest(), HistoryReport(0, tuple(rewritten))
    exact = len(found) - len(rewritten)
    return ids, digest.digest(), HistoryReport(exact, tuple(rewritten))


def _first_key(namespace: Namespace, tools: list[dict[str, Any]] | None) -> bytes:
    return _hash(b"", [list(namespace), tools])


def _next_key(key: bytes, message: TemplateMessage) -> bytes:
    """Return the key of a conversation that goes on with `message`.

    Of a message, what it says counts, not what it is called: ids and names may be made up anew.
    What the template shows of them is compared with the text.
    """
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return _hash(key, [message["role"], message["content"], calls])


def _hash(key: bytes, value: Any) -> bytes:
    try:
        data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (TypeError, RecursionError):
        # Half a surrogate pair, or nested too deeply: equal to nothing that is remembered.
        data = secrets.token_bytes(DIGEST_BYTES)
    return hashlib.blake2b(key + data, digest_size=DIGEST_BYTES).digest()
