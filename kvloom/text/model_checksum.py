"""One checksum for a model: what `model.sha256` in the configuration is compared with."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

_SUFFIXES: Final = (".json", ".safetensors", ".jinja", ".model")
"""Of the files in a model's directory that decide what it computes and says."""


class ChecksumError(Exception):
    """The files are not those that were registered, or cannot be read."""


def model_checksum(path: Path) -> str:
    """SHA-256, in hex. Of a .gguf file: of its bytes, as `sha256sum` gives it. Of a directory: of a listing with one
    line "HEX  NAME" for each configuration, tokenizer and weights file, sorted by name (the format of `sha256sum`).
    Reads everything: about a second per GB. Raises ChecksumError."""
    try:
        if path.is_file():
            return _file_checksum(path)
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES and file.is_file())
        if not files:
            raise ChecksumError(f"{path}: no model files in it")
        listing = "".join(f"{_file_checksum(file)}  {file.name}\n" for file in files)
    except OSError as error:
        raise ChecksumError(f"{error.filename or path}: {error.strerror or error}") from error
    return hashlib.sha256(listing.encode()).hexdigest()


def check_model(path: Path, sha256: str) -> None:
    """Raise ChecksumError unless the model at `path` has this checksum; "" is not checked."""
    if not sha256:
        return
    actual = model_checksum(path)
    if actual != sha256.lower():
        raise ChecksumError(
            f"{path}: the model's files have changed or are damaged: sha256 is {actual}, expected {sha256.lower()}"
        )


def _file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
