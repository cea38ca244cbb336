"""One conversation: its turns, kept as text and as the very ids that the model saw and produced."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from radixkv.request import Namespace
from radixkv.server.errors import ApiError
from radixkv.server.generation import Generation
from radixkv.server.messages import TemplateMessage
from radixkv.server.session_tokens import TOKEN_BYTES, common_tokens, pack_tokens, unpack_tokens

__all__ = ["Draft", "Session", "SessionRecord", "Turn", "join_turns", "session_deleted"]

# Prompts whose answers were broken off, remembered to free what they left in the cache.
MAX_DRAFTS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One answered turn. Never changes, so forks share it with their parents.

    Attributes:
        messages: the new ones, the answer last.
        num_messages: messages of the conversation up to and with the answer.
        start: ids of the conversation that this turn kept. Nearly always all; fewer when an end
            token had to go, or when the template wrote the conversation anew.
        ids: what follows them, little-endian int32: the rest of the prompt, and the answer.
        num_tokens: ids of the conversation up to and with the answer.
        ended_by_token: the last of these ids is an end token, not text.
    """

    messages: tuple[TemplateMessage, ...]
    num_messages: int
    start: int
    ids: bytes
    num_tokens: int
    ended_by_token: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """The prompt of a turn that isn't answered yet, or whose answer was broken off.

    Attributes:
        num_turns: turns of the session before it.
        start: ids of these that it kept.
        ids: what follows them, little-endian int32.
    """

    num_turns: int
    start: int
    ids: bytes

    def tokens(self, turns: Sequence[Turn]) -> bytes:
        """Return the whole prompt, packed, given the turns of its session."""
        return join_turns(turns[: self.num_turns])[: self.start * TOKEN_BYTES] + self.ids


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What is kept of a session across restarts; a snapshot.

    Attributes:
        vocabulary: digest of what its ids mean, see `vocabulary_digest`.
        model: name of the model that answered it.
    """

    id: str
    namespace: Namespace
    created: float
    last_used: float
    parent: str | None
    system: str | None
    tools: list[dict[str, Any]] | None
    metadata: dict[str, str]
    turns: tuple[Turn, ...]
    pin_ttl_s: float | None
    pinned_until: float
    vocabulary: bytes
    model: str

    @property
    def key(self) -> tuple[str, str]:
        """Its tenant and id, unique together."""
        return (self.namespace[0] if self.namespace else "", self.id)


@dataclass(slots=True, eq=False)
class Session:
    """One conversation. Times are seconds since 1970.

    Attributes:
        id: "sess_" and 32 hex digits, or a name that the client chose.
        namespace: the cache namespace, fixed at creation; its tenant owns the session.
        vocabulary, model: see `SessionRecord`.
        turns: answered ones.
        busy: a turn is being answered.
        active: the running generation of that turn, once the engine accepted it.
        drafts: what was not answered, the running turn last.
        deleted: set by `SessionStore.delete`; a running turn then must not commit.
        pin_id: the pin made of it last, which may be gone.
        pin_ttl_s, pinned_until: of that pin, also after a restart has taken the pin itself.
    """

    id: str
    namespace: Namespace
    created: float
    vocabulary: bytes = b""
    model: str = ""
    parent: str | None = None
    system: str | None = None
    tools: list[dict[str, Any]] | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    busy: bool = False
    active: Generation | None = None
    drafts: list[Draft] = field(default_factory=list)
    deleted: bool = False
    last_used: float = 0.0
    pin_id: int | None = None
    pin_ttl_s: float | None = None
    pinned_until: float = 0.0
    _ticket: int = 0

    @property
    def tenant(self) -> str:
        """The tenant that made the session."""
        return self.namespace[0] if self.namespace else ""

    @property
    def key(self) -> tuple[str, str]:
        """Its tenant and id, unique together."""
        return self.tenant, self.id

    @property
    def messages(self) -> list[TemplateMessage]:
        """The history in the template's form, without the system prompt; a new list."""
        return [message for turn in self.turns for message in turn.messages]

    @property
    def num_messages(self) -> int:
        """Messages in the history."""
        return self.turns[-1].num_messages if self.turns else 0

    @property
    def num_tokens(self) -> int:
        """Ids of the whole history."""
        return self.turns[-1].num_tokens if self.turns else 0

    @property
    def token_ids(self) -> array[int]:
        """`[num_tokens]` int32 ids of every turn, a new array. Cost: O(tokens), a copy."""
        return unpack_tokens(self.packed_tokens())

    def packed_tokens(self, num_turns: int | None = None) -> bytes:
        """Return the ids of the first `num_turns` turns (None: all) as little-endian int32."""
        return join_turns(self.turns[:num_turns])

    def begin_turn(self) -> int:
        """Take the session for one turn; return a ticket for `end_turn`.

        Raises:
            ApiError: 409, when another turn is being answered.
        """
        if self.busy:
            raise ApiError(
                409,
                "Another turn of this session is being answered; wait for it or fork the session",
                code="session_busy",
            )
        self.busy = True
        self._ticket += 1
        return self._ticket

    def commit_turn(
        self,
        messages: Sequence[TemplateMessage],
        prompt_ids: Sequence[int],
        ids: Sequence[int],
        *,
        ended_by_token: bool,
    ) -> Turn:
        """Append an answered turn: its messages with the answer, and all ids up to its end.

        Args:
            messages: the new messages, the assistant's answer last.
            prompt_ids: the whole prompt of the turn; replaces the ids kept so far.
            ids: the ids of the answer.
            ended_by_token: the last of `ids` is an end token.

        Raises:
            ApiError: 409, when the session was deleted meanwhile.
        """
        if self.deleted:
            raise session_deleted()
        before, after = self.packed_tokens(), pack_tokens([*prompt_ids, *ids])
        start = common_tokens(before, after)
        turn = Turn(
            tuple(messages),
            self.num_messages + len(messages),
            start,
            after[start * TOKEN_BYTES :],
            len(after) // TOKEN_BYTES,
            ended_by_token,
        )
        self.turns.append(turn)
        return turn

    def end_turn(self, ticket: int) -> None:
        """Give the session back, whether or not the turn was committed.

        Nothing happens if it was given back and taken again meanwhile.
        """
        if ticket == self._ticket:
            self.busy = False
            self.active = None

    def add_draft(self, prompt_ids: Sequence[int]) -> Draft:
        """Note the prompt of a turn whose answer begins."""
        before, tokens = self.packed_tokens(), pack_tokens(prompt_ids)
        start = common_tokens(before, tokens)
        draft = Draft(len(self.turns), start, tokens[start * TOKEN_BYTES :])
        self.drafts.append(draft)
        del self.drafts[:-MAX_DRAFTS]
        return draft

    def drop_draft(self, draft: Draft) -> None:
        """Forget a prompt that is part of the history now."""
        self.drafts = [other for other in self.drafts if other is not draft]

    def history(self) -> list[TemplateMessage]:
        """Return the system prompt and every message so far, as a new list."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def record(self) -> SessionRecord:
        """Return a snapshot of what is kept across restarts."""
        return SessionRecord(
            id=self.id,
            namespace=self.namespace,
            created=self.created,
            last_used=self.last_used,
            parent=self.parent,
            system=self.system,
            tools=self.tools,
            metadata=self.metadata,
            turns=tuple(self.turns),
            pin_ttl_s=self.pin_ttl_s,
            pinned_until=self.pinned_until,
            vocabulary=self.vocabulary,
            model=self.model,
        )

    @classmethod
    def restored(cls, record: SessionRecord) -> Session:
        """Return the session of a snapshot."""
        return cls(
            id=record.id,
            namespace=record.namespace,
            created=record.created,
            last_used=record.last_used,
            parent=record.parent,
            system=record.system,
            tools=record.tools,
            metadata=record.metadata,
            turns=list(record.turns),
            pin_ttl_s=record.pin_ttl_s,
            pinned_until=record.pinned_until,
            vocabulary=record.vocabulary,
            model=record.model,
        )


def join_turns(turns: Sequence[Turn]) -> bytes:
    """Return the ids at the end of a run of turns that begins with the first one, packed."""
    joined = bytearray()
    for turn in turns:
        del joined[turn.start * TOKEN_BYTES :]
        joined += turn.ids
    return bytes(joined)


def session_deleted() -> ApiError:
    """Return the error of a turn whose session was deleted while it was being answered."""
    return ApiError(
        409, "The session was deleted while this turn was being answered", code="session_deleted"
    )
