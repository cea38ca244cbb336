"""Deleted sessions leave the tiers below the pool, too."""

from __future__ import annotations

from pathlib import Path

from session_helpers import Served, cached_of, real_engine
from tiering_helpers import open_disk

from radixkv.server.session_tokens import common_tokens, pack_tokens

SYSTEM = "You are a helpful assistant who answers in few words." * 2
QUESTION = "a question that takes some blocks " * 2


async def test_delete_forgets_private_blocks_in_host_memory_and_on_disk(tmp_path: Path) -> None:
    disk = open_disk(tmp_path, 256, 16)
    engine = real_engine(num_blocks=24, host_blocks=8, disk=disk, max_model_len=300)
    served = await Served.start(engine=engine)
    urls = [await served.open(f"{name} {QUESTION}", system=SYSTEM) for name in ("one", "two")]
    gone, kept = (list(served.store.get(url.rpartition("/")[2], "").token_ids) for url in urls)
    shared = common_tokens(pack_tokens(gone), pack_tokens(kept))
    assert len(gone) - shared > 64
    for i in range(6):  # pushes both out of the pool
        body = {"prompt": [i + 1] * 250, "max_tokens": 1}
        await served.post("/v1/completions", body)
    assert [(await served.row(url))["cached_tokens"] for url in urls] == [0, 0]
    tiers = engine.engine.tiers
    assert tiers is not None
    assert tiers.worker is not None
    tiers.worker.drain()
    assert (await served.delete(urls[0]))["freed_blocks"] == 0
    found = [
        cached_of(await served.post("/v1/completions", {"prompt": ids, "max_tokens": 1}))
        for ids in (kept, gone)
    ]
    assert found[0] >= (len(kept) - 1) // 16 * 16
    assert shared // 16 * 16 <= found[1] <= shared
    tiers.check_integrity()
    assert await served.get("/admin/check") == {"ok": True}
    await served.stop()
