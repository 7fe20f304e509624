"""One checksum for a model, with which `model.sha256` in the configuration is compared."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

_SUFFIXES: Final = (".json", ".safetensors", ".weights", ".jinja", ".model")
"""The suffixes of the files in a model's directory that determine its output."""


class ChecksumError(Exception):
    """The files differ from the registered ones, or cannot be read."""


def model_checksum(path: Path) -> str:
    """The model's SHA-256, in hex. For a .gguf file, that of its bytes, as `sha256sum` prints it. For a directory, that
    of a listing with one line "HEX  NAME" for each configuration, tokenizer and weights file, sorted by name (the
    format of `sha256sum`). Reads all files, which takes about a second per GB. Raises ChecksumError."""
    try:
        if path.is_file():
            return _file_checksum(path)
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES and file.is_file())
        if not files:
            raise ChecksumError(f"{path}: The directory holds no model files.")
        listing = "".join(f"{_file_checksum(file)}  {file.name}\n" for file in files)
    except OSError as error:
        raise ChecksumError(f"{error.filename or path}: {error.strerror or error}") from error
    return hashlib.sha256(listing.encode()).hexdigest()


def check_model(path: Path, sha256: str) -> None:
    """Raise ChecksumError unless the model at `path` has this checksum. "" means that it is not checked."""
    if not sha256:
        return
    actual = model_checksum(path)
    if actual != sha256.lower():
        raise ChecksumError(
            f"{path}: The model's files have changed or are damaged: sha256 is {actual}, expected {sha256.lower()}."
        )


def _file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
