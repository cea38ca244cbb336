"""What is told of requests while they live, and of the latest ones afterwards; no text of any."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from radixkv.request import FinishReason, RequestTimings

if TYPE_CHECKING:
    from radixkv.engine import RequestProgress
    from radixkv.server.generation import Answer

__all__ = ["ENDED_STATES", "STATES", "RequestLog", "RequestRecord", "SessionUsage"]

logger = logging.getLogger(__name__)

ENDED_STATES = ("finished", "failed", "aborted")
STATES = ("waiting", "prefill", "decode", *ENDED_STATES)
MAX_RECENT = 1000
MAX_SESSIONS = 1000


class Timed(Protocol):
    """The stream of a request: whoever writes its times may put another object in their place."""

    timings: RequestTimings


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request to the engine. A completion with several prompts makes several.

    Attributes:
        id: as the client knows it; with the number of the prompt, if there are several.
        engine_id: the engine's name for it.
        request_id: the `X-Request-ID` of the HTTP request.
        api: "chat", "completions", "responses", "messages", "session" or "warm".
        namespace: label of its cache namespace.
        session_id: of the session whose turn it is.
        arrived_at: seconds since 1970.
        arrival, first_scheduled, first_token, last_token, finished: seconds of the monotonic clock.
        prompt_tokens: of its prompt.
        n: answers asked for.
        state: "waiting" until it ends; what it does in between only the engine knows.
        cached_tokens: of the prompt, reused; None before that is known.
        output_tokens: of all answers.
        itl_s: mean seconds between two tokens of an answer; None before the second one.
        trace_id: of the trace that it is in, if traces are made.
    """

    id: str
    engine_id: str
    request_id: str
    api: str
    model: str
    namespace: str
    tenant: str
    session_id: str | None
    prompt_tokens: int
    n: int = 1
    arrived_at: float = 0.0
    arrival: float = 0.0
    state: str = "waiting"
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    itl_s: float | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    preemptions: int = 0
    trace_id: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    def note_times(self, timings: RequestTimings) -> None:
        """Take over what the engine has measured so far."""
        # Not yet set where the engine's thread has not seen the request.
        self.arrival = timings.arrival or self.arrival
        self.first_scheduled = timings.first_scheduled
        self.first_token = timings.first_token
        self.last_token = timings.last_token
        self.preemptions = timings.num_preemptions
        gaps = timings.inter_token
        self.itl_s = sum(gaps) / len(gaps) if gaps else None

    def note_progress(self, progress: RequestProgress) -> None:
        """Take over how far it is."""
        self.state = progress.state
        self.cached_tokens = progress.num_cached_tokens
        self.output_tokens = progress.num_output_tokens

    def note_answers(self, answers: Sequence[Answer]) -> None:
        """Take over what has come of its answers."""
        self.output_tokens = sum(answer.num_completion_tokens for answer in answers)
        if answers[0].num_prompt_tokens:  # an increment has come
            self.cached_tokens = answers[0].num_cached_tokens

    def note_end(self, answers: Sequence[Answer], now: float) -> None:
        """Note how it ended."""
        self.note_answers(answers)
        reasons = {answer.finish_reason for answer in answers}
        if reasons & {"error", "timeout"}:
            self.state = "failed"
            self.finish_reason = "error" if "error" in reasons else "timeout"
        elif reasons & {"abort", None}:
            self.state, self.finish_reason = "aborted", "abort"
        else:
            self.state, self.finish_reason = "finished", answers[0].finish_reason
        self.finished = now

    def view(self, now: float) -> dict[str, Any]:
        """Return it as `/admin/requests` shows it.

        Args:
            now: seconds of the monotonic clock, for what goes on.
        """
        end = now if self.finished is None else self.finished
        scheduled = end if self.first_scheduled is None else self.first_scheduled
        return {
            "id": self.id,
            "api": self.api,
            "model": self.model,
            "namespace": self.namespace,
            "tenant": self.tenant,
            "session_id": self.session_id,
            "state": self.state,
            "finish_reason": self.finish_reason,
            "arrived_at": self.arrived_at,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "queue_s": _rounded(scheduled - self.arrival),
            "ttft_s": _rounded(self.ttft_s),
            "itl_s": _rounded(self.itl_s),
            "total_s": _rounded(end - self.arrival),
            "preemptions": self.preemptions,
        }


@dataclass(slots=True)
class SessionUsage:
    """What the turns of one session took, those that ended."""

    turns: int = 0
    tokens_looked_up: int = 0
    tokens_hit: int = 0
    tokens_generated: int = 0

    def add(self, record: RequestRecord) -> None:
        """Count a turn that was admitted."""
        self.turns += 1
        self.tokens_looked_up += record.prompt_tokens
        self.tokens_hit += record.cached_tokens or 0
        self.tokens_generated += record.output_tokens


class RequestLog:
    """Owns the records of live requests and of the latest that ended. Event loop only.

    Bounded: as many live ones as the engine takes, `capacity` ended ones, and the counts of the
    `max_sessions` sessions used latest. Nothing here can fail a request: what goes wrong is logged.
    """

    def __init__(self, capacity: int = MAX_RECENT, max_sessions: int = MAX_SESSIONS) -> None:
        self._live: dict[str, tuple[RequestRecord, Timed, Sequence[Answer]]] = {}
        self._recent: deque[RequestRecord] = deque(maxlen=capacity)
        self._sessions: OrderedDict[str, SessionUsage] = OrderedDict()
        self._max_sessions = max_sessions

    def __len__(self) -> int:
        return len(self._live) + len(self._recent)

    @property
    def sessions(self) -> OrderedDict[str, SessionUsage]:
        """Counts by session, the one used latest last."""
        return self._sessions

    def begin(self, record: RequestRecord, stream: Timed, answers: Sequence[Answer]) -> None:
        """Take a request that the engine has accepted.

        Args:
            record: of it; it arrives now.
            stream: whose times are the engine's.
            answers: all of its choices, which grow.
        """
        record.arrived_at, record.arrival = time.time(), time.monotonic()
        self._live[record.engine_id] = record, stream, answers

    def end(self, record: RequestRecord) -> None:
        """Note the end of a request, whatever it is. Idempotent."""
        if record.engine_id not in self._live:
            return
        _, stream, answers = self._live.pop(record.engine_id)
        try:
            record.note_times(stream.timings)
            record.note_end(answers, time.monotonic())
            if record.session_id is not None and record.cached_tokens is not None:
                self._count_turn(record.session_id, record)
        except Exception:
            logger.exception("the end of request %s could not be recorded", record.engine_id)
        self._recent.append(record)

    def live(self, progress: Mapping[str, RequestProgress]) -> Iterator[RequestRecord]:
        """Yield the live requests, latest first, each brought up to date.

        Args:
            progress: by the engine's names; who isn't in it has not begun, or has ended there.
        """
        for engine_id, (record, stream, answers) in reversed(self._live.items()):
            record.note_times(stream.timings)
            if engine_id in progress:
                record.note_progress(progress[engine_id])
            else:
                record.note_answers(answers)
                record.state = "waiting" if record.first_token is None else "decode"
            yield record

    def recent(self) -> Iterator[RequestRecord]:
        """Yield the latest that ended, latest first."""
        return reversed(self._recent)

    def _count_turn(self, session_id: str, record: RequestRecord) -> None:
        usage = self._sessions.setdefault(session_id, SessionUsage())
        usage.add(record)
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(0.0, seconds), 6)
