"""The index of a vector store finds what a comparison with all chunks finds, whatever was added and removed before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from orchestrator.search import index as index_module
from orchestrator.search.index import StoreIndex
from orchestrator.store.vector_chunks import Chunk

DIMENSIONS = 16
RANDOM = np.random.default_rng(7)


class Store:
    """The rows of a vector store, and the index of it."""

    def __init__(self) -> None:
        self.index = StoreIndex()
        self.revision = 0
        self.files: dict[str, tuple[int, bytes, list[Chunk]]] = {}
        self._number = 0

    def put(self, name: str, texts: Sequence[str], attributes: Mapping[str, Any] | None = None) -> None:
        chunks: list[Chunk] = []
        for text in texts:
            self._number += 1
            vector = RANDOM.standard_normal(DIMENSIONS).astype("<f4")
            chunks.append(Chunk(self._number, text, vector.tobytes()))
        self.revision += 1
        self.files[name] = self.revision, msgspec.json.encode({"attributes": attributes or {}}), chunks

    def bring_up_to_date(self) -> None:
        known = self.index.versions
        kept = {name: (version, body) for name, (version, body, _) in self.files.items()}
        added = {name: one[2] for name, one in self.files.items() if known.get(name) != one[0]}
        self.index.update(self.revision, kept, added)

    def complete(self) -> None:
        """Does what is done beside the searches of a large store."""
        snapshot = self.index.snapshot()
        if self.index.lacks_words:
            self.index.adopt_words(index_module.ranked_words(snapshot))
        if self.index.lacks_graph:
            graph = index_module.empty_graph(DIMENSIONS)
            graph.add(snapshot.numbers, snapshot.vectors)
            self.index.adopt_graph(graph, snapshot.numbers)

    def nearest(self, query: bytes, most: int) -> list[int]:
        vector = np.frombuffer(query, "<f4")
        chunks = [chunk for _, _, chunks in self.files.values() for chunk in chunks]

        def cosine(chunk: Chunk) -> float:
            own = np.frombuffer(chunk.vector, "<f4")
            return float(own @ vector / np.linalg.norm(own) / np.linalg.norm(vector))

        return [chunk.number for chunk in sorted(chunks, key=cosine, reverse=True)][:most]


def some_vector() -> bytes:
    return RANDOM.standard_normal(DIMENSIONS).astype("<f4").tobytes()


@pytest.mark.parametrize("exact", [0, 1000])
def test_vectors_are_found_after_files_have_come_and_gone(monkeypatch: pytest.MonkeyPatch, exact: int) -> None:
    """The graph is changed in place: what was removed must not be found, and what was added must."""
    monkeypatch.setattr(index_module, "EXACT_CHUNKS", exact)
    store = Store()
    for number in range(8):
        store.put(f"f{number}", [f"text {number} {place}" for place in range(10)])
    store.bring_up_to_date()
    store.complete()
    assert not store.index.lacks_graph
    for name in ("f1", "f5"):
        del store.files[name]
    store.put("f2", ["another text"] * 5)
    store.put("f9", ["one more"] * 10)
    store.bring_up_to_date()
    for _ in range(5):
        query = some_vector()
        found = store.index.by_vector(query, 5, None)
        assert [number for number, _ in found] == store.nearest(query, 5)
        assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)


def test_words_are_found_and_rare_ones_count_more() -> None:
    store = Store()
    store.put("a", ["the loom and the shuttle", "the mill and the river"])
    store.put("b", ["the loom of Jacquard, the weaver"])
    store.bring_up_to_date()
    assert [number for number, _ in store.index.by_words("JACQUARD loom", 5, None)] == [3, 1]
    assert store.index.by_words("nothing like that", 5, None) == []
    assert store.index.by_words("", 5, None) == []
    del store.files["b"]
    store.bring_up_to_date()
    assert store.index.by_words("Jacquard", 5, None) == []
    assert [number for number, _ in store.index.by_words("river", 5, None)] == [2]


def test_a_large_store_is_searched_while_its_words_are_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranking them anew takes seconds, and no search waits for it. What is new is found by vectors meanwhile, and what
    may not be found any more is not."""
    monkeypatch.setattr(index_module, "PROMPT_CHUNKS", 0)
    store = Store()
    store.put("a", ["a loom"], {"year": 1})
    store.put("b", ["a loom"], {"year": 1})
    store.bring_up_to_date()
    assert store.index.by_words("loom", 3, None) == []
    store.complete()
    assert [number for number, _ in store.index.by_words("loom", 3, None)] == [1, 2]
    store.put("c", ["a loom and a shuttle"], {"year": 2})
    _, _, chunks = store.files["b"]
    store.revision += 1
    store.files["b"] = store.revision, b'{"attributes":{"year":2}}', chunks
    del store.files["a"]
    store.bring_up_to_date()
    assert store.index.lacks_words
    assert store.index.by_words("shuttle", 3, None) == []
    assert [number for number, _ in store.index.by_words("loom", 3, None)] == [2]
    first_year = store.index.allowed({"type": "eq", "key": "year", "value": 1})
    assert store.index.by_words("loom", 3, first_year) == []
    assert {number for number, _ in store.index.by_vector(some_vector(), 3, None)} == {2, 3}
    store.complete()
    assert [number for number, _ in store.index.by_words("shuttle", 3, None)] == [3]


def test_filters_leave_out_files() -> None:
    store = Store()
    store.put("old", ["a loom"] * 3, {"year": 1804})
    store.put("new", ["a loom"] * 3, {"year": 2024})
    store.bring_up_to_date()
    wanted = {"type": "gt", "key": "year", "value": 2000}
    allowed = store.index.allowed(wanted)
    assert {number for number, _ in store.index.by_words("loom", 9, allowed)} == {4, 5, 6}
    assert {number for number, _ in store.index.by_vector(some_vector(), 9, allowed)} == {4, 5, 6}
    nothing = store.index.allowed({"type": "gt", "key": "year", "value": 3000})
    assert store.index.by_vector(some_vector(), 9, nothing) == store.index.by_words("loom", 9, nothing) == []


def test_an_empty_store_and_vectors_of_another_size_are_no_errors() -> None:
    """A model may be replaced under its name by one with other vectors: what it made is still found by words."""
    store = Store()
    store.bring_up_to_date()
    assert store.index.by_vector(some_vector(), 3, None) == store.index.by_words("loom", 3, None) == []
    assert store.index.by_vector(some_vector(), 3, store.index.allowed({"type": "eq", "key": "a", "value": 1})) == []
    store.put("a", ["a loom"])
    store.files["b"] = 2, b'{"attributes":{}}', [Chunk(9, "a mill", b"\0" * 8)]
    store.revision = 2
    store.bring_up_to_date()
    assert [number for number, _ in store.index.by_vector(some_vector(), 3, None)] == [1]
    assert store.index.by_vector(b"\0" * 8, 3, None) == []
    assert [number for number, _ in store.index.by_words("mill", 3, None)] == [9]
