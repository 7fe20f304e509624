"""Which model to serve: `--model NAME|PATH` becomes a directory that every process can load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_MODEL_NAME
from tools.failures import CommandError
from tools.models.registry import ModelRegistry
from tools.supervisor.child import bound_command


class ResolvedModel(NamedTuple):
    name: str
    """What clients call it."""
    path: Path
    """Its directory."""
    sha256: str = ""
    """Of that directory, to be checked by whoever loads it; "" where nothing is registered, or was checked here."""


def resolve_model(
    model: str,
    cache_dir: Path,
    on_progress: Callable[[str], None],
    registry: ModelRegistry | None = None,
    sha256: str = "",
) -> ResolvedModel:
    """`model` is the built-in model's name, a directory, a .gguf file, which is converted once into `cache_dir`, or a
    name (NAME or NAME@VERSION) in the registry. `sha256`: of the path given; a GGUF file's is checked here.

    Raises CommandError when there is no such model, its checksum is another, or it cannot be converted.
    """
    if model == BUILTIN_MODEL_NAME:
        return ResolvedModel(model, _prepare([str(cache_dir)], on_progress))
    path = Path(model).expanduser().absolute()
    registered = None if path.exists() or registry is None else registry.find(model)
    if registered is not None:
        found = resolve_model(registered.path, cache_dir, on_progress, sha256=registered.sha256)
        return found._replace(name=registered.name)
    if path.is_dir():
        for name in ("config.json", "tokenizer.json"):
            if not (path / name).is_file():
                raise CommandError(f"{path} is not a model directory: it has no {name}")
        return ResolvedModel(path.name.lower(), path, sha256)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return ResolvedModel(path.stem.lower(), _prepare([str(cache_dir), str(path), sha256], on_progress))
    if path.is_file():
        raise CommandError(f"{path} is not a model: expected a directory in Hugging Face's layout or a .gguf file")
    raise CommandError(
        f"no such model: {model} (built in: {BUILTIN_MODEL_NAME}; or a path, or a name in kvloom models list)"
    )


def _prepare(args: Sequence[str], on_progress: Callable[[str], None]) -> Path:
    command = bound_command((sys.executable, "-P", "-m", "tools.models.prepare", *args))
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
