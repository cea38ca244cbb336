"""A tokenizer of bytes and an engine without a model, for tests of the HTTP layer."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
import time
import uuid
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import ClientResponse

from radixkv.engine import (
    EngineHealth,
    EngineStats,
    RequestProgress,
    SessionKV,
    SessionUsage,
)
from radixkv.errors import (
    CacheCorruptionError,
    ContextLengthError,
    EngineClosedError,
    QueueFullError,
    RequestRejectedError,
)
from radixkv.request import (
    GrammarSpec,
    Namespace,
    RequestOutput,
    RequestTimings,
    SamplingParams,
    TokenLogprob,
)

END, START, STOP, PAIR = 256, 257, 258, 259
SPECIAL = {END: "<|endoftext|>", START: "<|im_start|>", STOP: "<|im_end|>"}
VOCAB = 260

Template = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool], str]


def chatml(messages: list[dict[str, Any]], tools: object, add_generation_prompt: bool) -> str:
    """A template that knows nothing of tools."""
    text = "".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages if "content" in m
    )
    return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def chatml_tools(messages: list[dict[str, Any]], tools: object, add_generation_prompt: bool) -> str:
    """A template that renders tools, tool calls and tool answers."""
    head = f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n" if tools else ""
    shown = []
    for m in messages:
        calls = "".join(f"<call>{json.dumps(c['function'])}" for c in m.get("tool_calls", ()))
        shown.append({"role": m["role"], "content": m["content"] + calls})
    return head + chatml(shown, None, add_generation_prompt)


def hermes(messages: list[dict[str, Any]], tools: object, add_generation_prompt: bool) -> str:
    """A template as Qwen's is: calls and answers of tools in tags, thoughts dropped."""
    shown = []
    for m in messages:
        content = re.sub(r"<think>.*?</think>", "", m["content"], flags=re.DOTALL)
        calls = [
            f"<tool_call>\n{json.dumps(c['function'], ensure_ascii=False)}\n</tool_call>"
            for c in m.get("tool_calls", ())
        ]
        shown.append({**m, "content": "\n".join([content] * bool(content) + calls)})
    head = f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n" if tools else ""
    return head + chatml(shown, None, add_generation_prompt)


class FakeTokenizer:
    """Ids 0 to 255 are bytes; then three special tokens, and one token for two line breaks."""

    eos_token_ids = frozenset({END, STOP})
    special_token_ids = frozenset(SPECIAL)
    vocab_size = VOCAB
    max_token_chars = 13

    def __init__(
        self,
        template: Template | None = chatml,
        *,
        supports_tools: bool = False,
        chat_template: str = "",
    ) -> None:
        self.template = template
        self.chat_template = chat_template
        self.template_supports_tools = supports_tools
        self.encoded: list[str] = []

    @property
    def has_chat_template(self) -> bool:
        return self.template is not None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self.encoded.append(text)
        named = {name: i for i, name in SPECIAL.items()} | {"\n\n": PAIR}
        ids: list[int] = []
        for piece in re.split("(" + "|".join(map(re.escape, named)) + ")", text):
            ids.extend([named[piece]] if piece in named else piece.encode())
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = (i for i in ids if not (skip_special_tokens and i in SPECIAL))
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return SPECIAL.get(token_id, "\n\n").encode()

    def token_str(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        assert self.template is not None
        if messages[0]["role"] == "assistant":
            raise RequestRejectedError("the first message must not be answered", param="messages")
        return self.template(messages, tools, add_generation_prompt)


class FakeStream:
    """One request's increments, as the engine delivers them."""

    def __init__(self, engine: FakeEngine, ids: list[int], params: SamplingParams) -> None:
        self.request_id = uuid.uuid4().hex
        self.timings = RequestTimings(arrival=time.monotonic())
        self.engine = engine
        self.prompt = ids
        self.params = params
        self.namespace: Namespace = ()
        self.out: list[int] = []
        self.cached = -1
        self.text = ""
        self.sent = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.done = False
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.done and self._outputs.empty():
            raise StopAsyncIteration
        return await self._outputs.get()

    def abort(self) -> None:
        self.engine.finish(self, "abort")

    def emit(self, text: str = "", ids: tuple[int, ...] = (), **fields: Any) -> None:
        self._outputs.put_nowait(
            RequestOutput(
                text=text,
                token_ids=ids,
                num_prompt_tokens=len(self.prompt),
                num_cached_tokens=max(0, self.cached),
                num_completion_tokens=len(self.out),
                **fields,
            )
        )


class FakeControl:
    """Of an engine without a cache: conversations hold nothing in it."""

    async def session_usage(self, sessions: Sequence[SessionKV]) -> list[SessionUsage]:
        return [SessionUsage() for _ in sessions]

    async def release_session(self, session: SessionKV) -> int:
        return 0


class FakeEngine:
    """Answers with `script` (token ids) and then letters that hash the whole history.

    Knobs: `gate` holds all steps while it is cleared; `fail_at` makes a request fail at its n-th
    token; `dead` and `corrupt` break the health and the integrity check.
    """

    model_name = "fake"
    vocab_size = VOCAB
    block_size = 16

    def __init__(
        self,
        tokenizer: FakeTokenizer | None = None,
        *,
        max_model_len: int = 4096,
        max_running: int = 16,
        max_waiting: int = 64,
        step_s: float = 0.0,
    ) -> None:
        self.tokenizer = tokenizer or FakeTokenizer()
        self.control = FakeControl()
        self.max_model_len = max_model_len
        self.max_running, self.max_waiting, self.step_s = max_running, max_waiting, step_s
        self.script: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail_at: int | None = None
        self.dead = self.corrupt = self.accepting = False
        self.seconds_in_step = 0.0
        self.waiting: deque[FakeStream] = deque()
        self.running: list[FakeStream] = []
        self.filed: dict[Namespace, list[list[int]]] = {}
        self.finished: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.submitted: list[FakeStream] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.accepting = True
        self._task = asyncio.create_task(self._loop())

    async def shutdown(self, drain_timeout_s: float) -> None:
        self.accepting = False
        deadline = time.monotonic() + drain_timeout_s
        while time.monotonic() < deadline:
            if not (self.running or self.waiting):
                break
            await asyncio.sleep(0.005)
        for stream in [*self.running, *self.waiting]:
            self.finish(stream, "abort")
        if self._task is not None:
            self._task.cancel()

    def stop_saving(self) -> None:
        """It has nothing to save."""

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        namespace: Namespace = (),
        request_id: str | None = None,
        grammar: object = None,
    ) -> FakeStream:
        if not self.accepting or self.dead:
            raise EngineClosedError("the engine is closed")
        if len(prompt_token_ids) >= self.max_model_len:
            self.counts["rejected"] += 1
            raise ContextLengthError(len(prompt_token_ids), self.max_model_len)
        if len(self.waiting) >= self.max_waiting:
            self.counts["rejected"] += 1
            raise QueueFullError("too many requests wait", retry_after_s=1.5)
        stream = FakeStream(self, list(prompt_token_ids), params)
        stream.namespace = namespace
        stream.request_id = request_id or stream.request_id
        self.waiting.append(stream)
        self.submitted.append(stream)
        return stream

    async def compile_grammar(self, spec: GrammarSpec) -> object:
        return spec

    def finish(self, stream: FakeStream, reason: str, text: str = "", **fields: Any) -> None:
        """End a request once; what it computed stays cached, its last token has no KV."""
        if stream.done:
            return
        stream.done = True
        stream.timings.finished = time.monotonic()
        if stream in self.running:
            self.running.remove(stream)
            self.filed.setdefault(stream.namespace, []).append([*stream.prompt, *stream.out[:-1]])
        else:
            self.waiting.remove(stream)
        self.finished[reason] += 1
        stream.emit(text, finish_reason=reason, **fields)

    async def _loop(self) -> None:
        while True:
            await self.gate.wait()
            while self.waiting and len(self.running) < self.max_running:
                self._admit(self.waiting.popleft())
            for stream in list(self.running):
                self._step(stream)
            await asyncio.sleep(self.step_s)

    def _admit(self, stream: FakeStream) -> None:
        hits = [_common(stream.prompt, old) for old in self.filed.get(stream.namespace, [])]
        stream.cached = min(max(hits, default=0), len(stream.prompt) - 1)
        stream.timings.first_scheduled = time.monotonic()
        self.counts["looked_up"] += len(stream.prompt)
        self.counts["hit"] += stream.cached
        self.running.append(stream)

    def _step(self, stream: FakeStream) -> None:
        params, n = stream.params, len(stream.out)
        now = time.monotonic()
        if self.fail_at == n:
            return self.finish(stream, "error", error="injected")
        token = (
            self.script[n]
            if n < len(self.script)
            else 97 + zlib.crc32(repr([*stream.prompt, *stream.out]).encode()) % 26
        )
        stream.out.append(token)
        stream.timings.first_token = stream.timings.first_token or now
        stream.timings.last_token = now
        logprobs = None
        if params.logprobs is not None:
            top = tuple((token + k, -0.5 - k) for k in range(params.logprobs))
            logprobs = (TokenLogprob(token, -0.5, top),)
        ends = token in (*params.stop_token_ids, *self.tokenizer.eos_token_ids)
        ended = ends and not params.ignore_eos and n >= params.min_tokens
        hidden = ended or (params.skip_special_tokens and token in SPECIAL)
        limit = min(params.max_tokens or 10**9, self.max_model_len - len(stream.prompt))
        last = ended or len(stream.out) >= limit
        new = b"" if hidden else self.tokenizer.token_bytes(token)
        stream.text += stream.decoder.decode(new, final=last)
        found = [(at, s) for s in params.stop if (at := stream.text.find(s)) >= 0]
        if found:
            at, stop = min(found)
            text, stream.sent = stream.text[stream.sent : at], at
            stream.emit(text, (token,), logprobs=logprobs)
            return self.finish(stream, "stop", stop_reason=stop)
        held = 0 if last else max((_overlap(stream.text, s) for s in params.stop), default=0)
        text = stream.text[stream.sent : len(stream.text) - held]
        stream.sent += len(text)
        stream.emit(text, (token,), logprobs=logprobs)
        if last:
            reason = token if ended and token in params.stop_token_ids else None
            self.finish(stream, "stop" if ended else "length", stop_reason=reason)
        return None

    def health(self) -> EngineHealth:
        return EngineHealth(
            alive=not self.dead,
            accepting=self.accepting and not self.dead,
            busy=bool(self.running or self.waiting),
            seconds_in_step=self.seconds_in_step,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
        )

    def progress(self) -> dict[str, RequestProgress]:
        waiting = {s.request_id: RequestProgress("waiting", None, 0) for s in self.waiting}
        return waiting | {
            s.request_id: RequestProgress("decode", s.cached, len(s.out)) for s in self.running
        }

    def stats(self) -> EngineStats:
        looked_up, hit = self.counts["looked_up"], self.counts["hit"]
        window = {"looked_up": looked_up, "hit": hit, "hit_rate": hit / looked_up if hit else None}
        return EngineStats(
            uptime_s=1.0,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            oldest_wait_s=0.0,
            tokens_looked_up=looked_up,
            tokens_hit=hit,
            tokens_rehit=0,
            tokens_computed=looked_up - hit,
            tokens_recomputed=0,
            tokens_generated=sum(len(s.out) for s in self.submitted),
            requests_admitted=len(self.submitted) - len(self.waiting),
            requests_rejected=self.counts["rejected"],
            requests_finished=dict(self.finished),
            preemptions=0,
            block_size=16,
            bytes_per_block=1024,
            blocks_total=100,
            blocks_free=60,
            blocks_cached=30,
            blocks_referenced=10,
            evicted_blocks=3,
            copied_blocks=2,
            nodes=5,
            leaves=4,
            steps=7,
            step_time_s=0.5,
            last_step_age_s=0.1,
            windows={"1m": window, "5m": window, "all": window},
            namespaces={"default": window},
        )

    async def check_integrity(self) -> None:
        if self.corrupt:
            raise CacheCorruptionError("block 7 is in two nodes")

    async def flush_cache(self) -> int:
        if self.running or self.waiting:
            raise RequestRejectedError("the cache is in use: 10 blocks are held", code="busy")
        freed = len(self.filed)
        self.filed.clear()
        return freed


async def read_events(response: ClientResponse) -> list[Any]:
    """Return the payloads of an event stream: parsed JSON, and "[DONE]" as it is."""
    assert response.content_type == "text/event-stream"
    text = (await response.read()).decode()
    payloads = [part[6:] for part in text.split("\n\n") if part.startswith("data: ")]
    return [p if p == "[DONE]" else json.loads(p) for p in payloads]


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Wait until `condition` holds; fail if it does not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.005)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _overlap(text: str, stop: str) -> int:
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
