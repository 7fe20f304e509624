"""Which model to serve: `--model NAME|PATH` becomes a directory that every process can load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from shard_server.engines.torch_engine.builtin_model import BUILTIN_MODEL_NAME
from tools.child import bound_command
from tools.failures import CommandError


def resolve_model(model: str, cache_dir: Path, on_progress: Callable[[str], None]) -> tuple[str, Path]:
    """The name that clients call it by, and its directory.

    `model` is the built-in model's name, a directory, or a .gguf file, which is converted once into `cache_dir`.
    Raises CommandError when there is no such model or it cannot be converted.
    """
    if model == BUILTIN_MODEL_NAME:
        return model, _prepare([str(cache_dir)], on_progress)
    path = Path(model).expanduser().absolute()
    if path.is_dir():
        for name in ("config.json", "tokenizer.json"):
            if not (path / name).is_file():
                raise CommandError(f"{path} is not a model directory: it has no {name}")
        return path.name.lower(), path
    if path.is_file() and path.suffix.lower() == ".gguf":
        return path.stem.lower(), _prepare([str(cache_dir), str(path)], on_progress)
    if path.is_file():
        raise CommandError(f"{path} is not a model: expected a directory in Hugging Face's layout or a .gguf file")
    raise CommandError(f"no such model: {model} (built in: {BUILTIN_MODEL_NAME}; or the path of a model)")


def _prepare(args: Sequence[str], on_progress: Callable[[str], None]) -> Path:
    command = bound_command((sys.executable, "-P", "-m", "tools.prepare_model", *args))
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        model_dir = ""
        try:
            for line in process.stdout:
                if line.startswith("path: "):
                    model_dir = line.removeprefix("path: ").rstrip("\n")
                else:
                    on_progress(line.rstrip("\n"))
            problem = process.stderr.read().strip()
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0 or not model_dir:
        reason = problem.splitlines()[-1] if problem else f"status {process.returncode}"
        raise CommandError(f"the model could not be prepared: {reason}")
    return Path(model_dir)
