"""How long calls take on a device, and what the device can do at most."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

__all__ = ["Clock", "Limits", "measure_limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the device did in this very run.

    Attributes:
        copy_bytes_per_s: bytes read plus bytes written by a copy of one large tensor.
        matmul_flops_per_s: of a large square product in bfloat16.
    """

    copy_bytes_per_s: float
    matmul_flops_per_s: float


class Clock:
    """Times calls: on a GPU by CUDA events around a replayed graph, else by the wall clock.

    Contenders take turns, and each finds the caches full of something else.
    """

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device = device
        self._rounds = rounds
        self._is_gpu = device.type == "cuda"
        cache_bytes = 4096
        if self._is_gpu:
            cache_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(cache_bytes, dtype=torch.uint8, device=device)

    def race(self, contenders: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Return the median seconds of each contender, which `prepare` has returned."""
        times: dict[str, list[float]] = {name: [] for name in contenders}
        if not self._is_gpu:
            for _ in range(self._rounds):
                for name, replay in contenders.items():
                    start = time.perf_counter()
                    replay()
                    times[name].append(time.perf_counter() - start)
        else:
            for _ in range(self._rounds):
                pairs = {}
                for name, replay in contenders.items():
                    # While the GPU is at this, the host launches what is measured.
                    self._flush.zero_()
                    begin, end = _event(), _event()
                    begin.record()
                    replay()
                    end.record()
                    pairs[name] = (begin, end)
                torch.cuda.synchronize(self.device)
                for name, (begin, end) in pairs.items():
                    times[name].append(begin.elapsed_time(end) / 1e3)
        return {name: statistics.median(values) for name, values in times.items()}

    def prepare(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return a warm repetition of a call; on a GPU it is a CUDA graph, without the host's part.

        Raises:
            RuntimeError: the call fails, or can't be recorded.
        """
        call()
        if not self._is_gpu:
            return call
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        replay: Callable[[], object] = graph.replay
        return replay


def measure_limits(clock: Clock, *, num_bytes: int, matmul_size: int) -> Limits:
    """Return what a copy and a product reach now.

    Args:
        clock: measures.
        num_bytes: of the tensor that is copied.
        matmul_size: rows and columns of both factors.
    """
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    left = torch.randn((matmul_size, matmul_size), dtype=torch.bfloat16, device=clock.device)
    seconds = clock.race(
        {
            "copy": clock.prepare(lambda: target.copy_(source)),
            "matmul": clock.prepare(lambda: left @ left),
        }
    )
    return Limits(2 * num_bytes / seconds["copy"], 2 * matmul_size**3 / seconds["matmul"])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
