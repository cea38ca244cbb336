"""The discrete-event engine: iteration-level scheduling over a memory manager."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from radixkv.simulate.arrivals import Arrivals
from radixkv.simulate.managers import Allocation, MemoryManager
from radixkv.simulate.managers.radix import RadixTreeBlocks
from radixkv.simulate.outcome import Outcome, Recorder
from radixkv.simulate.step_time import StepTime
from radixkv.simulate.traffic import Request

__all__ = ["Job", "SchedulerOptions", "Simulation"]


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """How steps are made.

    Attributes:
        max_batch_tokens: tokens a step computes at most; longer prompts go in chunks.
        max_seqs: answers that run at once at most.
        swap: move the KV of a preempted request to the host instead of computing it again.
        max_sessions: sessions that clients have open at once; None is all.
    """

    max_batch_tokens: int = 8192
    max_seqs: int = 256
    swap: bool = False
    max_sessions: int | None = None


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way.

    Attributes:
        index: of the request.
        stored: tokens of the answer (of each sample) in memory when it started to decode.
        to_compute: prompt tokens that are left.
        begin: the step in which it decodes first.
        is_decoding: whether its prompt is computed.
        swapped: tokens of its KV that are in the host's memory.
    """

    index: int
    request: Request
    stored: int = 0
    to_compute: int = 0
    begin: int = 0
    is_decoding: bool = False
    swapped: int = 0
    allocation: Allocation | None = None
    first_token: float = math.nan


Event = tuple[int, int, int, Job, Allocation]
"""The step it is due before, the request's index, a serial number, and whose it is."""


@dataclass(slots=True)
class _Load:
    """What a step does for prompts."""

    tokens: int = 0
    attended: float = 0.0
    context: float = 0.0
    extra_s: float = 0.0


class Simulation:
    """Plays requests against a memory manager.

    First come, first served: the head of the queue waits until it fits, and nobody passes it. A
    step computes a token of each answer that decodes, and chunks of prompts up to the token budget.
    Who finds no memory to grow preempts the request that was admitted last. Steps in which nothing
    but decoding happens are taken together, with the same result as one by one.

    Attributes:
        now: seconds.
        step: steps so far.
        generated: tokens stored behind the prompts of those that decode.
        waiting: who isn't admitted, in order.
        jobs: who is, in order of admission.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        manager: MemoryManager,
        step_time: StepTime,
        options: SchedulerOptions | None = None,
        *,
        observer: Callable[[Simulation], None] | None = None,
    ) -> None:
        """Make a simulation.

        Args:
            requests: in order of arrival.
            manager: of the memory; empty.
            step_time: what steps take.
            options: of the scheduler.
            observer: called after each stretch of steps.
        """
        self.requests = requests
        self.manager = manager
        self.step_time = step_time
        self.options = options or SchedulerOptions()
        self.observer = observer
        self.now = 0.0
        self.step = 0
        self.generated = 0
        self.num_decoding = 0  # answers
        self.num_seqs = 0  # answers, of prompts being computed too
        self.waiting: deque[Job] = deque()
        self.jobs: dict[Job, None] = {}
        self.recorder = Recorder(requests, manager.total)
        self._arrivals = Arrivals(requests, self.options.max_sessions)
        self._context = 0  # tokens that those who decode attend to
        self._prefilling: deque[Job] = deque()
        self._finishes: list[Event] = []
        self._growths: list[Event] = []
        self._serial = count()
        self._is_blocked = False  # the head of the queue was tried, and nothing was freed since

    def run(self) -> Outcome:
        """Play all requests to their end."""
        while self._arrive():
            load = _Load()
            self._make_room(load)
            done = self._plan_prefill(load)
            if load.tokens:
                self._run_mixed(load, done)
            elif self.num_decoding:
                self.manager.seal()
                self._run_decodes(load.extra_s)
            elif self._is_blocked:
                # Nothing runs, so it will never fit.
                self._reject(self.waiting.popleft())
                self._is_blocked = False
            if self.observer is not None:
                self.observer(self)
        return self.recorder.outcome(self.manager.name)

    # --- what a step does -----------------------------------------------------------------------

    def _arrive(self) -> bool:
        """Queue what has arrived; if there is nothing to do, wait. Return False at the end."""
        arrivals = self._arrivals
        if not self.jobs and not self.waiting:
            if not arrivals.num_left:
                return False
            idle = arrivals.next - self.now
            if idle > 0:
                self._pass(idle, 0, 0)
        for arrival, index in arrivals.pop(self.now):
            self.recorder.on_arrived(index, arrival)
            self.waiting.append(Job(index, self.requests[index]))
        if isinstance(self.manager, RadixTreeBlocks):
            self.manager.now = self.now
        return True

    def _make_room(self, load: _Load) -> None:
        """Let everyone grow who must before this step, preempting the latest if need be."""
        moved = self.manager.num_moved
        while self._growths and self._growths[0][0] <= self.step:
            *_, job, allocation = heapq.heappop(self._growths)
            if job.allocation is not allocation:
                continue  # it was preempted meanwhile
            while not self.manager.grow(allocation):
                victim = next(reversed(self.jobs))
                if victim is job and len(self.jobs) == 1:
                    self._stop(job)
                    self._reject(job)
                    break
                load.extra_s += self._preempt(victim)
                if victim is job:
                    break
            else:
                self._note_growth(job)
        moved = self.manager.num_moved - moved
        load.extra_s += self.step_time.move_seconds(moved) if moved else 0.0

    def _plan_prefill(self, load: _Load) -> list[Job]:
        """Fill the step's budget with prompts; return whose are complete after it."""
        done = []
        budget = self.options.max_batch_tokens - self.num_decoding
        while budget > 0:
            job = self._prefilling[0] if self._prefilling else self._admit(load)
            if job is None:
                break
            if not job.to_compute:  # came back from the host
                continue
            chunk = min(budget, job.to_compute)
            start = job.request.prompt_len + job.stored - job.to_compute
            load.tokens += chunk
            load.attended += chunk * start + chunk * (chunk + 1) / 2
            load.context += start + chunk
            budget -= chunk
            job.to_compute -= chunk
            if not job.to_compute:
                self._prefilling.popleft()
                done.append(job)
                assert job.allocation is not None
                self.manager.computed(job.allocation)
        return done

    def _admit(self, load: _Load) -> Job | None:
        """Admit the head of the queue, or return None."""
        if not self.waiting or self._is_blocked:
            return None
        job = self.waiting[0]
        request = job.request
        if self.num_seqs and self.num_seqs + request.num_samples > self.options.max_seqs:
            return None
        # Who comes back from the host decodes in this very step, so it needs a slot for that.
        allocation = self.manager.admit(request, job.stored + (job.swapped > 0))
        if allocation is None:
            self._is_blocked = True
            return None
        self.waiting.popleft()
        job.allocation = allocation
        self.jobs[job] = None
        self.num_seqs += request.num_samples
        self.generated += request.num_samples * job.stored
        self.recorder.on_admitted(job.index, allocation.num_cached)
        if job.swapped:
            load.extra_s += self.step_time.swap_seconds(job.swapped)
            job.swapped = 0
            self.manager.computed(allocation)
            self._begin_decoding(job, self.step)
        else:
            # Logits need one computed token at least.
            total = request.prompt_len + job.stored
            job.to_compute = max(total - allocation.num_cached, 1)
            self._prefilling.append(job)
        return job

    def _run_mixed(self, load: _Load, done: list[Job]) -> None:
        """Run one step that computes prompts and what decodes beside them."""
        n = self.num_decoding
        context = self._context + n
        seconds = load.extra_s + self.step_time.seconds(
            load.tokens + n, load.attended + context, load.context + context, n + len(done)
        )
        self._pass(seconds, 1, load.tokens)
        for job in done:
            if math.isnan(job.first_token):
                job.first_token = self.now
                self.recorder.on_first_token(job.index, self.now)
            self._begin_decoding(job, self.step)
        self._finish()

    def _run_decodes(self, extra_s: float) -> None:
        """Run as many steps as nothing happens in but decoding."""
        k = self._finishes[0][0] - self.step
        if self._growths:
            k = min(k, self._growths[0][0] - self.step)
        k = max(k, 1)
        first, growth = self.step_time.decode(self.num_decoding, self._context + self.num_decoding)
        if math.isfinite(self._arrivals.next) and not self._is_blocked:
            room = self._arrivals.next - self.now - extra_s
            # So many begin before it comes, whichever of them are meant.
            k = max(1, min(k, math.ceil(room / (first + growth * (k - 1)))))
        self._pass(extra_s + k * first + growth * k * (k - 1) / 2, k, 0)
        self._finish()

    def _pass(self, seconds: float, steps: int, prompt_tokens: int) -> None:
        """Let time pass in which all that decode take `steps` steps."""
        added = self.num_decoding * steps
        usage = self.manager.usage(self.generated + added / 2, is_blocked=self._is_blocked)
        self.recorder.on_time(
            self.now, seconds, usage, self.num_seqs, len(self.waiting), self._is_blocked
        )
        self.recorder.on_computed(prompt_tokens, added)
        self.now += seconds
        self.step += steps
        self.generated += added
        self._context += added

    # --- how jobs change ------------------------------------------------------------------------

    def _begin_decoding(self, job: Job, step: int) -> None:
        request, allocation = job.request, job.allocation
        assert allocation is not None
        job.begin, job.is_decoding = step, True
        self.num_decoding += request.num_samples
        self._context += request.num_samples * (request.prompt_len + job.stored)
        # The last token's KV is never stored.
        end = step + request.output_len - 1 - job.stored
        heapq.heappush(self._finishes, (end, job.index, next(self._serial), job, allocation))
        self._note_growth(job)

    def _note_growth(self, job: Job) -> None:
        request, allocation = job.request, job.allocation
        assert allocation is not None
        if allocation.limit < request.final_len - 1:
            due = job.begin + allocation.limit - request.prompt_len - job.stored
            heapq.heappush(self._growths, (due, job.index, next(self._serial), job, allocation))

    def _finish(self) -> None:
        while self._finishes and self._finishes[0][0] <= self.step:
            *_, job, allocation = heapq.heappop(self._finishes)
            if job.allocation is allocation:
                self._stop(job, has_ended=True)
                self.recorder.on_finished(job.index, self.now)
                self._arrivals.end(job.index, self.now)

    def _reject(self, job: Job) -> None:
        self.recorder.on_rejected(job.index)
        self._arrivals.end(job.index, self.now)

    def _preempt(self, job: Job) -> float:
        """Take a job's memory away and put it before all that wait; return the seconds it takes."""
        seconds = 0.0
        was_decoding = job.is_decoding
        self._stop(job)
        if self.options.swap and was_decoding:
            job.swapped = job.request.prompt_len + job.request.num_samples * job.stored
            seconds = self.step_time.swap_seconds(job.swapped)
        self.waiting.appendleft(job)
        self.recorder.on_preempted()
        return seconds

    def _stop(self, job: Job, *, has_ended: bool = False) -> None:
        """Take back what a job holds, and note in it how far it got."""
        n = job.request.num_samples
        self.generated -= n * job.stored
        if job.is_decoding:
            made = self.step - job.begin
            self.generated -= n * made
            job.stored += made
            self.num_decoding -= n
            self._context -= n * (job.request.prompt_len + job.stored)
            job.is_decoding = False
        elif job in self._prefilling:
            self._prefilling.remove(job)
        self.num_seqs -= n
        del self.jobs[job]
        assert job.allocation is not None
        self.manager.release(job.allocation, job.stored if has_ended else 0)
        job.allocation = None
        self._is_blocked = False
