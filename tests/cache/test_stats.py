from __future__ import annotations

from radixkv.cache import CacheStats, RadixCache
from radixkv.cache.stats import MAX_NAMESPACES, Window


def test_window_forgets_what_is_older() -> None:
    window = Window(60)
    window.add(0.0, 10, 4)
    window.add(30.0, 20, 5)
    assert (window.looked_up, window.hit) == (30, 9)
    window.expire(60.0)
    assert (window.looked_up, window.hit) == (20, 5)
    window.expire(1000.0)
    assert (window.looked_up, window.hit) == (0, 0)


def test_window_memory_is_bounded_by_its_length() -> None:
    window = Window(60)
    for tenth in range(10_000):
        window.add(tenth / 10, 1, 0)
    assert len(window._buckets) <= 61
    assert 590 <= window.looked_up <= 610


def test_stats_expire_by_the_injected_clock() -> None:
    now = [0.0]
    stats = CacheStats(lambda: now[0])
    stats.record_lookup((), 100, 40)
    assert stats.window("1m") == stats.window("5m") == (100, 40)
    now[0] = 120.0
    assert stats.window("1m") == (0, 0)
    assert stats.window("5m") == (100, 40)
    assert (stats.requests, stats.tokens_looked_up, stats.tokens_hit) == (1, 100, 40)


def test_namespaces_are_bounded_and_the_least_active_goes() -> None:
    stats = CacheStats(lambda: 0.0)
    stats.record_lookup(("kept",), 1, 0)
    for i in range(MAX_NAMESPACES + 50):
        stats.record_lookup((str(i),), 2, 1)
        stats.record_lookup(("kept",), 1, 0)
    assert len(stats.namespaces) == MAX_NAMESPACES
    assert stats.namespaces["kept",].requests == MAX_NAMESPACES + 51
    assert ("0",) not in stats.namespaces
    assert stats.tokens_hit == MAX_NAMESPACES + 50


def test_match_prefix_alone_counts_nothing() -> None:
    """A lookup that the scheduler repeats must not be counted by the cache itself."""
    cache = RadixCache(4, 2)
    cache.match_prefix([1, 2, 3])
    sequence = cache.create_sequence([1, 2, 3])
    sequence.reuse()
    assert (cache.stats.requests, cache.stats.tokens_looked_up) == (0, 0)


def test_hour_is_kept_in_few_steps_and_forgotten_after_it() -> None:
    now = [0.0]
    stats = CacheStats(lambda: now[0])
    for second in range(3600):
        now[0] = float(second)
        stats.record_lookup((), 1, 0)
    assert stats.window("1h") == (3600, 0)
    assert len(stats.windows["1h"]._buckets) <= 301
    now[0] = 5400.0
    looked_up, _ = stats.window("1h")
    assert 1780 <= looked_up <= 1800
    now[0] = 7200.0
    assert stats.window("1h") == (0, 0)
