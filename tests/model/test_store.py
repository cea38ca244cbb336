from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.model.store import default_cache_dir, install_once, is_complete


def build(work: Path) -> dict[str, object]:
    (work / "model.bin").write_bytes(b"12345")
    return {"source": "test"}


def test_concurrent_callers_build_once(tmp_path: Path) -> None:
    inside = threading.Event()
    release = threading.Event()
    builds: list[Path] = []

    def slow(work: Path) -> dict[str, object]:
        builds.append(work)
        inside.set()
        assert release.wait(10)
        return build(work)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(install_once, tmp_path / "model", slow)
        assert inside.wait(10)
        second = pool.submit(install_once, tmp_path / "model", slow)
        assert not is_complete(tmp_path / "model")
        release.set()
        assert first.result(10) == second.result(10) == tmp_path / "model"
    assert len(builds) == 1
    assert is_complete(tmp_path / "model")


def test_directory_of_a_killed_build_is_removed(tmp_path: Path) -> None:
    stale = tmp_path / ".model.tmp-dead"
    stale.mkdir()
    (stale / "model.bin").write_bytes(b"1")
    install_once(tmp_path / "model", build)
    assert not stale.exists()


@pytest.mark.parametrize("spoil", ["truncate", "delete", "source"])
def test_damaged_directory_is_built_anew(spoil: str, tmp_path: Path) -> None:
    target = install_once(tmp_path / "model", build)
    if spoil == "truncate":
        (target / "model.bin").write_bytes(b"123")
    elif spoil == "delete":
        (target / "model.bin").unlink()
    else:
        (target / "source.json").write_text("{")
    assert not is_complete(target)
    install_once(target, build)
    assert is_complete(target)
    assert (target / "model.bin").read_bytes() == b"12345"


def test_cache_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="RADIXKV_CACHE_DIR"):
        install_once(tmp_path / "file" / "model", build)


def test_cache_directory_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXKV_CACHE_DIR", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("RADIXKV_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "radixkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "radixkv"
