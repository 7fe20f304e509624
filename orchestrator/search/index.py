"""The chunks of one vector store in memory: their vectors, with a graph for approximate search (usearch) once there are
many, and their words for BM25 (bm25s). An index is made of the rows in SQL, and can be made again at any time.

It belongs to one store, and so to one tenant. Its methods block, and one thread at a time calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import bm25s
import msgspec
import numpy as np
from bm25s.tokenization import Tokenized
from usearch.index import Index

from orchestrator.search.filters import Attributes, Filter, passes
from orchestrator.search.words import Vocabulary, words_of
from orchestrator.store.vector_chunks import Chunk

EXACT_CHUNKS: Final = 20_000
"""So many vectors are compared one by one, in a few milliseconds. More have a graph."""
WORD_BYTES: Final = 16
"""The memory of a word of a chunk, about."""


class _File(NamedTuple):
    version: int
    attributes: Attributes
    numbers: Any
    """An array: the numbers of its chunks."""
    vectors: Any
    """A matrix: their vectors with the length 1, or 0 for those that have none of the right size."""
    fits: Any
    """A mask: which have one."""
    words: Sequence[Sequence[int]]
    """The words of each chunk."""


class StoreIndex:
    """`revision`: that of the store which it has."""

    def __init__(self) -> None:
        self.revision = -1
        self._files: dict[str, _File] = {}
        self._vocabulary = Vocabulary()
        self._size = 0
        """The dimensions of a vector; 0 while there is none."""
        self._numbers: Any = np.empty(0, np.int64)
        """The numbers of all chunks, file by file."""
        self._vectors: Any = np.empty((0, 0), np.float32)
        self._fits: Any = np.empty(0, bool)
        self._owners: Any = np.empty(0, np.int64)
        """The place of each chunk's file in `_files`."""
        self._graph: Any = None
        self._by_words: Any = None
        self.num_bytes = 0

    @property
    def versions(self) -> Mapping[str, int]:
        return {name: file.version for name, file in self._files.items()}

    def update(
        self, revision: int, kept: Mapping[str, tuple[int, bytes]], added: Mapping[str, Sequence[Chunk]]
    ) -> None:
        """Brings the index to a revision. `kept`: by file of the store, its version and the JSON of its body. `added`:
        the chunks of those that the index does not have in this version."""
        gone = [self._files.pop(name) for name in list(self._files) if name not in kept or name in added]
        for name, chunks in added.items():
            version, body = kept[name]
            self._files[name] = self._file(version, msgspec.json.decode(body)["attributes"], chunks)
        files = list(self._files.values())
        self._numbers = np.concatenate([np.empty(0, np.int64), *(file.numbers for file in files)])
        self._vectors = np.concatenate([np.empty((0, self._size), np.float32), *(file.vectors for file in files)])
        self._fits = np.concatenate([np.empty(0, bool), *(file.fits for file in files)])
        self._owners = np.repeat(np.arange(len(files)), [len(file.numbers) for file in files])
        self._change_graph(gone, [self._files[name] for name in added])
        self._rank_words([words for file in files for words in file.words])
        self.revision = revision

    def _file(self, version: int, attributes: Attributes, chunks: Sequence[Chunk]) -> _File:
        if not self._size and chunks:
            self._size = len(np.frombuffer(chunks[0].vector, "<f4"))
        vectors = np.zeros((len(chunks), self._size), np.float32)
        for place, chunk in enumerate(chunks):
            vector = np.frombuffer(chunk.vector, "<f4")
            if len(vector) == self._size:  # a model that has replaced another one may give others
                vectors[place] = vector
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors /= np.where(lengths > 0, lengths, 1.0)
        numbers = np.asarray([chunk.number for chunk in chunks], np.int64)
        words = [self._vocabulary.add(words_of(chunk.text)) for chunk in chunks]
        return _File(version, attributes, numbers, vectors, lengths[:, 0] > 0, words)

    def _change_graph(self, gone: Sequence[_File], new: Sequence[_File]) -> None:
        if len(self._numbers) <= EXACT_CHUNKS:
            self._graph = None
            return
        if self._graph is None:
            self._graph = Index(ndim=self._size, metric="ip", dtype="f16")
            self._graph.add(self._numbers[self._fits], self._vectors[self._fits])
            return
        for file in gone:
            self._graph.remove(file.numbers[file.fits])
        for file in new:
            self._graph.add(file.numbers[file.fits], file.vectors[file.fits])

    def _rank_words(self, words: Sequence[Sequence[int]]) -> None:
        self._by_words = None
        if any(words):
            self._by_words = bm25s.BM25(method="lucene")
            tokenized = Tokenized(ids=words, vocab=self._vocabulary.numbers)  # pyright: ignore[reportArgumentType]
            self._by_words.index(tokenized, show_progress=False)
        num_words = sum(map(len, words))
        self.num_bytes = 3 * self._vectors.nbytes + WORD_BYTES * num_words

    def allowed(self, wanted: Filter | None) -> Any:
        """A mask of the chunks that a search with this filter may find; None: all."""
        if wanted is None:
            return None
        files = np.asarray([passes(wanted, file.attributes) for file in self._files.values()], bool)
        return files[self._owners]

    def by_vector(self, query: bytes, most: int, allowed: Any) -> list[tuple[int, float]]:
        """(number, cosine) of the chunks that are most like the query, the best first."""
        vector = np.frombuffer(query, "<f4")
        length = np.linalg.norm(vector)
        if len(vector) != self._size or not len(self._numbers) or not length:
            return []
        vector = vector / length
        if self._graph is not None and allowed is None:
            found = self._graph.search(vector, most)
            return [
                (int(key), 1.0 - float(distance)) for key, distance in zip(found.keys, found.distances, strict=False)
            ]
        may = self._fits if allowed is None else self._fits & allowed
        return self._best(self._vectors @ vector, most, may, -2.0)

    def by_words(self, query: str, most: int, allowed: Any) -> list[tuple[int, float]]:
        """(number, score) of the chunks that have words of the query, the best first."""
        known = self._vocabulary.known(words_of(query))
        if self._by_words is None or not known:
            return []
        return self._best(self._by_words.get_scores_from_ids(known), most, allowed, 0.0)

    def _best(self, scores: Any, most: int, allowed: Any, least: float) -> list[tuple[int, float]]:
        """The chunks with the highest scores above `least`. Equal ones keep their order."""
        places = np.flatnonzero(scores > least if allowed is None else allowed & (scores > least))
        if len(places) > most:
            places = np.sort(places[np.argpartition(-scores[places], most)[:most]])
        places = places[np.argsort(-scores[places], kind="stable")]
        return [(int(self._numbers[place]), float(scores[place])) for place in places]
