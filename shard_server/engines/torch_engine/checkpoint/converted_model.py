"""A cache of converted GGUF files: each is converted once, whoever asks first, and re-used by everyone after."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shard_server.engines.base import EngineError

_MANIFEST = "conversion.json"
_CONVERTER_VERSION = 2
"""Raised when the converter's output changes, so that cached directories are made anew."""


def ensure_converted_model(
    gguf_path: Path, cache_dir: Path, *, name: str | None = None, on_progress: Callable[[str], None] | None = None
) -> Path:
    """The directory that holds `gguf_path` converted; converts it if `cache_dir` has no complete one.

    Safe when several processes ask at once (one converts, the others wait for it) and when one is killed halfway (the
    directory appears by a rename, once it is complete). `name` is the directory's; by default it is derived from the
    file's path, so that two files of one name do not meet. Raises EngineError.
    """
    try:
        source = {"name": gguf_path.name, "num_bytes": gguf_path.stat().st_size, "version": _CONVERTER_VERSION}
        model_dir = cache_dir / (name or _derived_name(gguf_path))
        if _is_complete(model_dir, source):
            return model_dir
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f".{model_dir.name}.lock"):
            if not _is_complete(model_dir, source):
                _convert_into(model_dir, gguf_path, source, on_progress)
    except OSError as error:
        raise EngineError(f"{error.filename or gguf_path}: {error.strerror or error}") from error
    return model_dir


def _derived_name(gguf_path: Path) -> str:
    digest = hashlib.sha256(str(gguf_path.resolve()).encode()).hexdigest()
    return f"{gguf_path.stem}-{digest[:8]}"


def _is_complete(model_dir: Path, source: dict[str, Any]) -> bool:
    try:
        manifest = json.loads((model_dir / _MANIFEST).read_bytes())
        return manifest["source"] == source and all(
            (model_dir / name).stat().st_size == num_bytes for name, num_bytes in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel drops the lock when its holder dies, so nobody waits for a process that is gone.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(
    model_dir: Path, gguf_path: Path, source: dict[str, Any], on_progress: Callable[[str], None] | None
) -> None:
    # Imported here because it brings torch: who only looks up a converted model need not pay for that.
    from shard_server.engines.torch_engine.checkpoint.gguf_conversion import convert_gguf

    with tempfile.TemporaryDirectory(prefix=f".{model_dir.name}-", dir=model_dir.parent) as scratch:
        fresh_dir = Path(scratch) / "model"
        convert_gguf(gguf_path, fresh_dir, on_progress)
        files = {path.name: path.stat().st_size for path in sorted(fresh_dir.iterdir())}
        (fresh_dir / _MANIFEST).write_text(json.dumps({"source": source, "files": files}, indent=2) + "\n")
        if model_dir.exists():  # stale or damaged; out of the way first, since a rename cannot replace a full directory
            model_dir.rename(Path(scratch) / "stale")
        fresh_dir.rename(model_dir)
        shutil.rmtree(Path(scratch) / "stale", ignore_errors=True)
