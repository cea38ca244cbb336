"""RadixKV: a serving engine that keeps the KV cache of multi-turn agents in a radix tree.

Folders: `cache` (blocks, tree, sequences), `model` (weights, decoder, attention), `engine`
(scheduler, sampler, step loop), `kernels` (Triton and references), `server` (HTTP).
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
