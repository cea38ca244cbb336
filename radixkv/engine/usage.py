"""Who uses how much of the cache: pins, and shares of the pool by namespace."""

from __future__ import annotations

from typing import Any

from radixkv.cache import RadixCache
from radixkv.engine.stats import hit_rate, namespace_label
from radixkv.request import Namespace

__all__ = ["namespace_usage", "pin_usage"]


def pin_usage(cache: RadixCache) -> dict[str, int]:
    """Return what pins hold and may hold, and the counters of those that ended by themselves."""
    pins = cache.pins
    return {
        "count": len(pins),
        "blocks": pins.num_blocks,
        "max_blocks": pins.max_blocks,
        "expired": pins.num_expired,
        "lapsed": pins.num_lapsed,
    }


def namespace_usage(cache: RadixCache) -> dict[str, dict[str, Any]]:
    """Return lookups, blocks, pins and quota by the label of each namespace.

    Those used latest, those with a quota of their own, and those with pins. `quota` is None where
    nobody has a quota.

    Cost: O(namespaces + nodes with pins).
    """
    pins = _pins_by_namespace(cache)
    names = dict.fromkeys([*cache.stats.namespaces, *cache.quotas.named, *pins])
    return {namespace_label(name): _usage(cache, name, *pins.get(name, (0, 0))) for name in names}


def _usage(
    cache: RadixCache, namespace: Namespace, num_pins: int, num_pinned: int
) -> dict[str, Any]:
    lookups = cache.stats.namespaces.get(namespace)
    top = cache.tree.roots.get(namespace)
    report: dict[str, Any] = {
        "requests": lookups.requests if lookups else 0,
        "looked_up": lookups.tokens_looked_up if lookups else 0,
        "hit": lookups.tokens_hit if lookups else 0,
        "hit_rate": hit_rate(lookups.tokens_hit, lookups.tokens_looked_up) if lookups else None,
        "blocks": top.root.num_blocks if top else 0,
        "pins": num_pins,
        "pinned_blocks": num_pinned,
        "quota": None,
    }
    quotas = cache.quotas
    if quotas.enabled:
        limit = quotas.limit(namespace)
        used = top.root.num_blocks + top.root.num_held if top else 0
        report["quota"] = {
            "own": namespace in quotas.named,
            "limit_blocks": limit,
            "used_blocks": used,
            "excess_blocks": max(0, used - limit),
        }
    return report


def _pins_by_namespace(cache: RadixCache) -> dict[Namespace, tuple[int, int]]:
    """Return (pins, blocks they hold) of each namespace that has pins."""
    found = {}
    for namespace, top in cache.tree.roots.items():
        if not top.pins:
            continue
        blocks, nodes = 0, [top]
        while nodes:
            node = nodes.pop()
            blocks += node.num_blocks
            nodes += [child for child in node.children.values() if child.pins]
        found[namespace] = top.pins, blocks
    return found
