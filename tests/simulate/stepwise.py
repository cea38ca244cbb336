"""A slow, independent simulation of blocks without reuse: one step at a time, one loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sim_helpers import BLOCK, PlainTime

from radixkv.simulate.traffic import Request


def stepwise(
    requests: Sequence[Request], total: int, budget: int, max_seqs: int, cost: PlainTime
) -> tuple[list[float], list[float], int]:
    """Return when each request gets its first token and its last, and how many preemptions.

    A request is (index, tokens that have to be computed before it decodes, tokens stored). All have
    one sample. Nothing is rejected: the caller sees to it that each fits alone.
    """
    num_blocks = total // BLOCK
    spare = math.ceil(0.01 * num_blocks)
    first, last = [math.nan] * len(requests), [math.nan] * len(requests)
    queue: list[int] = []
    order: list[int] = []  # admitted
    made = [0] * len(requests)  # answer tokens stored
    left: dict[int, int] = {}  # prompt tokens to compute
    blocks: dict[int, int] = {}
    preemptions = arrived = 0
    now = 0.0
    while arrived < len(requests) or queue or order:
        if not queue and not order:
            now = max(now, requests[arrived].arrival)
        while arrived < len(requests) and requests[arrived].arrival <= now:
            queue.append(arrived)
            arrived += 1

        def preempt(index: int) -> None:
            nonlocal preemptions
            preemptions += 1
            order.remove(index)
            del blocks[index]
            left.pop(index, None)
            queue.insert(0, index)

        decoding = [i for i in order if i not in left]
        for index in sorted(decoding):
            if index not in order:
                continue
            stored = requests[index].prompt_len + made[index]
            while index in order and stored == blocks[index] * BLOCK:
                if sum(blocks.values()) < num_blocks:
                    blocks[index] += 1
                else:
                    preempt(order[-1])
        decoding = [i for i in order if i not in left]

        room = budget - len(decoding)
        context = done_context = 0
        done = []
        while room > 0:
            pending = [i for i in order if i in left]
            if not pending:
                if not queue or len(order) >= max_seqs:
                    break
                head = queue[0]
                stored = requests[head].prompt_len + made[head]
                need = -(-stored // BLOCK)
                if sum(blocks.values()) + need + (spare if order else 0) > num_blocks:
                    break
                queue.pop(0)
                order.append(head)
                blocks[head], left[head] = need, stored
                continue
            index = pending[0]
            count = min(room, left[index])
            room -= count
            left[index] -= count
            context += requests[index].prompt_len + made[index] - left[index]
            if not left[index]:
                del left[index]
                done.append(index)
        done_context = sum(requests[i].prompt_len + made[i] + 1 for i in decoding)
        now += cost.step + cost.read * (context + done_context)
        for index in decoding:
            made[index] += 1
        for index in done:
            if math.isnan(first[index]):
                first[index] = now
        for index in [*decoding, *done]:
            if made[index] >= requests[index].output_len - 1:
                last[index] = now
                order.remove(index)
                del blocks[index]
    return first, last, preemptions
