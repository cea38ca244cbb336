"""The cache directory of converted models: where it is, and how a model gets into it whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from radixkv.errors import ConfigError
from radixkv.model.progress import progress

__all__ = ["SOURCE_FILE", "default_cache_dir", "install_once", "is_complete", "sha256_of"]

SOURCE_FILE = "source.json"
_CHUNK = 1 << 20


def default_cache_dir() -> Path:
    """Return `$RADIXKV_CACHE_DIR`, else `radixkv` in `$XDG_CACHE_HOME`, else `~/.cache/radixkv`."""
    if own := os.environ.get("RADIXKV_CACHE_DIR"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "radixkv"


def is_complete(directory: Path) -> bool:
    """Whether every file that the directory's source.json lists is there with its size."""
    try:
        source = json.loads((directory / SOURCE_FILE).read_text(encoding="utf-8"))
        sizes: dict[str, int] = source["files"]
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def install_once(
    target: Path,
    build: Callable[[Path], dict[str, object]],
    *,
    console: Console | None = None,
) -> Path:
    """Make `target` with `build` unless it is complete already, and return it.

    One process builds, the others wait for it and use what it made. `build` gets an empty
    directory beside `target` and returns what source.json is to say about the origin; the sizes
    of the files are added, and the directory is renamed to `target` when everything is on the
    disk. A build that dies leaves a directory that nobody looks into; the next one removes it.

    Raises:
        ConfigError: the cache directory can't be written.
    """
    if is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.parent / f".{target.name}.lock")
        _acquire(lock, target, console)
    except OSError as error:
        raise ConfigError(
            f"can't write to the cache directory {target.parent}: {error}; set RADIXKV_CACHE_DIR "
            "to another one"
        ) from error
    try:
        if is_complete(target):
            return target
        prefix = f".{target.name}.tmp-"
        for stale in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(stale, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            origin = build(work)
            _finish(work, target, origin)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        lock.release()
    return target


def sha256_of(path: Path, *, console: Console | None = None) -> str:
    """Return the SHA-256 of a file in hexadecimal, showing progress."""
    digest = hashlib.sha256()
    size = path.stat().st_size
    with (
        path.open("rb") as file,
        progress(f"Checking {path.name}", size, in_bytes=True, console=console) as task,
    ):
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            task.advance(len(chunk))
    return digest.hexdigest()


def _acquire(lock: FileLock, target: Path, console: Console | None) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        (console or Console(stderr=True)).print(
            f"Waiting for another process to prepare {target.name}", highlight=False
        )
        lock.acquire()


def _finish(work: Path, target: Path, origin: dict[str, object]) -> None:
    files = {path.name: path.stat().st_size for path in sorted(work.iterdir())}
    for name in files:
        # Temporary files are made for their owner alone; a cache may be shared.
        (work / name).chmod(0o644)
        _sync(work / name)
    source = work / SOURCE_FILE
    source.write_text(json.dumps(origin | {"files": files}, indent=2) + "\n", encoding="utf-8")
    _sync(source)
    if target.exists():
        shutil.rmtree(target)
    work.rename(target)
    target.chmod(0o755)


def _sync(path: Path) -> None:
    # Without it a power cut after the rename could leave a complete-looking file of zeros.
    with path.open("rb+") as file:
        os.fsync(file.fileno())
