import pytest

from radixkv.engine.tiering_plan import PlannedBlock, TransferCosts

HOST = PlannedBlock(b"k", b"t", "host")
UNREAD = PlannedBlock(b"k", b"t", "disk")
READ = PlannedBlock(b"k", b"t", "disk", b"content")


def make_costs(prefill_rate: float | None = 1000.0) -> TransferCosts:
    """A block takes 10 ms to compute, 1 ms from host memory, and 19 ms more from disk."""
    costs = TransferCosts(block_size=10, content_bytes=1000)
    costs.prefill_rate = prefill_rate
    costs.rates = {"host": 1e6, "disk": 1000 / 0.019}
    return costs


@pytest.mark.parametrize(
    ("blocks", "worth"),
    [
        ([], 0),
        ([HOST, HOST], 2),
        ([READ], 1),
        ([UNREAD], 0),
        ([HOST, UNREAD], 1),
        ([HOST, HOST, UNREAD], 2),
        # Nine and nine saved pay for ten lost.
        ([UNREAD, HOST, HOST], 3),
        ([UNREAD, HOST], 0),
    ],
)
def test_number_of_blocks_that_saves_most_is_loaded(blocks: list[PlannedBlock], worth: int) -> None:
    assert make_costs().num_worth_loading(blocks) == worth


def test_everything_is_loaded_until_prefill_was_measured() -> None:
    assert make_costs(None).num_worth_loading([UNREAD, UNREAD]) == 2


def test_speeds_follow_the_measurements() -> None:
    costs = make_costs(None)
    costs.record_step(31, 1.0)
    assert costs.prefill_rate is None
    costs.record_step(100, 1.0)
    costs.record_step(300, 1.0)
    assert costs.prefill_rate == 200
    costs.record_transfer("host", 3_000_000, 1.0)
    costs.record_transfer("host", 0, 1.0)
    assert costs.rates["host"] == 2e6
