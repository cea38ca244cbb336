"""What must hold after every step of the random machine."""

from __future__ import annotations

import numpy as np
from cache_model import CacheModel, ModelSequence
from faults import FailingCache
from hypothesis.stateful import RuleBasedStateMachine, invariant
from policy_model import SessionModel
from pool_model import Tokens
from tier_model import Mover

from radixkv.cache import KVEventLog, Sequence
from radixkv.cache.hashing import default_digest
from radixkv.cache.radix_tree import Node
from radixkv.cache.session_policy import SessionPolicy


def path_tokens(node: Node) -> Tokens:
    above = path_tokens(node.parent) if node.parent is not None else ()
    return above + tuple(np.frombuffer(node.tokens, "<i4").tolist())


class CheckedMachine(RuleBasedStateMachine):
    """Holds a cache, its tiers and their models, and compares them."""

    model: CacheModel
    cache: FailingCache
    mover: Mover
    events: KVEventLog
    hashes: set[bytes]
    open: list[tuple[Sequence, ModelSequence]]

    @invariant()
    def counts_agree(self) -> None:
        cache, model = self.cache, self.model
        cache.check_integrity()
        self.mover.check_integrity()
        assert cache.num_free_blocks == model.num_free()
        assert cache.num_evictable_blocks == model.num_evictable()
        assert cache.num_available_blocks == model.num_available()
        assert [pin.pin_id for pin in cache.pins] == list(model.pins)
        assert cache.pins.num_blocks == len(model.pinned())
        for block in range(model.num_blocks):
            assert cache.pool.ref_count(block) == model.refs[block]
            if model.refs[block] == 0:
                model.spoil(block)

    @invariant()
    def sequences_read_back_their_history(self) -> None:
        model = self.model
        for sequence, mirror in self.open:
            assert sequence.num_computed == mirror.computed
            table = sequence.block_table.tolist()
            assert table == mirror.table
            content = [t for b in table for t in model.read(b)]
            for position in range(mirror.computed):
                prefix = mirror.tokens[: position + 1]
                assert content[position] == model.content(mirror.namespace, prefix)

    @invariant()
    def exactly_the_modelled_prefixes_are_cached(self) -> None:
        everything = self.model.everything()
        assert self.cache.num_tree_blocks == len(everything)
        for namespace, prefix, entry in everything:
            handle = self.cache.match_prefix(prefix, namespace)
            assert handle.num_cached_tokens == len(prefix)
            match = handle.match
            assert match is not None
            if match.partial is None:
                block = match.node.block_ids[match.num_node_blocks - 1]
            else:
                block = match.partial.block_ids[match.partial_index]
            assert block == entry.block
            expected = self.model.block_content(namespace, prefix)
            assert self.model.read(block)[: len(expected)] == expected

    @invariant()
    def leaves_are_in_the_order_of_the_policy(self) -> None:
        model, evictor = self.model, self.cache.evictor
        leaves = model.leaves()
        assert [(n.root.namespace, path_tokens(n)) for n in evictor] == [
            (run.namespace, run.end) for run in leaves
        ]
        if leaves:
            victim, chosen = model.policy.victim(leaves), evictor.peek()
            assert chosen is not None
            assert path_tokens(chosen) == victim.end
        if isinstance(model.policy, SessionModel) and isinstance(evictor, SessionPolicy):
            assert dict(np.ndenumerate(evictor._returned)).items() >= model.policy.returned.items()
            assert evictor.num_returns == model.policy.returned.total()
            assert dict(evictor._ghosts) == model.policy.ghosts

    @invariant()
    def events_tell_what_is_cached(self) -> None:
        if self.model.digest is not default_digest:
            return  # where hashes collide, a router can't tell blocks apart
        self.events.flush()
        assert self.hashes == {h for run in self.model.runs() for h in self.model.block_hashes(run)}
