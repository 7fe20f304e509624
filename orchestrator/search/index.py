"""The chunks of one vector store in memory: their vectors, with a graph for approximate search (usearch) once there are
very many, and their words for BM25 (bm25s). An index is made of the rows in SQL, and can be made again at any time.

It belongs to one store, and so to one tenant. Its methods block, and one thread at a time calls them. What takes long
for a large store is made beside it (`snapshot`, `ranked_words`, `empty_graph`), and adopted when it is ready: until
then chunks that are new are found by their vectors, compared one by one."""

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

EXACT_CHUNKS: Final = 200_000
"""So many vectors are compared one by one, in some ten milliseconds. More have a graph, which takes minutes to make."""
PROMPT_CHUNKS: Final = 5000
"""The words of so many chunks are ranked anew at once, within a second. Of more, beside the searches."""
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


class Snapshot(NamedTuple):
    """The chunks of an index at a revision: arrays that do not change."""

    revision: int
    all_numbers: Any
    numbers: Any
    """The numbers of those that have a vector, and the vectors."""
    vectors: Any
    names: Sequence[str]
    """The files."""
    owners: Any
    """The place of each chunk's file in `names`."""
    words: Sequence[Sequence[int]]
    vocabulary: Mapping[str, int]


class RankedWords(NamedTuple):
    """The words of a snapshot, ranked by BM25."""

    ranker: Any
    snapshot: Snapshot


def ranked_words(snapshot: Snapshot) -> RankedWords:
    ranker = None
    if any(snapshot.words):
        ranker = bm25s.BM25(method="lucene")
        tokenized = Tokenized(ids=snapshot.words, vocab=snapshot.vocabulary)  # pyrefly: ignore[bad-argument-type]
        ranker.index(tokenized, show_progress=False)
    return RankedWords(ranker, snapshot)


def empty_graph(num_dimensions: int) -> Any:
    return Index(ndim=num_dimensions, metric="ip", dtype="f16")


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
        self._in_graph: Any = np.empty(0, np.int64)
        """The numbers of the chunks that the graph has."""
        self._by_words: RankedWords | None = None
        self.num_bytes = 0

    @property
    def versions(self) -> Mapping[str, int]:
        return {name: file.version for name, file in self._files.items()}

    def update(
        self, revision: int, kept: Mapping[str, tuple[int, bytes]], added: Mapping[str, Sequence[Chunk]]
    ) -> None:
        """Brings the index to a revision. `kept`: by file of the store, its version and the JSON of its body. `added`:
        the chunks of those that the index does not have in this version."""
        for name in [name for name in self._files if name not in kept or name in added]:
            del self._files[name]
        for name, chunks in added.items():
            version, body = kept[name]
            self._files[name] = self._file(version, msgspec.json.decode(body)["attributes"], chunks)
        files = list(self._files.values())
        self._numbers = np.concatenate([np.empty(0, np.int64), *(file.numbers for file in files)])
        self._vectors = np.concatenate([np.empty((0, self._size), np.float32), *(file.vectors for file in files)])
        self._fits = np.concatenate([np.empty(0, bool), *(file.fits for file in files)])
        self._owners = np.repeat(np.arange(len(files)), [len(file.numbers) for file in files])
        self.num_bytes = 3 * self._vectors.nbytes + WORD_BYTES * sum(
            len(words) for file in files for words in file.words
        )
        self.revision = revision
        if self._graph is not None:
            self.adopt_graph(self._graph, self._in_graph)
        if len(self._numbers) <= PROMPT_CHUNKS:
            self.adopt_words(ranked_words(self.snapshot()))

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

    def snapshot(self) -> Snapshot:
        return Snapshot(
            self.revision,
            self._numbers,
            self._numbers[self._fits],
            self._vectors[self._fits],
            list(self._files),
            self._owners,
            [words for file in self._files.values() for words in file.words],
            dict(self._vocabulary.numbers),
        )

    @property
    def lacks_words(self) -> bool:
        """True when words were ranked before the last change."""
        return self._by_words is None or self._by_words.snapshot.revision != self.revision

    @property
    def lacks_graph(self) -> bool:
        return self._graph is None and len(self._numbers) > EXACT_CHUNKS

    def adopt_words(self, words: RankedWords) -> None:
        self._by_words = words

    def adopt_graph(self, graph: Any, numbers: Any) -> None:
        """`numbers`: those of the chunks that the graph has. It is brought up to date."""
        own = self._numbers[self._fits]
        if len(own) <= EXACT_CHUNKS:
            self._graph = None
            return
        gone, is_new = np.setdiff1d(numbers, own), np.isin(own, numbers, invert=True)
        if len(gone):
            graph.remove(gone)
        if is_new.any():
            graph.add(own[is_new], self._vectors[self._fits][is_new])
        self._graph, self._in_graph = graph, own

    def allowed(self, wanted: Filter | None) -> frozenset[str] | None:
        """The files that a search with this filter may find; None: all."""
        if wanted is None:
            return None
        return frozenset(name for name, file in self._files.items() if passes(wanted, file.attributes))

    def by_vector(self, query: bytes, most: int, allowed: frozenset[str] | None) -> list[tuple[int, float]]:
        """(number, cosine) of the chunks that are most like the query, the best first."""
        vector = np.frombuffer(query, "<f4")
        length = np.linalg.norm(vector)
        if len(vector) != self._size or not len(self._numbers) or not length:
            return []
        vector = vector / length
        if self._graph is not None and allowed is None:
            found = self._graph.search(vector, most)
            scored = zip(found.keys, found.distances, strict=True)
            return [(int(key), 1.0 - float(distance)) for key, distance in scored]
        may = self._fits & _mask(list(self._files), self._owners, allowed)
        return _best(self._numbers, self._vectors @ vector, most, may)

    def by_words(self, query: str, most: int, allowed: frozenset[str] | None) -> list[tuple[int, float]]:
        """(number, score) of the chunks that have words of the query, the best first."""
        words = self._by_words
        if words is None or words.ranker is None:
            return []
        snapshot = words.snapshot
        known = [number for number in self._vocabulary.known(words_of(query)) if number < len(snapshot.vocabulary)]
        if not known:
            return []
        scores = words.ranker.get_scores_from_ids(known)
        may = _mask(snapshot.names, snapshot.owners, frozenset(self._files) if allowed is None else allowed)
        return _best(snapshot.all_numbers, scores, most, may & (scores > 0))


def _mask(names: Sequence[str], owners: Any, allowed: frozenset[str] | None) -> Any:
    """A mask of the chunks whose files are allowed."""
    if allowed is None:
        return np.ones(len(owners), bool)
    return np.asarray([name in allowed for name in names], bool)[owners]


def _best(numbers: Any, scores: Any, most: int, may: Any) -> list[tuple[int, float]]:
    """The chunks with the highest scores of those that may be found. Equal ones keep their order."""
    places = np.flatnonzero(may)
    if len(places) > most:
        places = np.sort(places[np.argpartition(-scores[places], most)[:most]])
    places = places[np.argsort(-scores[places], kind="stable")]
    return [(int(numbers[place]), float(scores[place])) for place in places]
