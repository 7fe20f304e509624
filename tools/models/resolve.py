"""Resolves `--model NAME|PATH` to a directory that every process can load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.converted_model import (
    BUILTIN_ENCODER_NAME,
    BUILTIN_MODEL_NAME,
    BUILTIN_NAMES,
    find_builtin_encoder,
)
from tools.failures import CommandError
from tools.models.registry import ModelRegistry, check_is_model
from tools.supervisor.child import bound_command


class ResolvedModel(NamedTuple):
    """A model that is ready to load."""

    name: str
    """The name that clients use."""
    path: Path
    """The directory of the model."""
    sha256: str = ""
    """The checksum of the directory, which the loading process checks. "" if there is none, or it was checked here."""
    version: str = ""
    """That of a registered model."""


def resolve_model(
    model: str,
    cache_dir: Path,
    on_progress: Callable[[str], None],
    registry: ModelRegistry | None = None,
    sha256: str = "",
) -> ResolvedModel:
    """`model` is the name of a built-in model, a directory, a .gguf file, which is converted once into `cache_dir`,
    or a name (NAME or NAME@VERSION) in the registry. `sha256` is the checksum of a path; that of a GGUF file is checked
    here.

    Raises CommandError if there is no such model, its checksum differs, or it cannot be converted.
    """
    if model == BUILTIN_MODEL_NAME:
        return ResolvedModel(model, _prepare([str(cache_dir)], on_progress))
    if model == BUILTIN_ENCODER_NAME:
        try:
            return ResolvedModel(model, find_builtin_encoder())
        except EngineError as error:
            raise CommandError(str(error)) from error
    path = Path(model).expanduser().absolute()
    registered = None if path.exists() or registry is None else registry.find(model)
    if registered is not None:
        found = resolve_model(registered.path, cache_dir, on_progress, sha256=registered.sha256)
        return found._replace(name=registered.name, version=registered.version)
    if not path.exists():
        raise CommandError(
            f"no such model: {model} (built in: {', '.join(BUILTIN_NAMES)}; or a path, or a name in kvloom models list)"
        )
    check_is_model(path)
    if path.is_dir():
        return ResolvedModel(path.name.lower(), path, sha256)
    return ResolvedModel(path.stem.lower(), _prepare([str(cache_dir), str(path), sha256], on_progress))


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
