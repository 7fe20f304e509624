"""Compares the installed TensorRT-LLM with what its adapter may use: one row for the release, and one for each
class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shard_server.engines.base import EngineError
from shard_server.engines.tensorrt_llm.api import MODULE, TensorRtLlm, argument_names, load_tensorrt_llm
from shard_server.engines.tensorrt_llm.known_names import ARGUMENTS, SYMBOLS
from shard_server.engines.tensorrt_llm.versions import RELEASES


class LibraryRow(NamedTuple):
    name: str
    expected: str
    seen: str
    is_whole: bool
    """True when the library has everything. Names that are newer than 1.2.1 are expected to be missing there."""


def library_rows() -> Sequence[LibraryRow]:
    """Also where the library is absent or cannot be imported: then it says why, and what would be used of it. Importing
    the library takes long."""
    try:
        library = load_tensorrt_llm()
    except EngineError as error:
        return [LibraryRow("release", _names_of_releases(), str(error), is_whole=False), *_class_rows(None)]
    return [_release_row(library), *_class_rows(library)]


def _names_of_releases() -> str:
    return " or ".join(release.name for release in RELEASES)


def _release_row(library: TensorRtLlm) -> LibraryRow:
    is_known = any(library.version == release.name for release in RELEASES)
    seen = library.version if is_known else f"{library.version}, used by what it has, else like {library.release.name}"
    return LibraryRow("release", _names_of_releases(), seen, is_known)


def _class_rows(library: TensorRtLlm | None) -> Iterator[LibraryRow]:
    for symbol in sorted(SYMBOLS):
        path = symbol.removeprefix(f"{MODULE}.")
        name = path.rpartition(".")[2]
        expected = ARGUMENTS.get("LLM" if name == "TorchLlmArgs" else name, frozenset())
        found = None if library is None else library.find(path)
        if path == "LLM" or not expected:  # LLM takes any argument: TorchLlmArgs says which
            yield LibraryRow(path, "there", "absent" if found is None else "there", found is not None)
            continue
        wanted = f"{len(expected)} names"
        if found is None:
            yield LibraryRow(path, wanted, "absent", is_whole=False)
            continue
        known = argument_names(found)
        if known is None:
            yield LibraryRow(path, wanted, "names cannot be found out", is_whole=False)
            continue
        missing = sorted(expected - known)
        seen = f"all, and {len(known - expected)} others" if not missing else f"without {', '.join(missing)}"
        yield LibraryRow(path, wanted, seen, not missing)
