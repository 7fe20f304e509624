"""The registry of models on this machine: DATA_DIR/models.json, which `kvloom models` maintains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec

from kvloom_common.private_file import make_private_folder, write_private_file
from kvloom_common.text.model_checksum import ChecksumError, check_model, model_checksum
from tools.failures import CommandError

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class RegisteredModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model with its version and checksum."""

    name: str
    """The name that clients use."""
    version: str = ""
    path: str
    """A directory in the layout of Hugging Face, or a .gguf file."""
    sha256: str
    """See kvloom_common/text/model_checksum.py."""

    @property
    def label(self) -> str:
        return f"{self.name}@{self.version}" if self.version else self.name

    def verify(self) -> None:
        """Raise CommandError unless the files have the registered checksum."""
        try:
            check_model(Path(self.path), self.sha256)
        except ChecksumError as error:
            raise CommandError(f"{self.label}: {error}") from error


class ModelRegistry:
    """Reads the file at every call and replaces it atomically, because commands may run concurrently."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def models(self) -> list[RegisteredModel]:
        """Returns the models in the order in which they were added. Raises CommandError if the file is damaged."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=list[RegisteredModel])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError) as error:
            raise CommandError(f"{self._path}: {error}") from error

    def find(self, label: str) -> RegisteredModel | None:
        """`label` is NAME@VERSION, or NAME alone for the model of that name that was added last."""
        found = [model for model in self.models() if label in (model.label, model.name)]
        return found[-1] if found else None

    def require(self, label: str) -> RegisteredModel:
        model = self.find(label)
        if model is None:
            raise CommandError(f"no model {label} is registered (see kvloom models list)")
        return model

    def add(self, name: str, path: Path, version: str = "") -> RegisteredModel:
        """Add a model with its current checksum. Raises CommandError if the name is in use or `path` is no model."""
        for value in (name, version) if version else (name,):
            if not _NAME.fullmatch(value):
                raise CommandError(f"{value!r} is not a name: letters, digits, '.', '_' and '-' only")
        path = path.expanduser().absolute()
        check_is_model(path)
        try:
            model = RegisteredModel(name=name, version=version, path=str(path), sha256=model_checksum(path))
        except ChecksumError as error:
            raise CommandError(str(error)) from error
        models = self.models()
        if any(other.label == model.label for other in models):
            raise CommandError(f"{model.label} is registered already (kvloom models remove {model.label})")
        self._write([*models, model])
        return model

    def remove(self, label: str) -> RegisteredModel:
        """Remove a model and keep its files. Raises CommandError."""
        model = self.require(label)
        self._write([other for other in self.models() if other != model])
        return model

    def _write(self, models: list[RegisteredModel]) -> None:
        content = msgspec.json.format(msgspec.json.encode(models), indent=2) + b"\n"
        try:
            make_private_folder(self._path.parent)
            write_private_file(self._path, content)
        except OSError as error:
            raise CommandError(f"{error.filename or self._path}: {error.strerror}") from error


def check_is_model(path: Path) -> None:
    """Raises CommandError unless `path` is a model directory or a .gguf file."""
    if path.is_dir():
        for name in ("config.json", "tokenizer.json"):
            if not (path / name).is_file():
                raise CommandError(f"{path} is not a model directory: it has no {name}")
    elif not (path.is_file() and path.suffix.lower() == ".gguf"):
        raise CommandError(f"{path} is not a model: expected a directory in Hugging Face's layout or a .gguf file")
