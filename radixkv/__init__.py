"""RadixKV: a serving engine that keeps the KV cache of multi-turn agents in a radix tree.

Folders: `cache` (blocks, tree, sequences), `model` (weights, decoder, attention), `engine`
(scheduler, sampler, step loop), `kernels` (Triton and references), `server` (HTTP). As a library:

    from radixkv import LLM, SamplingParams

    outputs = LLM().generate(["The capital of France is"], SamplingParams(max_tokens=8))

These names are loaded when they are used, so that `import radixkv` itself costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixkv.async_engine import AsyncEngine
    from radixkv.llm import LLM, BeamSearchParams
    from radixkv.outputs import CompletionOutput, Logprob, RequestOutput
    from radixkv.request import GrammarSpec, SamplingParams
    from radixkv.structured import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "GrammarSpec",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

__version__ = "0.1.0"

_HOMES = {
    "AsyncEngine": "radixkv.async_engine",
    "BeamSearchParams": "radixkv.llm",
    "CompletionOutput": "radixkv.outputs",
    "GrammarSpec": "radixkv.request",
    "LLM": "radixkv.llm",
    "Logprob": "radixkv.outputs",
    "RequestOutput": "radixkv.outputs",
    "SamplingParams": "radixkv.request",
    "StructuredOutputsParams": "radixkv.structured",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'radixkv' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
