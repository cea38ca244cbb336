"""Makes the tiers that a configuration asks for."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from radixkv import __version__
from radixkv.cache import RadixCache
from radixkv.cache.hashing import TOKEN_BYTES
from radixkv.cache.tiers_disk import DiskTier
from radixkv.config import ServeConfig, format_bytes
from radixkv.engine.tiering import Tiering
from radixkv.engine.tiering_labels import LABEL_BYTES
from radixkv.errors import ConfigError
from radixkv.model.kv_pool import KVPool
from radixkv.model.loader import LoadedModel

__all__ = ["build_tiering", "kv_fingerprint"]

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")


def build_tiering(
    loaded: LoadedModel, config: ServeConfig, pool: KVPool, cache: RadixCache, memory: int
) -> Tiering | None:
    """Return the tiers below `pool`, or None if none is asked for.

    Args:
        loaded: the model whose KV it is.
        config: checked options.
        pool: holds the content of the blocks.
        cache: is followed from now on.
        memory: bytes that host memory may take at most.

    Raises:
        ConfigError: an option doesn't fit this model or machine; the message names it.
    """
    if not config.prefix_caching or not (config.host_cache_memory or config.disk_cache):
        return None
    content_bytes = pool.nbytes // pool.num_blocks
    host_blocks = config.host_cache_memory // content_bytes
    if config.host_cache_memory and not content_bytes <= config.host_cache_memory <= memory:
        raise ConfigError(
            f"--host-cache-memory must be 0 or from {format_bytes(content_bytes)} (a block of this "
            f"model) to {format_bytes(max(memory, 0))} (the memory available beside the KV pool), "
            f"got {format_bytes(config.host_cache_memory)}"
        )
    disk = None
    if config.disk_cache is not None:
        try:
            disk = DiskTier(
                Path(config.disk_cache).expanduser(),
                config.disk_cache_size,
                fingerprint=kv_fingerprint(loaded, config, pool),
                content_bytes=content_bytes,
                token_bytes=pool.block_size * TOKEN_BYTES + LABEL_BYTES,
            )
        except ValueError:
            raise ConfigError(
                f"--disk-cache-size must be at least {format_bytes(2 * content_bytes)} for this "
                f"model, got {format_bytes(config.disk_cache_size)}"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"--disk-cache {config.disk_cache} can't be used: {error.strerror}"
            ) from None
    return Tiering(
        pool,
        cache,
        content_bytes,
        host_blocks=host_blocks,
        disk=disk,
        policy=config.tier_policy,
        save_limit_s=config.disk_save_timeout,
    )


def kv_fingerprint(loaded: LoadedModel, config: ServeConfig, pool: KVPool) -> bytes:
    """Return 32 bytes that differ wherever the KV of equal tokens could differ.

    Covers the model's shape and weight files (name, size, time of change) and how they are
    quantized, the type, scales and layout of the pool, and the version of RadixKV, whose arithmetic
    may change.
    """
    parts: list[object] = [__version__, config.load_format == "dummy", config.quantization]
    path = loaded.model_path
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        if file.suffix in _WEIGHT_SUFFIXES:
            stat = file.stat()
            parts.append((file.name, stat.st_size, stat.st_mtime_ns))
        elif file.name == "config.json":
            parts.append(hashlib.sha256(file.read_bytes()).hexdigest())
    parts.append((str(pool.dtype), tuple(pool.data.shape[:2]), tuple(pool.data.shape[3:])))
    for scales in (pool.k_scales, pool.v_scales):
        if scales is not None:
            data = torch.stack(scales).cpu().numpy().tobytes()
            parts.append(hashlib.sha256(data).hexdigest())
    return hashlib.sha256(repr(parts).encode()).digest()
