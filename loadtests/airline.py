"""Recorded conversations of a tool-calling airline agent, as chat requests without tools."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Conversation", "data_dir", "load_conversations", "read_conversations"]

Message = dict[str, Any]
Conversation = list[list[Message]]
"""The message list of each turn's request; each begins with the one before."""


def data_dir() -> Path:
    """Return the folder of recorded workloads: RADIXKV_DATA, or `../shared/data`."""
    return Path(os.environ.get("RADIXKV_DATA", "../shared/data"))


def load_conversations(count: int, turns: int, folder: Path | None = None) -> list[Conversation]:
    """Return the first `turns` requests of the first `count` conversations.

    For models whose chat template knows no tools: the tools are JSON after the system prompt, a
    tool call is JSON in the assistant's content, and a tool's answer is a user message.

    Raises:
        FileNotFoundError: the recordings are not there.
    """
    folder = folder or data_dir()
    tools = folder / "airline_tools.json"
    return read_conversations(folder / "airline_agent.jsonl", count, turns, tools)


def read_conversations(
    path: Path, count: int, turns: int, tools_path: Path | None = None
) -> list[Conversation]:
    """Return the same of any file of that form, `{"messages": [...]}` a line.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a line isn't of that form.
    """
    tools = json.loads(tools_path.read_text(encoding="utf-8")) if tools_path else None
    conversations: list[Conversation] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(conversations) == count:
                break
            try:
                messages = list(_flatten(json.loads(line)["messages"], tools))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}:{number}: not a conversation ({error!r})") from None
            ends = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
            conversations.append([messages[:end] for end in ends[:turns]])
    return conversations


def _flatten(messages: list[Message], tools: list[Message] | None) -> Iterator[Message]:
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "system" and tools is not None:
            content = f"{content}\n\n{json.dumps(tools)}"
        elif role == "assistant":
            calls = [json.dumps(call["function"]) for call in message.get("tool_calls") or ()]
            content = "\n".join([content, *calls] if content else calls)
        elif role == "tool":
            role = "user"
        yield {"role": role, "content": content}
