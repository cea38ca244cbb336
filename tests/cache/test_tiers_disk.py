import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.cache import tiers_disk
from radixkv.cache.tiers_disk import DiskTier

CONTENT, TOKENS = 64, 16
ENTRY = 8 + 32 + 16 + TOKENS + 16
HEADER = tiers_disk._HEADER_BYTES


def size_for(blocks: int) -> int:
    return HEADER + blocks * (CONTENT + ENTRY)


def open_tier(path: Path, blocks: int = 4, fingerprint: bytes = b"f" * 32) -> DiskTier:
    return DiskTier(
        path,
        size_for(blocks),
        fingerprint=fingerprint,
        content_bytes=CONTENT,
        token_bytes=TOKENS,
    )


def key(name: str) -> bytes:
    return name.encode().ljust(32, b"-")


def tokens(name: str) -> bytes:
    return name.encode().ljust(TOKENS, b".")


def content(name: str) -> bytes:
    return (name.encode() * CONTENT)[:CONTENT]


def put(tier: DiskTier, *names: str) -> None:
    for name in names:
        assert tier.write(key(name), tokens(name), content(name))
        tier.check_integrity()


def get(tier: DiskTier, name: str) -> bool:
    """Whether the block is there; what comes back is right in any case."""
    data = tier.read(key(name), tokens(name))
    tier.check_integrity()
    assert data in (None, content(name))
    return data is not None


def held(tier: DiskTier, names: str) -> str:
    return "".join(n for n in names if tier.contains(key(n), tokens(n)))


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = open_tier(tmp_path)
    yield tier
    tier.close()


def the_file(path: Path, suffix: str) -> Path:
    (file,) = path.glob(f"*.{suffix}")
    return file


def test_read_returns_what_was_written(tier: DiskTier) -> None:
    put(tier, "a", "b")
    assert get(tier, "a")
    assert get(tier, "b")
    assert not get(tier, "c")
    assert tier.read(key("a"), tokens("b")) is None


def test_least_recently_used_block_makes_room(tier: DiskTier) -> None:
    put(tier, "a", "b", "c", "d")
    assert get(tier, "a")
    put(tier, "e")
    assert held(tier, "abcde") == "acde"
    assert all(get(tier, name) for name in "acde")


def test_reopened_tier_has_everything_in_the_order_of_use(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", "b", "c", "d")
    assert tier.touch(key("a"))
    tier.close()
    again = open_tier(tmp_path)
    assert again.stats.blocks_restored == 4
    assert all(get(again, name) for name in "bcda")
    put(again, "e")
    assert held(again, "abcde") == "acde"
    again.close()


def test_reopened_tier_makes_room_in_the_order_of_use(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", "b", "c", "d")
    assert tier.touch(key("a"))
    tier.close()
    again = open_tier(tmp_path)
    put(again, "e", "f")
    assert held(again, "abcdef") == "adef"
    again.close()


def test_killed_tier_makes_room_in_the_order_of_the_writes(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, blocks=3)
    put(tier, "a", "b")
    tier.close()
    tier = open_tier(tmp_path, blocks=3)
    put(tier, "c")
    os.close(tier._index_file)
    os.close(tier._content_file)
    again = open_tier(tmp_path, blocks=3)
    put(again, "d", "e")
    assert held(again, "abcde") == "cde"
    again.close()


def test_tier_that_was_killed_has_what_was_written(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", "b")
    os.close(tier._index_file)  # what the end of a process does
    os.close(tier._content_file)
    again = open_tier(tmp_path)
    assert get(again, "a")
    assert get(again, "b")
    again.close()


@pytest.mark.parametrize("position", [0, CONTENT // 2, CONTENT - 1])
def test_damaged_content_is_never_served(tmp_path: Path, position: int) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", "b")
    tier.close()
    file = the_file(tmp_path, "blocks")
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)
    again = open_tier(tmp_path)
    assert not get(again, "a")
    assert get(again, "b")
    assert again.stats.blocks_torn == 1
    assert held(again, "ab") == "b"
    put(again, "a")
    assert get(again, "a")
    again.close()


def test_damaged_index_loses_the_entry_wherever_the_bit_is(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", "b")
    tier.close()
    file = the_file(tmp_path, "index")
    good = file.read_bytes()
    for position in range(ENTRY):
        data = bytearray(good)
        data[HEADER + position] ^= 0x40
        file.write_bytes(data)
        again = open_tier(tmp_path)
        assert held(again, "ab") == "b"
        assert again.stats.blocks_torn == 1
        again.close()


def test_entry_copied_to_another_slot_is_not_believed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", "b")
    tier.close()
    file = the_file(tmp_path, "index")
    data = file.read_bytes()
    file.write_bytes(data[: HEADER + ENTRY] + data[HEADER : HEADER + ENTRY])
    again = open_tier(tmp_path)
    assert again.stats.blocks_restored == 1
    assert again.stats.blocks_torn == 1
    again.close()


@pytest.mark.parametrize("suffix", ["blocks", "index"])
def test_truncated_file_loses_what_was_cut_off(tmp_path: Path, suffix: str) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", "b")
    tier.close()
    file = the_file(tmp_path, suffix)
    os.truncate(file, file.stat().st_size - 1)
    again = open_tier(tmp_path)
    assert again.stats.blocks_restored == 1
    assert get(again, "a")
    assert not get(again, "b")
    assert again.stats.blocks_torn == 1
    again.close()


def test_content_cut_off_while_open_is_a_miss(tmp_path: Path, tier: DiskTier) -> None:
    put(tier, "a")
    os.truncate(the_file(tmp_path, "blocks"), CONTENT - 1)
    assert not get(tier, "a")
    assert tier.stats.blocks_torn == 1


def test_other_fingerprint_finds_nothing_and_leaves_the_files_alone(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a")
    tier.close()
    other = open_tier(tmp_path, fingerprint=b"g" * 32)
    assert not get(other, "a")
    assert other.stats.files_foreign == 1
    other.close()
    again = open_tier(tmp_path)
    assert get(again, "a")
    again.close()


def test_file_with_our_name_and_a_foreign_header_starts_anew(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a")
    tier.close()
    file = the_file(tmp_path, "index")
    file.write_bytes(b"X" + file.read_bytes()[1:])
    again = open_tier(tmp_path)
    assert not get(again, "a")
    assert again.stats.files_foreign == 1
    put(again, "b")
    again.close()
    last = open_tier(tmp_path)
    assert get(last, "b")
    last.close()


def test_smaller_size_keeps_what_fits(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", "b", "c", "d")
    tier.close()
    small = open_tier(tmp_path, blocks=2)
    assert held(small, "abcd") == "ab"
    assert the_file(tmp_path, "blocks").stat().st_size == 2 * CONTENT
    put(small, "e")
    assert held(small, "abcde") == "be"
    small.close()


def test_full_disk_leaves_no_entry(monkeypatch: pytest.MonkeyPatch, tier: DiskTier) -> None:
    put(tier, "a", "b", "c", "d")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tiers_disk.os, "pwrite", full)
        assert not tier.write(key("e"), tokens("e"), content("e"))
    tier.check_integrity()
    assert tier.stats.write_errors == 1
    assert not get(tier, "e")
    assert held(tier, "abcd") == "bcd"
    put(tier, "e")
    assert all(get(tier, name) for name in "bcde")


def test_half_a_write_leaves_no_entry(monkeypatch: pytest.MonkeyPatch, tier: DiskTier) -> None:
    write = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(tiers_disk.os, "pwrite", lambda f, d, o: write(f, d[: len(d) // 2], o))
        assert not tier.write(key("a"), tokens("a"), content("a"))
    assert not get(tier, "a")
    assert tier.stats.write_errors == 1


@pytest.mark.parametrize("survivors", [0, 1, 2])
def test_crash_between_two_writes_serves_nothing_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, survivors: int
) -> None:
    """A block that takes another's slot: the content was written, its entry was not."""
    tier = open_tier(tmp_path, blocks=1)
    put(tier, "a")
    write, done = os.pwrite, 0

    def crash(file: int, data: bytes, offset: int) -> int:
        nonlocal done
        done += 1
        return write(file, data, offset) if done <= survivors else len(data)

    with monkeypatch.context() as patch:
        patch.setattr(tiers_disk.os, "pwrite", crash)
        tier.write(key("b"), tokens("b"), content("b"))
    os.close(tier._index_file)
    os.close(tier._content_file)
    again = open_tier(tmp_path, blocks=1)
    assert get(again, "a") == (survivors == 0)
    assert not get(again, "b")
    again.close()


def test_failing_read_is_a_miss(monkeypatch: pytest.MonkeyPatch, tier: DiskTier) -> None:
    put(tier, "a", "b")

    def bad(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(tiers_disk.os, "pread", bad)
        assert not get(tier, "a")
    assert tier.stats.read_errors == 1
    assert held(tier, "ab") == "b"


def test_clear_forgets_even_after_a_restart(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a")
    tier.clear()
    assert not get(tier, "a")
    put(tier, "b")
    tier.close()
    again = open_tier(tmp_path)
    assert held(again, "ab") == "b"
    again.close()


def test_cleared_tier_restores_nothing(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", "b")
    tier.clear()
    tier.close()
    again = open_tier(tmp_path)
    assert again.stats.blocks_restored == 0
    again.close()


def test_close_syncs_both_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a")
    files = {tier._content_file, tier._index_file}
    synced: set[int] = set()
    monkeypatch.setattr(tiers_disk.os, "fsync", synced.add)
    tier.close()
    assert synced == files


def test_write_that_began_before_clear_is_not_filed(
    monkeypatch: pytest.MonkeyPatch, tier: DiskTier
) -> None:
    write = os.pwrite

    def clearing(file: int, data: bytes, offset: int) -> int:
        monkeypatch.setattr(tiers_disk.os, "pwrite", write)
        tier.clear()
        return write(file, data, offset)

    monkeypatch.setattr(tiers_disk.os, "pwrite", clearing)
    assert not tier.write(key("a"), tokens("a"), content("a"))
    assert not get(tier, "a")
    put(tier, "b", "c", "d", "e")
    assert all(get(tier, name) for name in "bcde")


def test_second_process_is_refused(tmp_path: Path, tier: DiskTier) -> None:
    with pytest.raises(OSError, match="another server"):
        open_tier(tmp_path)


@pytest.mark.parametrize("call", ["pread", "fstat", "ftruncate"])
def test_tier_that_cannot_be_opened_holds_no_lock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    """Its files stayed open, so that it couldn't be opened again either."""
    tier = open_tier(tmp_path)
    put(tier, "a")
    tier.close()
    if call == "ftruncate":
        os.truncate(the_file(tmp_path, "index"), HEADER - 1)

    def bad(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(tiers_disk.os, call, bad)
        with pytest.raises(OSError, match="Input/output"):
            open_tier(tmp_path)
    again = open_tier(tmp_path)
    assert get(again, "a") == (call != "ftruncate")
    again.close()


def test_failing_close_gives_up_both_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second file stayed open, and locked, when the first could not be closed."""
    tier = open_tier(tmp_path)
    put(tier, "a")
    close = os.close

    def bad(file: int) -> None:
        close(file)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(tiers_disk.os, "close", bad)
        tier.close()
    again = open_tier(tmp_path)
    assert get(again, "a")
    again.close()


def test_size_under_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="less than one block"):
        open_tier(tmp_path, blocks=0)


def test_close_is_idempotent(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.close()
    tier.close()
    assert the_file(tmp_path, "index").stat().st_size == HEADER
