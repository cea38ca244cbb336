from __future__ import annotations

from fakes import Harness

from radixkv.engine import RequestProgress


def test_progress_follows_a_request_through_its_states() -> None:
    harness = Harness(64, max_num_batched_tokens=16)
    request = harness.add("a", range(40, 70), max_tokens=4, ignore_eos=True)
    assert RequestProgress.of(request) == RequestProgress("waiting", None, 0)
    harness.step()
    assert RequestProgress.of(request) == RequestProgress("prefill", 0, 0)
    harness.step()
    assert RequestProgress.of(request) == RequestProgress("decode", 0, 1)
    harness.scheduler.preempt(request)
    assert RequestProgress.of(request) == RequestProgress("waiting", 0, 1)
    assert request.timings.num_preemptions == request.num_preemptions == 1
    harness.run()
    assert request.timings.num_preemptions == 1
    harness.cache.check_integrity()


def test_progress_counts_the_tokens_of_all_answers() -> None:
    harness = Harness(64)
    request = harness.add("a", range(40, 48), max_tokens=5, ignore_eos=True, n=3)
    for _ in range(3):
        harness.step()
    progress = RequestProgress.of(request)
    assert progress.num_output_tokens == 9
    assert progress.state == "decode"
