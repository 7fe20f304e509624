"""`kvloom-lab bench vector-search`: the CPU time that the index of a vector store needs on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from lab.bench.experiment import Column, Report, TableOf, experiment
from lab.flags import count
from orchestrator.search.chunking import ChunkSize, chunks_of
from orchestrator.search.index import StoreIndex, ranked_words
from orchestrator.store.vector_chunks import Chunk

CHUNKS_PER_FILE: Final = 100
WORDS_PER_CHUNK: Final = 150
VOCABULARY: Final = 50_000
QUERY_WORDS: Final = 8
NUM_QUERIES: Final = 200
RESULTS: Final = 64
"""Chunks that each ranking proposes (orchestrator/search/searcher.py)."""


def run_bench(num_chunks: int, num_dimensions: int) -> dict[str, Any]:
    """Fill an index with texts whose words are as frequent as those of a language, and with vectors at random, and
    search it. All times are of this thread's CPU clock."""
    draw = np.random.default_rng(1)
    names = np.asarray([f"w{number}" for number in range(VOCABULARY)])

    def text(num_words: int) -> str:
        return " ".join(names[np.minimum(draw.zipf(1.2, num_words), VOCABULARY) - 1])

    def vector() -> bytes:
        return draw.standard_normal(num_dimensions).astype("<f4").tobytes()

    kept: dict[str, tuple[int, bytes]] = {}
    added: dict[str, list[Chunk]] = {}
    for first in range(0, num_chunks, CHUNKS_PER_FILE):
        numbers = range(first + 1, min(first + CHUNKS_PER_FILE, num_chunks) + 1)
        added[f"file-{first}"] = [Chunk(number, text(WORDS_PER_CHUNK), vector()) for number in numbers]
        kept[f"file-{first}"] = 1, msgspec.json.encode({"attributes": {"number": first}})
    whole = "\n\n".join(chunk.text for chunks in added.values() for chunk in chunks[:10])
    cut_seconds, _ = _timed(chunks_of, whole, ChunkSize(256, 0))
    index = StoreIndex()
    bring_in_seconds, _ = _timed(index.update, 1, kept, added)
    rank_seconds, words = _timed(ranked_words, index.snapshot())
    index.adopt_words(words)
    half = index.allowed({"type": "lt", "key": "number", "value": num_chunks // 2})
    queries = [(vector(), text(QUERY_WORDS)) for _ in range(NUM_QUERIES)]
    return {
        "num_chunks": num_chunks,
        "num_dimensions": num_dimensions,
        "cut_mb_per_second": round(len(whole) / 1e6 / cut_seconds, 2),
        "bring_in_seconds": round(bring_in_seconds, 2),
        "rank_words_seconds": round(rank_seconds, 2),
        "index_mib": round(index.num_bytes / 2**20, 1),
        "searches": [
            {"what": "by vectors", **_percentiles(lambda query: index.by_vector(query[0], RESULTS, None), queries)},
            {"what": "in half of it", **_percentiles(lambda query: index.by_vector(query[0], RESULTS, half), queries)},
            {"what": "by words", **_percentiles(lambda query: index.by_words(query[1], RESULTS, None), queries)},
        ],
    }


def _timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    begin = time.thread_time()
    result = function(*arguments)
    return time.thread_time() - begin, result


def _percentiles(search: Callable[[Any], Any], queries: Sequence[Any]) -> Mapping[str, float]:
    times = sorted(_timed(search, query)[0] for query in queries)
    return {
        "p50_ms": round(1e3 * times[len(times) // 2], 2),
        "p99_ms": round(1e3 * times[len(times) * 99 // 100], 2),
    }


_COLUMNS: Final = (
    Column("CPU-ms a search", "what", is_left=True),
    Column("p50", "p50_ms", ".2f"),
    Column("p99", "p99_ms", ".2f"),
)


@experiment(
    "vector-search",
    count("--chunks", 20_000, "Chunks of the store.", most=150_000, to="num_chunks"),
    count("--dimensions", 384, "Dimensions of a vector.", most=8192, to="num_dimensions"),
)
def bench_vector_search(num_chunks: int, num_dimensions: int) -> Report:
    """Measure the index of a vector store: filling it, and searches by vectors and by words, in CPU time."""
    report = run_bench(num_chunks, num_dimensions)
    about = (
        f"{num_chunks:,} chunks of {WORDS_PER_CHUNK} words, {num_dimensions} dimensions, {report['index_mib']} MiB\n"
        f"cutting    {report['cut_mb_per_second']:.1f} MB a second\n"
        f"filling    {report['bring_in_seconds']:.2f} s, and {report['rank_words_seconds']:.2f} s to rank the words"
    )
    return Report(report, [about, TableOf(_COLUMNS, report["searches"])])
