"""The radix cache: which blocks of KV exist, who holds them, and which prompt they belong to.

Plain Python over block ids; it never touches a tensor, so it runs (and is tested) without a model.
`RadixCache` is the door: it makes `Sequence`s, which reuse, append, fork and free.
"""

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventLog
from radixkv.cache.explain import Explanation
from radixkv.cache.policies import POLICIES
from radixkv.cache.radix_cache import PrefixHandle, RadixCache
from radixkv.cache.sequence import Sequence
from radixkv.cache.stats import CacheStats

__all__ = [
    "POLICIES",
    "AllBlocksCleared",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CacheStats",
    "Explanation",
    "KVEventLog",
    "PrefixHandle",
    "RadixCache",
    "Sequence",
]
