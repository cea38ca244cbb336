"""The prompt of a session's next turn: its kept ids, and the ids of the new text alone.

Policies:

- What the model generated stays in the session as it was generated, reasoning included. Text that
  would encode otherwise, or that the template would rewrite in a history, is never encoded again.
- An answer ended by a stop string is kept up to the text the client got, not with the stop string.
- An answer ended by an end token that is not how the template closes a turn loses that token.
- A template that does not show an assistant's text verbatim cannot be continued; then the whole
  conversation is rendered and encoded afresh, as for a stateless request.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from radixkv.server.messages import TemplateMessage
from radixkv.server.prompts import INLINE_CHARS, PromptBuilder

if TYPE_CHECKING:
    from radixkv.engine import AsyncEngine
    from radixkv.server.sessions import Session

__all__ = ["next_prompt", "served_ids"]


async def next_prompt(
    engine: AsyncEngine,
    prompts: PromptBuilder,
    session: Session,
    new_messages: list[TemplateMessage],
) -> list[int]:
    """Return the ids of the session's next prompt. Does not modify the session.

    Cost: one render of the conversation, and the encoding of the new messages.

    Raises:
        ApiError: 400, the new text cannot fit the context.
        RequestRejectedError: the template refuses the conversation.
    """
    history = session.history()
    if not session.turns:
        return await prompts.encode_chat([*history, *new_messages], session.tools)
    chars = sum(len(message["content"]) for message in new_messages)
    prompts.check_chars(chars, "content")
    # The last message of the history is the answer whose ids are kept.
    before = history[:-1]

    def work() -> list[int] | None:
        suffix = _text_after_answer(prompts, session, before, new_messages)
        return None if suffix is None else _join(engine, session, suffix)

    # Rendering walks the whole history, so its length decides whether a thread is worth it.
    history_chars = INLINE_CHARS * (len(session.token_ids) // 1024)
    ids = await prompts.offload(chars + history_chars, work)
    if ids is None:
        return await prompts.encode_chat([*history, *new_messages], session.tools)
    return ids


def served_ids(
    prompts: PromptBuilder, engine: AsyncEngine, ids: Sequence[int], text: str, *, skip: bool
) -> list[int]:
    """Return the ids of an answer cut to `text`, which a stop string ended.

    The longest run of generated ids that decodes to a beginning of `text` is kept; the rest of
    `text`, when the stop string began inside a token, is encoded. O(len(stop) * len(ids)).

    Args:
        skip: whether `text` was made without special tokens.
    """
    kept = len(ids)
    while kept:
        part = prompts.decode(ids[:kept], skip_special_tokens=skip)
        if text.startswith(part):
            break
        kept -= 1
    else:
        part = ""
    rest = text[len(part) :]
    tail = engine.tokenizer.encode(rest, add_special_tokens=False) if rest else []
    return [*ids[:kept], *tail]


def _text_after_answer(
    prompts: PromptBuilder,
    session: Session,
    before: list[TemplateMessage],
    new_messages: list[TemplateMessage],
) -> str | None:
    """Return what the template writes after an assistant's text; None if it rewrites such text."""
    # Random, so that no message of a client can contain it.
    marker = f"answer-{secrets.token_hex(12)}"
    rendered = prompts.render(
        [*before, {"role": "assistant", "content": marker}, *new_messages], session.tools
    )
    parts = rendered.split(marker)
    return parts[1] if len(parts) == 2 else None


def _join(engine: AsyncEngine, session: Session, suffix: str) -> list[int]:
    """Return the kept ids and those of `suffix`, with the end of the turn written exactly once."""
    tokenizer = engine.tokenizer
    ids = session.token_ids.tolist()
    if session.turns[-1].ended_by_token:
        end = tokenizer.token_str(ids[-1])
        if end and suffix.startswith(end):
            suffix = suffix[len(end) :]
        elif ids[-1] in tokenizer.eos_token_ids:
            ids.pop()
    ids.extend(tokenizer.encode(suffix, add_special_tokens=False))
    return ids
