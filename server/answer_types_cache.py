"""The shapes of answers about the cache: pins, explanations, the tree, and the report."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

__all__ = [
    "CacheReport",
    "CacheTree",
    "Checked",
    "Explanation",
    "Flushed",
    "Misses",
    "NotIntact",
    "Pin",
    "PinDeleted",
    "PinList",
    "RequestExplanation",
    "SessionPin",
    "Warmed",
]

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Pin(msgspec.Struct, kw_only=True):
    """A pin: what it holds, and until when unless it is used again (seconds since 1970)."""

    id: str
    object: Literal["cache.pin"]
    namespace: str
    source: str
    pinned_tokens: Count
    pinned_blocks: Count
    ttl_seconds: Seconds
    expires: float
    prompt_tokens: Count | UnsetType = UNSET
    session: str | UnsetType = UNSET


class SessionPin(Pin, kw_only=True):
    """The pin of a session."""

    prompt_tokens: Count
    session: str


class PinUsage(msgspec.Struct, kw_only=True):
    """What all pins hold and may hold, and those that ended by themselves."""

    count: Count
    blocks: Count
    max_blocks: Count
    expired: Count
    lapsed: Count


class PinList(msgspec.Struct, kw_only=True):
    """Every pin, most recently used first."""

    object: Literal["list"]
    data: list[Pin]
    usage: PinUsage


class PinDeleted(msgspec.Struct, kw_only=True):
    """A pin that was given up."""

    id: str
    object: Literal["cache.pin.deleted"]
    deleted: Literal[True]


class Warmed(msgspec.Struct, kw_only=True):
    """A prompt that was computed ahead of time."""

    object: Literal["cache.warmed"]
    id: str
    namespace: str
    prompt_tokens: Count
    cached_tokens: Count
    computed_tokens: Count
    pin: Pin | None


class Flushed(msgspec.Struct, kw_only=True):
    """How many blocks a flush freed, of all or of one namespace."""

    success: Literal[True]
    freed_blocks: Count
    namespace: str | UnsetType = UNSET


class Checked(msgspec.Struct, kw_only=True):
    """The cache is intact."""

    ok: Literal[True]


class NotIntact(msgspec.Struct, kw_only=True):
    """The cache is not intact, with the difference in the message."""

    ok: Literal[False]
    error: dict[str, str | None]


class Hit(msgspec.Struct, kw_only=True):
    """What was found, in whole blocks and in a part of the next one."""

    tokens: Count
    whole_blocks: Count
    partial_tokens: Count


class WindowSide(msgspec.Struct, kw_only=True):
    """The tokens around the first miss, with the text before and after it."""

    before: str
    after: str
    token_ids: list[Count]


class MissWindow(msgspec.Struct, kw_only=True):
    """Both sides of a divergence, from the token `start` on."""

    start: Count
    prompt: WindowSide
    cached: WindowSide


class Evicted(msgspec.Struct, kw_only=True):
    """When the next block was evicted, and by what."""

    seconds_ago: Seconds
    by: str | None


class Explanation(msgspec.Struct, kw_only=True):
    """What a prompt finds in the cache, and why no more."""

    object: Literal["cache.explanation"]
    namespace: str
    prompt_tokens: Count
    hit: Hit
    reason: Literal[
        "complete",
        "diverged",
        "evicted",
        "other_namespace",
        "never_seen",
        "below_block",
        "disabled",
    ]
    message: str
    position: Count
    window: MissWindow | UnsetType = UNSET
    evicted: Evicted | UnsetType = UNSET
    other_namespace: str | UnsetType = UNSET


class HistoryReport(msgspec.Struct, kw_only=True):
    """What became of this server's own answers in a request's history."""

    exact_answers: Count
    rewritten_messages: list[Count]
    message: str | UnsetType = UNSET


class RequestExplanation(Explanation, kw_only=True):
    """What a request found when it was admitted, and why no more."""

    request: str
    created: float
    cached_tokens: Count
    cached_by_tier: dict[str, Count]
    computed_tokens: Count
    history: HistoryReport | UnsetType = UNSET


class Misses(msgspec.Struct, kw_only=True):
    """The latest requests that had to compute, latest first."""

    object: Literal["list"]
    data: list[RequestExplanation]


class TreePlace(msgspec.Struct, kw_only=True):
    """What nodes and namespaces have in common."""

    blocks: Count
    locks: Count
    pins: Count
    age_s: Seconds
    sessions: list[str]
    children: list[TreeNode]
    elided_children: Count


class TreeNode(TreePlace, kw_only=True):
    """A run of cached blocks, or a partly filled one, with the text that it begins with."""

    id: int
    kind: Literal["run", "tail"]
    tokens: Count
    hits: Count
    text: str


class TreeNamespace(TreePlace, kw_only=True):
    """The tree of one namespace."""

    namespace: str


class CacheTree(msgspec.Struct, kw_only=True):
    """The cached tree, as far as the bounds allow."""

    object: Literal["cache.tree"]
    model: str
    block_size: Count
    blocks: Count
    nodes: Count
    namespaces: list[TreeNamespace]
    elided_namespaces: Count


class HitWindow(msgspec.Struct, kw_only=True):
    """Tokens looked up and found within a time."""

    looked_up: Count
    hit: Count
    hit_rate: Share | None


class TokenCounts(msgspec.Struct, kw_only=True):
    """Tokens since the start."""

    looked_up: Count
    hit: Count
    hit_by_tier: dict[str, Count]
    computed: Count
    recomputed: Count
    generated: Count


class BlockCount(msgspec.Struct, kw_only=True):
    """Blocks, and their bytes."""

    blocks: Count
    bytes: Count


class BlockCounts(msgspec.Struct, kw_only=True):
    """Where the blocks are now."""

    total: BlockCount
    free: BlockCount
    cached: BlockCount
    referenced: BlockCount


class Quota(msgspec.Struct, kw_only=True):
    """What a namespace may hold without giving first, and what it holds."""

    own: bool
    limit_blocks: Count
    used_blocks: Count
    excess_blocks: Count


class NamespaceUsage(HitWindow, kw_only=True):
    """What a namespace looked up, found and holds."""

    requests: Count
    blocks: Count
    pins: Count
    pinned_blocks: Count
    quota: Quota | None


class RequestCounts(msgspec.Struct, kw_only=True):
    """Requests now, and since the start."""

    running: Count
    waiting: Count
    oldest_wait_s: Seconds
    admitted: Count
    rejected: Count
    finished: dict[str, Count]


class TreeCounts(msgspec.Struct, kw_only=True):
    """The size of the tree."""

    nodes: Count
    leaves: Count


class StepCounts(msgspec.Struct, kw_only=True):
    """Steps since the start."""

    count: Count
    time_s: Seconds
    last_age_s: float


class UsageReport(HitWindow, kw_only=True):
    """What a model or a session looked up, found and generated."""

    requests: Count
    generated: Count


class KvReport(msgspec.Struct, kw_only=True):
    """How well the blocks are used: all of them, and those of running sequences."""

    pool_usage: Share
    referenced_usage: Share
    tokens_stored: Count
    slots_allocated: Count
    utilisation: Share | None
    wasted_slots: int
    wasted_bytes: int
    shared_tokens: int


class CacheReport(msgspec.Struct, kw_only=True):
    """What was reused, and where the blocks are; counters only ever grow."""

    model: str
    models: dict[str, UsageReport]
    sessions: Count
    session_usage: dict[str, UsageReport]
    uptime_s: Seconds
    hit_rate: dict[str, Share | None]
    windows: dict[str, HitWindow]
    tokens: TokenCounts
    blocks: BlockCounts
    kv: KvReport
    block_size: Count
    bytes_per_block: Count
    tiers: dict[str, Any]
    evicted_blocks: Count
    copied_blocks: Count
    preemptions: Count
    scheduling: dict[str, Any]
    tree: TreeCounts
    requests: RequestCounts
    pins: PinUsage
    namespaces: dict[str, NamespaceUsage]
    steps: StepCounts
    kv_events: dict[str, Count]
