"""Finds chunks of vector stores, by indexes that it keeps in memory, and brings up to date before each search."""

from __future__ import annotations

import asyncio
import importlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.database.database import Database
from kvloom_common.process.extras import MissingPackageError, naming_extras
from orchestrator.search.embedding import FabricEncoder
from orchestrator.search.fusion import WeightedRanking, fused
from orchestrator.search.reranking import MAX_PASSAGES, FabricReranker
from orchestrator.store import vector_chunks, vector_files
from orchestrator.store.vector_chunks import ChunkText

MAX_INDEX_BYTES: Final = 2**30
"""The size of all indexes of a process, about. Those that were not used for the longest time are made again when
needed."""
_NEEDED: Final = ("orchestrator.search.index", "pypdf", "selectolax", "semantic_text_splitter")
GRAPH_STEP: Final = 1000
"""Vectors that are added to a graph at a time."""
CANDIDATES: Final = 64
"""Chunks that each way of searching proposes, or twice as many as are wanted."""


class Wanted(NamedTuple):
    """The queries, and how to rank what is found. Without `is_fused`, vectors alone are compared."""

    queries: Sequence[str]
    most: int
    filters: Mapping[str, Any] | None
    threshold: float
    is_fused: bool
    vector_weight: float
    word_weight: float


class FoundChunk(NamedTuple):
    """A chunk that was found."""

    number: int
    score: float


class _Kept:
    """An index, who may use it, and the task that completes it."""

    def __init__(self, index: Any) -> None:
        self.index = index
        self.lock = asyncio.Lock()
        self.completing: asyncio.Task[None] | None = None


class Searcher:
    """Searches the vector stores of all tenants; who calls has found that a store is the tenant's own."""

    def __init__(
        self, database: Database, encoder: FabricEncoder | None, reranker: FabricReranker | None = None
    ) -> None:
        """`encoder`: None where no edge would take its requests. `reranker`: None where none is configured."""
        self._database = database
        self._encoder = encoder
        self._reranker = reranker
        self._has_packages = False
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    async def ready(self) -> FabricEncoder:
        """Raises KvloomError (FAILED_PRECONDITION, NOT_IMPLEMENTED) where there can be no vectors."""
        if self._encoder is None:
            message = (
                "Vector stores need the fabric's secret (fabric.secret_file), by which edges know an orchestrator."
            )
            raise KvloomError(ErrorReason.ERROR_REASON_FAILED_PRECONDITION, message)
        if not self._has_packages:
            await asyncio.to_thread(_check_packages)
            self._has_packages = True
        return self._encoder

    def forget(self, store: str) -> None:
        """The store was deleted."""
        self._kept.pop(store, None)

    async def search(
        self, tenant: str, key_id: str, store: str, model: str, wanted: Wanted
    ) -> list[tuple[FoundChunk, ChunkText]]:
        """The chunks of a store that are still there, the best first. Raises KvloomError."""
        is_reranked = self._reranker is not None and wanted.is_fused
        proposed = wanted._replace(most=MAX_PASSAGES, threshold=0.0) if is_reranked else wanted
        found = await self._proposed(tenant, key_id, store, model, proposed)
        async with self._database.reading() as connection:
            texts = await vector_chunks.found(connection, tenant, store, [each.number for each in found])
        present = [(each, texts[each.number]) for each in found if each.number in texts]
        if self._reranker is None or not is_reranked:
            return present
        passages = [chunk.text for _, chunk in present]
        query = "\n".join(wanted.queries)
        scores = await self._reranker.scores(tenant, key_id, query, passages) if len(passages) > 1 else None
        if scores is not None:
            rescored = [
                (FoundChunk(each.number, score), chunk) for (each, chunk), score in zip(present, scores, strict=True)
            ]
            present = sorted(rescored, key=lambda one: -one[0].score)
        return [one for one in present if one[0].score >= wanted.threshold][: wanted.most]

    async def _proposed(self, tenant: str, key_id: str, store: str, model: str, wanted: Wanted) -> list[FoundChunk]:
        """Returns the chunks that vectors and words propose, the best first. Raises KvloomError."""
        encoder = await self.ready()
        vectors: Sequence[bytes] = [b""] * len(wanted.queries)
        if wanted.vector_weight > 0:
            vectors = await encoder.query_vectors(tenant, key_id, model, wanted.queries)
        kept = self._kept.get(store)
        if kept is None:
            kept = self._kept[store] = _Kept(_new_index())
        self._kept.move_to_end(store)
        async with kept.lock:
            try:
                await self._bring_up_to_date(tenant, store, kept.index)
            except BaseException:
                self.forget(store)  # it may have half of a change
                raise
            found = await asyncio.to_thread(ranked, kept.index, vectors, wanted)
        is_free = kept.completing is None or kept.completing.done()
        if is_free and (kept.index.lacks_words or kept.index.lacks_graph):
            kept.completing = asyncio.create_task(_complete(kept), name=f"{store} index")
        self._fit()
        return found

    async def _bring_up_to_date(self, tenant: str, store: str, index: Any) -> None:
        async with self._database.reading() as connection:
            revision, _ = await vector_files.state_of(connection, store)
            if revision == index.revision:
                return
            kept = await vector_chunks.completed(connection, store)
            known = index.versions
            changed = [name for name, (version, _) in kept.items() if known.get(name) != version]
            added = {name: await vector_chunks.of_file(connection, tenant, store, name) for name in changed}
        await asyncio.to_thread(index.update, revision, kept, added)

    def _fit(self) -> None:
        """The last one that was used is kept, however large it is."""
        while len(self._kept) > 1 and sum(kept.index.num_bytes for kept in self._kept.values()) > MAX_INDEX_BYTES:
            self._kept.popitem(last=False)


async def _complete(kept: _Kept) -> None:
    """Makes what a large index lacks, while searches go on without it."""
    from orchestrator.search.index import empty_graph, ranked_words

    async with kept.lock:
        snapshot = kept.index.snapshot()
    if kept.index.lacks_words:
        words = await asyncio.to_thread(ranked_words, snapshot)
        async with kept.lock:
            kept.index.adopt_words(words)
    if kept.index.lacks_graph:
        graph = empty_graph(snapshot.vectors.shape[1])
        for first in range(0, len(snapshot.numbers), GRAPH_STEP):
            end = first + GRAPH_STEP
            await asyncio.to_thread(graph.add, snapshot.numbers[first:end], snapshot.vectors[first:end])
        async with kept.lock:
            await asyncio.to_thread(kept.index.adopt_graph, graph, snapshot.numbers)


def ranked(index: Any, vectors: Sequence[bytes], wanted: Wanted) -> list[FoundChunk]:
    """Returns what a StoreIndex has for queries with these vectors, the best first. Blocks."""
    allowed = index.allowed(wanted.filters)
    most = max(CANDIDATES, 2 * wanted.most)
    by_vector = [index.by_vector(vector, most, allowed) for vector in vectors]
    if wanted.is_fused:
        by_words = [index.by_words(query, most, allowed) for query in wanted.queries]
        rankings = [WeightedRanking([number for number, _ in one], wanted.vector_weight) for one in by_vector]
        rankings += [WeightedRanking([number for number, _ in one], wanted.word_weight) for one in by_words]
        scored = fused(rankings)
    else:
        best: dict[int, float] = {}
        for number, cosine in (one for found in by_vector for one in found):
            best[number] = max(best.get(number, 0.0), min(1.0, max(0.0, cosine)))
        scored = sorted(best.items(), key=lambda one: (-one[1], one[0]))
    return [FoundChunk(*one) for one in scored if one[1] >= wanted.threshold][: wanted.most]


def _new_index() -> Any:
    from orchestrator.search.index import StoreIndex

    return StoreIndex()


def _check_packages() -> None:
    """Raises KvloomError (NOT_IMPLEMENTED) naming the extra that brings what is missing."""
    try:
        with naming_extras():
            for name in _NEEDED:
                importlib.import_module(name)
    except MissingPackageError as error:
        raise KvloomError(ErrorReason.ERROR_REASON_NOT_IMPLEMENTED, f"Vector stores: {error}.") from error
