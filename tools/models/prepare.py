"""Prepares a model for loading, in a process of its own:

    python -m tools.models.prepare CACHE_DIR WEIGHTS [GGUF_FILE SHA256]

WEIGHTS is "" for an engine that reads none. SHA256 is the expected checksum of the file or "". Prints a line for each
step, and at last the directory of the model as `path: DIRECTORY`. It is a process of its own because conversion imports
torch, whose memory the supervisor would keep as long as the fabric runs.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from kvloom_common.process.extras import MissingPackageError, naming_extras
from kvloom_common.text.model_checksum import ChecksumError, check_model
from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.converted_model import ensure_builtin_model, ensure_converted_model


def main(args: list[str]) -> int:
    cache_dir = Path(args[0])
    try:
        with naming_extras():
            model_dir = _prepare(cache_dir, bool(args[1]), args[2:])
    except (EngineError, ChecksumError, MissingPackageError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    _report(f"path: {model_dir}")
    return 0


def _prepare(cache_dir: Path, with_weights: bool, gguf_file: list[str]) -> Path:
    if not gguf_file:
        return ensure_builtin_model(cache_dir, _report, with_weights=with_weights)
    gguf_path, sha256 = Path(gguf_file[0]), gguf_file[1]
    if sha256:
        _report(f"checking {gguf_path.name}")
        check_model(gguf_path, sha256)
    return _ensure_converted(gguf_path, cache_dir, with_weights)


def _ensure_converted(gguf_path: Path, cache_dir: Path, with_weights: bool) -> Path:
    """Convert a file. Its modification time is part of the name, because a replaced file is another model."""
    stat = gguf_path.stat()
    identity = f"{gguf_path.resolve()}\0{stat.st_mtime_ns}\0{stat.st_size}"
    name = f"{gguf_path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    return ensure_converted_model(gguf_path, cache_dir, name=name, on_progress=_report, with_weights=with_weights)


def _report(message: str) -> None:
    print(message, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
