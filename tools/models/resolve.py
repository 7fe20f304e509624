"""Resolves `--model NAME|PATH` to a directory that every process can load."""

from __future__ import annotations

import os
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
    find_builtin_gguf,
    shared_cache_dir,
)
from tools.failures import CommandError
from tools.models.registry import ModelRegistry, check_is_model
from tools.options import DEFAULT_DATA_DIR
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


def find_model(model: str, registry: ModelRegistry | None = None, sha256: str = "") -> ResolvedModel:
    """The files of a model as they are, before anything is converted: a directory or a .gguf file. `model` is the name
    of a built-in model, a path, or a name (NAME or NAME@VERSION) in the registry, and `sha256` the checksum of a path.

    Raises CommandError if there is no such model.
    """
    try:
        if model == BUILTIN_MODEL_NAME:
            return ResolvedModel(model, find_builtin_gguf())
        if model == BUILTIN_ENCODER_NAME:
            return ResolvedModel(model, find_builtin_encoder())
    except EngineError as error:
        raise CommandError(str(error)) from error
    path = Path(model).expanduser().absolute()
    registered = None if path.exists() or registry is None else registry.find(model)
    if registered is not None:
        found = find_model(registered.path, sha256=registered.sha256)
        return found._replace(name=registered.name, version=registered.version)
    if not path.exists():
        raise CommandError(
            f"no such model: {model} (built in: {', '.join(BUILTIN_NAMES)}; or a path, or a name in kvloom models list)"
        )
    check_is_model(path)
    return ResolvedModel((path.name if path.is_dir() else path.stem).lower(), path, sha256)


def resolve_model(
    model: str,
    cache_dir: Path,
    on_progress: Callable[[str], None],
    registry: ModelRegistry | None = None,
    sha256: str = "",
    *,
    with_weights: bool = True,
) -> ResolvedModel:
    """Resolves as `find_model` does, with a .gguf file converted once into `cache_dir`; its checksum is checked here.
    Without `with_weights`, the engine reads none, and a conversion leaves them out.

    Raises CommandError if there is no such model, its checksum differs, or it cannot be converted.
    """
    found = find_model(model, registry, sha256)
    if found.path.is_dir():
        return found
    weights = "weights" if with_weights else ""
    if model == BUILTIN_MODEL_NAME:
        return found._replace(path=_prepare([str(cache_dir), weights], on_progress))
    converted = _prepare([str(cache_dir), weights, str(found.path), found.sha256], on_progress)
    return found._replace(path=converted, sha256="")


def model_cache_dir(data_dir: Path | None) -> Path:
    """Where converted models are kept: in a folder that all data directories share, but for one that has its own
    already, or where there is no such folder and none can be made."""
    own = (data_dir or DEFAULT_DATA_DIR).expanduser().absolute() / "models"
    if own.is_dir():
        return own
    shared = shared_cache_dir()
    try:
        shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return own
    return shared if os.access(shared, os.W_OK) else own


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
