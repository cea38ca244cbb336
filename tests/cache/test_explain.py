from __future__ import annotations

import json
import time

import pytest
from cache_helpers import compute, store

from radixkv.cache import Explanation, RadixCache
from radixkv.cache.explain import EvictionMemory, explain_bytes
from radixkv.cache.int_vector import as_int32


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def text(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def explain(cache: RadixCache, prompt: str, *namespace: str) -> Explanation:
    return cache.explain(ids(prompt), namespace)


@pytest.fixture
def cache() -> RadixCache:
    return RadixCache(64, 4)


def test_explain_reports_a_complete_hit(cache: RadixCache) -> None:
    store(cache, ids("abcdefghij"))
    found = explain(cache, "abcdefghij")
    assert (found.reason, found.num_block_tokens, found.num_partial_tokens) == ("complete", 8, 2)
    assert found.position == found.num_hit_tokens == 10
    assert found.prompt_window == found.cached_window == []


def test_explain_asks_for_no_more_than_it_is_told(cache: RadixCache) -> None:
    store(cache, ids("abcdefgh"))
    found = cache.explain(ids("abcdefghXYZ"), max_tokens=8)
    assert (found.reason, found.num_tokens, found.num_wanted) == ("complete", 11, 8)


def test_explain_says_never_seen_of_an_empty_cache(cache: RadixCache) -> None:
    found = explain(cache, "abcdefgh")
    assert (found.reason, found.position, found.cached_window) == ("never_seen", 0, [])
    assert text(found.prompt_window) == "abcdefgh"


def test_explain_says_never_seen_where_not_even_one_token_is_shared(cache: RadixCache) -> None:
    store(cache, ids("abcdefgh"))
    found = explain(cache, "ABCDEFGH")
    assert (found.reason, found.cached_window) == ("never_seen", [])


def test_explain_says_never_seen_where_the_cached_path_ends(cache: RadixCache) -> None:
    """A next turn: the whole past is cached, and what is new is new, not different."""
    store(cache, ids("system turn1"))
    store(cache, ids("system turn1 answer"))
    found = explain(cache, "system turn1 answer turn2")
    assert (found.reason, found.position) == ("never_seen", 19)
    assert text(found.cached_window) == "system turn1 answer"
    assert text(found.prompt_window) == "system turn1 answer turn2"


def test_explain_says_below_block_of_a_short_rest(cache: RadixCache) -> None:
    store(cache, ids("abcdefgh"))
    assert explain(cache, "abcdefghXYZ").reason == "below_block"
    assert explain(cache, "xyz").reason == "below_block"


def test_explain_shows_both_sides_of_a_divergence_inside_a_block(cache: RadixCache) -> None:
    store(cache, ids("the quick brown fox jumps"))
    found = explain(cache, "the quick green fox jumps")
    assert (found.reason, found.position, found.window_start) == ("diverged", 10, 0)
    assert (found.num_block_tokens, found.num_partial_tokens) == (8, 2)
    assert text(found.prompt_window) == "the quick green fox jumps"
    assert text(found.cached_window) == "the quick brown fox jumps"


def test_explain_follows_the_cached_path_over_nodes(cache: RadixCache) -> None:
    for end in ("11112222", "33334444"):
        store(cache, ids("aaaabbbbcccc" + end))
    found = explain(cache, "aaaaXXXX")
    assert found.reason == "diverged"
    assert text(found.cached_window) == "aaaabbbbcccc33334444"  # the one filed last


@pytest.mark.parametrize("cached", ["aaaabbbb", "aaaabb"])
def test_explain_finds_a_divergence_at_a_block_boundary(cache: RadixCache, cached: str) -> None:
    store(cache, ids("aaaa"))
    store(cache, ids(cached))
    found = explain(cache, "aaaacccc")
    assert (found.reason, found.position) == ("diverged", 4)
    assert text(found.cached_window) == cached


def test_explain_bounds_its_windows(cache: RadixCache) -> None:
    store(cache, range(1, 101))
    prompt = [*range(1, 51), 999, *range(52, 101)]
    tokens = as_int32(prompt).tobytes()
    found = explain_bytes(cache, tokens, window=5)
    assert (found.position, found.window_start) == (50, 45)
    assert found.prompt_window == [46, 47, 48, 49, 50, 999, 52, 53, 54, 55]
    assert found.cached_window == [46, 47, 48, 49, 50, 51, 52, 53, 54, 55]


def test_explain_names_the_policy_and_the_time_of_an_eviction() -> None:
    now = [100.0]
    cache = RadixCache(8, 4, clock=lambda: now[0])
    store(cache, ids("aaaabbbbcccc"))
    cache.evict(2)
    now[0] += 7.5
    found = explain(cache, "aaaabbbbccccdddd")
    assert (found.reason, found.position, found.evicted_s) == ("evicted", 4, 7.5)
    assert found.evicted_by == "lru"
    store(cache, ids("aaaabbbb"))
    assert (explain(cache, "aaaabbbbXXXX").reason) == "never_seen"
    assert (explain(cache, "aaaabbbbcccc").reason) == "evicted"


def test_explain_tells_a_flush_from_an_eviction(cache: RadixCache) -> None:
    store(cache, ids("aaaabbbb"))
    cache.reset()
    found = explain(cache, "aaaabbbb")
    assert (found.reason, found.evicted_by) == ("evicted", "flush")
    store(cache, ids("aaaabbbb"))
    cache.evict(64)
    assert explain(cache, "aaaabbbb").evicted_by == "lru"


def test_eviction_memory_is_bounded_and_keeps_the_latest() -> None:
    cache = RadixCache(4, 4)
    assert cache.evictions.capacity == 16
    for i in range(40):
        store(cache, [i] * 4)
    cache.evict(4)
    assert len(cache.evictions) == 16
    assert [cache.explain([i] * 4).reason for i in (0, 23, 24, 39)] == [
        "never_seen",
        "never_seen",
        "evicted",
        "evicted",
    ]
    assert EvictionMemory(10**9, time.monotonic).capacity == 65_536


def test_eviction_memory_keeps_the_order_of_the_last_evictions() -> None:
    cache = RadixCache(4, 4)
    for i in [*range(16), 0, *range(20, 34)]:  # 0 is evicted a second time
        store(cache, [i] * 4)
        cache.evict(4)
    assert [cache.explain([i] * 4).reason for i in (1, 0)] == ["never_seen", "evicted"]


def test_explain_tells_of_another_namespace_only_where_it_holds_more(cache: RadixCache) -> None:
    store(cache, ids("aaaabbbbcccc"), ("tenant", "salt"))
    store(cache, ids("aaaa"))
    found = explain(cache, "aaaabbbb")
    assert (found.reason, found.position) == ("other_namespace", 4)
    assert found.other_namespace == ("tenant", "salt")
    assert found.cached_window == ids("aaaa"), "the other namespace's tokens are not shown"
    assert explain(cache, "aaaaXXXX").reason == "never_seen"
    assert explain(cache, "aaaabbbb", "tenant", "salt").reason == "complete"
    assert explain(cache, "aaaabbbb", "new").other_namespace == ()


def test_explain_looks_into_a_bounded_number_of_namespaces(cache: RadixCache) -> None:
    prompt = as_int32(ids("aaaabbbb")).tobytes()
    store(cache, ids("aaaabbbb"), ("first",))
    for i in range(5):
        store(cache, ids("zzzz"), (str(i),))
    assert explain_bytes(cache, prompt, max_namespaces=6).reason == "other_namespace"
    assert explain_bytes(cache, prompt, max_namespaces=5).reason == "never_seen"


def test_explain_says_that_the_cache_is_off() -> None:
    cache = RadixCache(8, 4, enabled=False)
    store(cache, ids("aaaabbbb"))
    assert explain(cache, "aaaabbbb").reason == "disabled"


def test_explain_changes_nothing(cache: RadixCache) -> None:
    store(cache, ids("aaaabbbbcccc"))
    store(cache, ids("aaaabbbbdd"))
    before = cache.tree_report()
    for prompt in ("aaaabbbbcccc", "aaaabbXX", "zzzz", "aaaabbbbddXX"):
        explain(cache, prompt)
        explain(cache, prompt, "elsewhere")
    cache.check_integrity()
    after = cache.tree_report()
    strip = {"age_s": 0}
    assert _without_ages(after, strip) == _without_ages(before, strip)


def test_explain_agrees_with_the_lookup_on_random_prompts() -> None:
    import random

    rng = random.Random(7)
    cache = RadixCache(40, 2)
    past: list[list[int]] = [[]]
    for _ in range(300):
        base = rng.choice(past)
        prompt = base[: rng.randrange(len(base) + 1)] + [rng.randrange(3) for _ in range(5)]
        found = cache.explain(prompt)
        hit = cache.match_prefix(prompt).num_cached_tokens
        assert found.num_hit_tokens == hit
        assert (found.reason == "complete") == (hit == len(prompt))
        if found.reason == "diverged":
            at = found.position - found.window_start
            assert found.cached_window[at] != found.prompt_window[at]
        past.append(prompt)
        store(cache, prompt)
    assert len(cache.evictions) > 0


# The three causes that users could not see elsewhere, with a token a character.


def test_a_timestamp_in_the_system_prompt_is_visible(cache: RadixCache) -> None:
    system = "You are an agent. Today is {}. Use the tools.\nuser: hello"
    store(cache, ids(system.format("2026-11-30 23:59:59")))
    found = explain(cache, system.format("2026-12-01 00:00:01"))
    assert found.reason == "diverged"
    assert "Today is 2026-12-01 00:00:01" in text(found.prompt_window)
    assert "Today is 2026-11-30 23:59:59" in text(found.cached_window)


def test_a_reordered_tool_list_is_visible(cache: RadixCache) -> None:
    tools = [{"name": "search", "type": "function"}, {"name": "browse", "type": "function"}]
    store(cache, ids("Tools: " + json.dumps(tools)))
    found = explain(cache, "Tools: " + json.dumps(tools[::-1]))
    assert found.reason == "diverged"
    assert '[{"name": "browse"' in text(found.prompt_window)
    assert '[{"name": "search"' in text(found.cached_window)


def test_a_rewritten_earlier_turn_is_visible() -> None:
    cache = RadixCache(64, 4)
    turn = "user: 2+2?\nassistant: {}4\n"
    open_turn = compute(cache, ids(turn.format("<think>easy</think>")))
    found = explain(cache, turn.format("") + "user: and 3+3?\n")
    assert found.reason == "diverged"
    assert text(found.prompt_window).startswith("user: 2+2?\nassistant: 4\nuser:")
    assert "assistant: <think>easy</think" in text(found.cached_window)
    open_turn.free()


def _without_ages(value: object, strip: dict[str, int]) -> object:
    if isinstance(value, dict):
        return {k: strip.get(k, _without_ages(v, strip)) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_ages(v, strip) for v in value]
    return value
