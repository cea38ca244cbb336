"""Who uses how much of the cache, in the report and on the metrics page."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import make_engine
from server_fakes import END, STOP, FakeTokenizer
from test_admin import scrape
from tiering_helpers import open_disk

from radixkv.cache import RadixCache
from radixkv.cache.quotas import Quotas
from radixkv.engine import AsyncEngine, namespace_label, namespace_of
from radixkv.engine.usage import namespace_usage
from radixkv.errors import ConfigError
from radixkv.server.auth import namespace_quotas

HEADERS = {"Authorization": "Bearer sesame"}
BODY = {"max_tokens": 1, "ignore_eos": True, "prompt": [7] * 65}


@pytest.fixture
def serve(make_client: Any) -> Any:
    async def start(shares: Any = (), **options: Any) -> Any:
        engine = make_engine(100, 16, max_num_batched_tokens=256, eos_token_ids=(END, STOP))
        quotas = namespace_quotas("sesame", shares)
        engine.cache.quotas = Quotas(100, quotas, 1.0)
        served = AsyncEngine(engine, FakeTokenizer(), model_name="real")  # type: ignore[arg-type]
        return await make_client(served, api_key="sesame", **options)

    return start


async def usage_of(client: Any) -> dict[str, Any]:
    report = await (await client.get("/admin/cache", headers=HEADERS)).json()
    return {label.partition("/")[2]: entry for label, entry in report["namespaces"].items()}


async def complete(client: Any, **fields: Any) -> None:
    response = await client.post("/v1/completions", json=BODY | fields, headers=HEADERS)
    assert response.status == 200


async def test_quotas_show_limit_use_and_excess(serve: Any) -> None:
    client = await serve([("alice", 0.02), ("default", 0.5)])
    await complete(client, cache_salt="alice")
    await complete(client, cache_salt="bob")
    usage = await usage_of(client)
    # Four whole blocks and a tail.
    assert usage["alice"]["quota"] == {
        "own": True, "limit_blocks": 2, "used_blocks": 5, "excess_blocks": 3,
    }  # fmt: skip
    assert usage["bob"]["quota"] == {
        "own": False, "limit_blocks": 100, "used_blocks": 5, "excess_blocks": 0,
    }  # fmt: skip
    assert usage[""]["quota"]["limit_blocks"] == 50
    assert usage[""]["requests"] == 0


async def test_without_quotas_there_is_nothing_to_show(serve: Any) -> None:
    client = await serve()
    await complete(client)
    assert (await usage_of(client))[""]["quota"] is None
    assert not [name for name, _ in await scrape(client) if "quota" in name]


async def test_pins_are_counted_by_namespace(serve: Any) -> None:
    client = await serve()
    for prompt in ([7] * 65, [7] * 97):
        await complete(client, prompt=prompt, cache_salt="a", cache_pin_ttl=60)
    await complete(client)
    usage = await usage_of(client)
    assert (usage["a"]["pins"], usage["a"]["pinned_blocks"]) == (2, 6)
    assert (usage[""]["pins"], usage[""]["pinned_blocks"]) == (0, 0)


async def test_metrics_name_no_salt_but_those_of_the_operator(serve: Any) -> None:
    client = await serve([("alice", 0.02)])
    for salt in ("alice", "secret"):
        await complete(client, cache_salt=salt, cache_pin_ttl=60)
    samples = await scrape(client)
    (excess,) = (v for (n, labels), v in samples.items() if n == "radixkv:quota_excess_blocks")
    assert excess == 3
    labels = {labels for name, labels in samples if name.startswith("radixkv:namespace_")}
    assert len(labels) == 1
    assert labels.pop().endswith("/alice")
    assert "secret" not in await (await client.get("/metrics")).text()


async def test_metrics_show_the_tiers(make_client: Any, tmp_path: Any) -> None:
    disk = open_disk(tmp_path, block_size=16)
    engine = make_engine(8, 16, max_num_batched_tokens=256, host_blocks=2, disk=disk)
    served = AsyncEngine(engine, FakeTokenizer(), model_name="real")  # type: ignore[arg-type]
    client = await make_client(served)
    for token in range(1, 5):
        await client.post("/v1/completions", json={**BODY, "prompt": [token] * 65})
    assert engine.tiers is not None
    assert engine.tiers.worker is not None
    engine.tiers.worker.drain()
    samples = await scrape(client)
    assert samples["radixkv:tier_blocks", "tier=host"] == 2
    assert samples["radixkv:tier_blocks", "tier=disk"] == len(disk) > 0
    assert samples["radixkv:tier_capacity_blocks", "tier=host"] == 2
    assert samples["radixkv:disk_queue_blocks", ""] == 0
    assert samples["radixkv:tier_blocks_loaded_total", "tier=disk"] == 0
    assert samples["radixkv:tier_blocks_offloaded_total", ""] > 2


def test_a_tenants_quota_is_that_of_the_namespace_its_requests_use() -> None:
    shares = [("default", 0.5), ("a%2Cb", 0.25), ("%64efault", 0.125)]
    assert namespace_quotas(None, shares) == {
        (): 0.5, ("", "a,b"): 0.25, ("", "default"): 0.125,
    }  # fmt: skip
    tenants = {namespace[0] for namespace in namespace_quotas("sesame", shares)}
    assert len(tenants) == 1
    assert tenants.pop().startswith("key-")


@pytest.mark.parametrize("name", ["x" * 257])
def test_a_quota_for_what_can_be_no_salt_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--tenant-quota 'xxx"):
        namespace_quotas(None, [(name, 0.5)])


@pytest.mark.parametrize("namespace", [(), ("", "a/b"), ("key-1", ""), ("k", "%2F=,ü")])
def test_a_label_names_its_namespace(namespace: tuple[str, ...]) -> None:
    assert namespace_of(namespace_label(namespace)) == namespace


def test_blocks_that_a_running_sequence_holds_count_as_used() -> None:
    cache = RadixCache(20, 4, quotas={("t",): 0.1})
    sequence = cache.create_sequence(range(12), ("t",))
    sequence.reuse()
    sequence.reserve(12)
    usage = namespace_usage(cache)["t"]
    assert (usage["blocks"], usage["quota"]["used_blocks"]) == (0, 3)
    sequence.free()
    cache.check_integrity()
