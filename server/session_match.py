"""What is new in the messages that a chat completion sends to a session.

Some clients send new messages only, others the whole conversation each time. Both are understood:

- A leading system message is the session's system prompt: the first turn sets it, and later it must
  be the same, or left out.
- Messages without an assistant's among them are new.
- Messages with an assistant's must begin with the whole history; what follows is new. They are
  compared by role, text and tool calls, as they stand in the history, and not by ids and names. Of
  an assistant's text, white space at both ends doesn't count.
- Anything else contradicts the history and is refused: a session has one past. To answer another
  message in the place of an earlier one, roll back or fork.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixkv.server.errors import ApiError
from radixkv.server.messages import TemplateMessage
from radixkv.server.session_state import Session

__all__ = ["TURN_ROLES", "check_tools", "new_messages", "refuse_role"]

TURN_ROLES = frozenset({"user", "tool"})
FIELD = "messages"


def new_messages(
    session: Session, given: Sequence[TemplateMessage]
) -> tuple[str | None, list[TemplateMessage]]:
    """Return the session's system prompt, and those of `given` that are not in its history.

    Args:
        session: with or without turns; isn't changed.
        given: in the template's form, not empty.

    Raises:
        ApiError: 409, they contradict the history; 400, nothing is new, or has a wrong role.
    """
    system, rest, skipped = session.system, list(given), 0
    if rest[0]["role"] == "system":
        text = rest[0]["content"]
        if session.system is None and not session.turns:
            system = text or None
        elif text != (session.system or ""):
            raise _conflict(f"{FIELD}[0] is not the session's system prompt", f"{FIELD}[0]")
        rest, skipped = rest[1:], 1
    if session.turns:
        if any(message["role"] == "assistant" for message in rest):
            known = session.messages
            _check_history(session, known, rest, skipped)
            rest, skipped = rest[len(known) :], skipped + len(known)
        for index, message in enumerate(rest):
            if message["role"] not in TURN_ROLES:
                raise refuse_role(f"{FIELD}[{skipped + index}]", message["role"])
    if not rest:
        raise ApiError(
            400,
            f"{FIELD} has nothing that is not in the session's history already",
            param=FIELD,
            code="nothing_new",
        )
    return system, rest


def check_tools(
    session: Session, tools: list[dict[str, Any]] | None
) -> list[dict[str, Any]] | None:
    """Return the tools of a turn: the session's, or those given if it has no turns and none yet.

    Raises:
        ApiError: 409, others are given than the session has.
    """
    if tools is None or tools == session.tools:
        return session.tools
    if session.turns or session.tools is not None:
        raise _conflict("tools are not those of the session, which stay the same", "tools")
    return tools


def refuse_role(where: str, role: str) -> ApiError:
    """Return the error of a message that can't be part of a turn."""
    return ApiError(
        400,
        f"{where}: a turn takes messages of role user or tool, got {role[:64]!r}",
        param=where,
        code="invalid_value",
    )


def _check_history(
    session: Session,
    known: Sequence[TemplateMessage],
    given: Sequence[TemplateMessage],
    skipped: int,
) -> None:
    for index, (old, new) in enumerate(zip(known, given, strict=False)):
        if _meaning(old) != _meaning(new):
            where = f"{FIELD}[{skipped + index}]"
            turn = sum(turn.num_messages <= index for turn in session.turns)
            raise _conflict(
                f"{where} is not message {index} of the session's history; roll the session back "
                f"to turn {turn}, or fork it there, to go on from before it",
                where,
            )
    if len(given) < len(known):
        raise _conflict(
            f"{FIELD} repeats {len(given)} of the {len(known)} messages of the session's history; "
            "send new messages only, or all of it",
            FIELD,
        )


def _meaning(message: TemplateMessage) -> tuple[str, str, list[Any]]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    text = message["content"]
    return message["role"], text.strip() if message["role"] == "assistant" else text, calls


def _conflict(message: str, param: str) -> ApiError:
    return ApiError(409, message, param=param, code="session_conflict")
