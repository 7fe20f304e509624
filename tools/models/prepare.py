"""Make a model ready to load, in a process of its own: `python -m tools.models.prepare CACHE_DIR [GGUF_FILE SHA256]`.

SHA256 is "" or what the file's must be. Prints what it does, a line each, and last the model's directory as
`path: DIRECTORY`. A process of its own, because converting brings in torch, whose memory the supervisor would keep for
as long as the fabric runs.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from kvloom.process.extras import MissingPackageError, naming_extras
from kvloom.text.model_checksum import ChecksumError, check_model
from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.converted_model import ensure_builtin_model, ensure_converted_model


def main(args: list[str]) -> int:
    cache_dir = Path(args[0])
    try:
        with naming_extras():
            model_dir = _prepare(cache_dir, args[1:])
    except (EngineError, ChecksumError, MissingPackageError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    _report(f"path: {model_dir}")
    return 0


def _prepare(cache_dir: Path, gguf_file: list[str]) -> Path:
    if not gguf_file:
        return ensure_builtin_model(cache_dir, _report)
    gguf_path, sha256 = Path(gguf_file[0]), gguf_file[1]
    if sha256:
        _report(f"checking {gguf_path.name}")
        check_model(gguf_path, sha256)
    return _ensure_converted(gguf_path, cache_dir)


def _ensure_converted(gguf_path: Path, cache_dir: Path) -> Path:
    """A file that was replaced by another of its size is another model: the time of change is part of the name."""
    stat = gguf_path.stat()
    identity = f"{gguf_path.resolve()}\0{stat.st_mtime_ns}\0{stat.st_size}"
    name = f"{gguf_path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    return ensure_converted_model(gguf_path, cache_dir, name=name, on_progress=_report)


def _report(message: str) -> None:
    print(message, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
