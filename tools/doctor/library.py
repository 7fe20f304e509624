"""What the installed TensorRT-LLM has of what its adapter may use: one row for each class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shard_server.engines.tensorrt_llm.api import MODULE, argument_names, load_tensorrt_llm
from shard_server.engines.tensorrt_llm.known_names import ARGUMENTS, SYMBOLS


class LibraryRow(NamedTuple):
    name: str
    expected: str
    seen: str
    is_whole: bool
    """Whether it has everything. Names that are newer than 1.2.1 are expected to be missing there."""


def library_rows() -> Iterator[LibraryRow]:
    """Raises EngineError if the library cannot be imported."""
    library = load_tensorrt_llm()
    for symbol in sorted(SYMBOLS):
        path = symbol.removeprefix(f"{MODULE}.")
        name = path.rpartition(".")[2]
        expected = ARGUMENTS.get("LLM" if name == "TorchLlmArgs" else name, frozenset())
        found = library.find(path)
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
