"""Which engine requests stand behind the ids that clients know."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["RequestIds", "engine_ids"]

MAX_REMEMBERED = 4096
# What the answers' own ids begin with.
PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


def engine_ids(generation_id: str, count: int) -> list[str]:
    """Return the engine's names for the prompts of one HTTP request.

    >>> engine_ids("7f", 1), engine_ids("7f", 2)
    (['7f'], ['7f-0', '7f-1'])
    """
    if count == 1:
        return [generation_id]
    return [f"{generation_id}-{i}" for i in range(count)]


class RequestIds:
    """Remembers what the latest requests were called: `X-Request-ID`, and the session of a turn.

    A name that comes again stands for the later request.
    """

    def __init__(self, capacity: int = MAX_REMEMBERED) -> None:
        self._capacity = capacity
        self._generations: OrderedDict[str, tuple[str, int]] = OrderedDict()

    def remember(self, generation_id: str, num_prompts: int, *names: str) -> None:
        """Let `names`, and the answer's own id, stand for a request from now on."""
        for name in (generation_id, *names):
            self._generations[name] = (generation_id, num_prompts)
            self._generations.move_to_end(name)
        while len(self._generations) > self._capacity:
            self._generations.popitem(last=False)

    def resolve(self, name: str, index: int = 0) -> str:
        """Return the engine's name of a request's prompt.

        Args:
            name: an answer's `id`, an `X-Request-ID`, a session's id, or an engine's name.
            index: which prompt, of a request with several.
        """
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        generation_id, count = self._generations.get(name, (name, 1))
        ids = engine_ids(generation_id, count)
        return ids[index] if index < len(ids) else f"{generation_id}-{index}"
