"""KV events as bytes, in the form in which vLLM sends them.

A payload is msgpack of `[ts, events, data_parallel_rank]`, and an event an array that begins with
its name. This is the array form that routers (llm-d, Dynamo) and subscribers written for vLLM or
SGLang read.

A block hash travels as an unsigned 64-bit integer, the last eight bytes of the hash: the one form
every public router takes, since some know no byte strings. Chance collisions are as likely as for
any 64-bit hash, and cost a router a wrong guess, never a wrong answer.
"""

from __future__ import annotations

from typing import Any

import msgspec

from radixkv.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

__all__ = ["encode_batch", "wire_hash"]


def encode_batch(events: list[KVEvent], timestamp: float) -> bytes:
    """Return the payload of one message: msgpack of [ts, events, data_parallel_rank]."""
    return msgspec.msgpack.encode([timestamp, [_wire(event) for event in events], 0])


def wire_hash(block_hash: bytes) -> int:
    """Return a block hash as it travels: its last eight bytes, big-endian, unsigned."""
    return int.from_bytes(block_hash[-8:], "big")


def _wire(event: KVEvent) -> list[Any]:
    """Return an event as vLLM's array: its name, then its fields in order."""
    if isinstance(event, AllBlocksCleared):
        return ["AllBlocksCleared"]
    hashes = [wire_hash(h) for h in event.block_hashes]
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", hashes, event.medium]
    return _wire_stored(event, hashes)


def _wire_stored(event: BlockStored, hashes: list[int]) -> list[Any]:
    parent = None if event.parent_block_hash is None else wire_hash(event.parent_block_hash)
    wire: list[Any] = [
        "BlockStored",
        hashes,
        parent,
        event.token_ids,
        event.block_size,
        event.lora_id,
        event.medium,
        None,  # lora_name
    ]
    if event.namespace_key and parent is None:
        # extra_keys, per block: what went into its hash beside tokens. Only a first block has it.
        wire.append([[event.namespace_key], *[None] * (len(hashes) - 1)])
    return wire
