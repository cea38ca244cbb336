"""All counters of an engine at one moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.engine.sharing import KVSharing
from radixkv.engine.stats import EngineStats, hit_rate, namespace_label
from radixkv.engine.usage import namespace_usage, pin_usage

if TYPE_CHECKING:
    from radixkv.engine.engine import Engine
    from radixkv.engine.swap import SwapSpace

__all__ = ["snapshot"]


def snapshot(engine: Engine, now: float) -> EngineStats:
    """Return the counters, which are consistent between two steps.

    Args:
        engine: not changed.
        now: seconds of its clock.
    """
    cache, stats = engine.cache, engine.cache.stats
    sharing = KVSharing.of(cache)
    waiting, speculator = engine.scheduler.waiting, engine.scheduler.speculator
    meter = engine.meter
    windows = {"all": (stats.tokens_looked_up, stats.tokens_hit)}
    windows |= {name: stats.window(name) for name in stats.windows}
    return EngineStats(
        uptime_s=now - engine.started,
        num_running=len(engine.scheduler.running),
        num_waiting=len(waiting),
        oldest_wait_s=0.0 if waiting.oldest_arrival is None else now - waiting.oldest_arrival,
        tokens_looked_up=stats.tokens_looked_up,
        tokens_hit=stats.tokens_hit,
        tokens_rehit=stats.tokens_rehit,
        tokens_computed=engine.tokens_computed,
        tokens_recomputed=engine.tokens_recomputed,
        tokens_generated=engine.tokens_generated,
        requests_admitted=engine.scheduler.num_admitted,
        requests_rejected=engine.num_rejected,
        requests_finished=dict(engine.finished),
        preemptions=engine.scheduler.num_preemptions,
        block_size=cache.block_size,
        bytes_per_block=engine.bytes_per_block,
        blocks_total=cache.num_blocks,
        blocks_free=cache.num_free_blocks,
        blocks_cached=cache.num_evictable_blocks,
        blocks_referenced=cache.num_referenced_blocks,
        evicted_blocks=stats.blocks_evicted,
        copied_blocks=stats.blocks_copied,
        nodes=cache.tree.num_nodes,
        leaves=len(cache.evictor),
        steps=engine.num_steps,
        step_time_s=engine.step_time_s,
        last_step_age_s=now - engine.last_step,
        windows={
            name: {"looked_up": looked_up, "hit": hit, "hit_rate": hit_rate(hit, looked_up)}
            for name, (looked_up, hit) in windows.items()
        },
        namespaces=namespace_usage(cache),
        pins=pin_usage(cache),
        kv_events=engine.kv_events.counters() if engine.kv_events is not None else {},
        tokens_hit_by_tier=dict(engine.scheduler.tokens_hit_by_tier),
        tiers=engine.tiers.stats() if engine.tiers is not None else {},
        scheduling=engine.scheduler.stats(),
        kv_tokens_referenced=sharing.tokens_referenced,
        kv_tokens_stored=sharing.tokens_stored,
        kv_slots_allocated=sharing.slots_allocated,
        model_time_s=meter.model_time_s,
        prompt_tokens_found_late=meter.prompt_tokens_found_late,
        prompt_tokens_pending=meter.num_pending(engine.requests.values()),
        prompt_tokens_dropped=meter.prompt_tokens_dropped,
        answer_tokens_computed=meter.answer_tokens_computed,
        step_tokens=dict(meter.step_tokens),
        tokens_drafted=0 if speculator is None else speculator.num_drafted,
        tokens_accepted=0 if speculator is None else speculator.num_accepted,
        preemptions_by_mode=dict(engine.scheduler.preemptions_by_mode),
        swap_bytes=_swap_bytes(engine.scheduler.swap),
        histograms=meter.histograms(),
        step_sizes=meter.step_sizes(),
        queue_by_namespace={
            namespace_label(name): {"requests": count, "seconds": seconds}
            for name, (count, seconds) in meter.waits.items()
            if count
        },
    )


def _swap_bytes(swap: SwapSpace | None) -> dict[str, int]:
    if swap is None:
        return {}
    return {way: swap.counters[f"blocks_{way}"] * swap.content_bytes for way in ("out", "in")}
