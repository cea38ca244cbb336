import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from radixkv.cache import RadixCache
from radixkv.config import ServeConfig, load_config
from radixkv.engine.tiering_setup import build_tiering, kv_fingerprint
from radixkv.errors import ConfigError
from radixkv.model.kv_pool import KVPool
from radixkv.model.loader import LoadedModel


def make_pool(block_size: int = 4, dtype: torch.dtype = torch.bfloat16, layers: int = 2) -> KVPool:
    return KVPool(layers, 8, block_size, 2, 8, dtype)


def make_model(path: Path) -> LoadedModel:
    if not (path / "config.json").exists():
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_bytes(b"weights")
    (path / "README.md").write_text("not part of the model")
    nothing = cast(Any, None)
    return LoadedModel(nothing, nothing, nothing, path, "model", 0)


def build(path: Path, pool: KVPool | None = None, **options: Any) -> Any:
    pool = pool or make_pool()
    cache = RadixCache(pool.num_blocks, pool.block_size)
    return build_tiering(make_model(path), ServeConfig(**options), pool, cache, 10**7)


def test_fingerprint_is_stable_and_ignores_other_files(tmp_path: Path) -> None:
    model, config = make_model(tmp_path), ServeConfig()
    before = kv_fingerprint(model, config, make_pool())
    (tmp_path / "README.md").write_text("changed")
    assert kv_fingerprint(model, config, make_pool()) == before
    assert len(before) == 32


def test_fingerprint_differs_with_whatever_changes_the_kv(tmp_path: Path) -> None:
    model, config = make_model(tmp_path), ServeConfig()
    seen = {kv_fingerprint(model, config, make_pool())}
    seen.add(kv_fingerprint(model, config, make_pool(block_size=8)))
    seen.add(kv_fingerprint(model, config, make_pool(dtype=torch.float16)))
    seen.add(kv_fingerprint(model, config, make_pool(layers=3)))
    seen.add(kv_fingerprint(model, replace(config, load_format="dummy"), make_pool()))
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    seen.add(kv_fingerprint(model, config, make_pool()))
    (tmp_path / "config.json").write_text('{"a": 1}')
    seen.add(kv_fingerprint(model, config, make_pool()))
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    seen.add(kv_fingerprint(model, config, make_pool()))
    assert len(seen) == 8


def test_no_tier_is_made_unless_asked_for(tmp_path: Path) -> None:
    assert build(tmp_path) is None
    assert build(tmp_path, host_cache_memory=10**6, prefix_caching=False) is None


def test_host_memory_is_counted_in_blocks(tmp_path: Path) -> None:
    pool = make_pool()
    size = pool.nbytes // pool.num_blocks
    tiers = build(tmp_path, pool, host_cache_memory=3 * size + 1)
    assert tiers.host.capacity == 3
    assert tiers.worker is None


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"host_cache_memory": 1}, "--host-cache-memory"),
        ({"host_cache_memory": 10**7 + 1}, "--host-cache-memory"),
        ({"disk_cache": "DIR", "disk_cache_size": 600}, "--disk-cache-size"),
        ({"disk_cache": "FILE"}, "--disk-cache"),
    ],
)
def test_unusable_option_is_named(tmp_path: Path, options: dict[str, Any], name: str) -> None:
    (tmp_path / "FILE").write_text("")
    if "disk_cache" in options:
        options = {**options, "disk_cache": str(tmp_path / options["disk_cache"])}
    with pytest.raises(ConfigError, match=f"^{name} "):
        build(tmp_path, **options)


def test_second_server_on_one_directory_is_refused(tmp_path: Path) -> None:
    first = build(tmp_path, disk_cache=str(tmp_path / "kv"))
    with pytest.raises(ConfigError, match="another server"):
        build(tmp_path, disk_cache=str(tmp_path / "kv"))
    first.close()
    build(tmp_path, disk_cache=str(tmp_path / "kv")).close()


def test_options_are_parsed() -> None:
    config = load_config(
        {"host_cache_memory": "2GiB", "disk_cache": "/x", "disk_cache_size": "1GB"}, environ={}
    )
    assert config.host_cache_memory == 2 * 1024**3
    assert (config.disk_cache, config.disk_cache_size) == ("/x", 10**9)
    assert load_config({"host_cache_memory": "0"}, environ={}).host_cache_memory == 0
    with pytest.raises(ConfigError, match="--tier-policy"):
        load_config({"tier_policy": "sometimes"}, environ={})
