"""The chunks of a streamed chat completion, of a session or not."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from radixkv.server.dialogue import Dialogue
from radixkv.server.responses import ChatShape, TokenTexts
from radixkv.server.tool_parsers import TextPart

__all__ = ["chat_deltas"]


async def chat_deltas(
    dialogue: Dialogue, shape: ChatShape, tokens: TokenTexts, *, finish: bool = False
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the role chunks, and those of content and calls; the finish chunks too if `finish`."""
    answers = dialogue.answers
    for index in range(len(answers)):
        yield shape.role_chunk(index, answers)
    async for index, output, events in dialogue:
        logprobs = output.logprobs
        if logprobs and not events:
            events = [TextPart("")]
        for event in events:
            yield shape.delta_chunk(index, event, answers, tokens, logprobs)
            logprobs = None
        if finish and output.finish_reason is not None:
            yield shape.finish_chunk(index, dialogue.readers)
