"""`kvloom-lab bench search-quality`: how well a vector store's ranking finds what is asked for, beside BM25 alone.

The set needs no download: questions are the first paragraphs of docstrings of Python's library and of NumPy, and the
document in which the answer to one is looked for is the rest of the same docstring."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final

import msgspec
import numpy as np

from lab.bench.experiment import Column, Report, TableOf, experiment
from lab.bench.injections.command import TextEncoder
from lab.flags import count
from orchestrator.search.chunking import ChunkSize, chunks_of
from orchestrator.search.index import StoreIndex
from orchestrator.search.searcher import Wanted, ranked
from orchestrator.store.vector_chunks import Chunk

MIN_CHARS: Final = 200
"""Shorter documents say too little to be found by."""
RESULTS: Final = 64
CUTOFFS: Final = (1, 5, 10)
SIZE: Final = ChunkSize(256, 128)
"""That of `auto` with the built-in encoder."""
_MODULES: Final = (
    *("argparse", "array", "ast", "asyncio", "base64", "bisect", "calendar", "collections", "concurrent.futures"),
    *("configparser", "contextlib", "copy", "csv", "ctypes", "datetime", "decimal", "difflib", "dis", "email.message"),
    *("email.policy", "fileinput", "fractions", "functools", "gettext", "glob", "hashlib", "heapq", "http.client"),
    *("http.cookiejar", "imaplib", "importlib.resources", "inspect", "io", "ipaddress", "itertools", "json", "logging"),
    *("logging.handlers", "lzma", "mailbox", "math", "mimetypes", "multiprocessing.pool", "nntplib", "numbers", "os"),
    *("pathlib", "pdb", "pickle", "platform", "plistlib", "poplib", "pprint", "queue", "random", "re", "sched"),
    *("selectors", "shelve", "shlex", "shutil", "smtplib", "socket", "socketserver", "sqlite3", "ssl", "statistics"),
    *("string", "struct", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "time", "timeit", "tokenize"),
    *("trace", "traceback", "types", "typing", "unittest.case", "unittest.mock", "urllib.parse", "uuid"),
    *("urllib.request", "warnings", "weakref", "xml.dom.minidom", "xml.etree.ElementTree", "zipfile", "zoneinfo"),
    *("numpy", "numpy.fft", "numpy.linalg", "numpy.random", "numpy.polynomial", "numpy.ma", "numpy.testing"),
)  # fmt: skip


def questions_and_documents(most: int) -> dict[str, str]:
    """At most so many documents, evenly from all of them, by their questions."""
    pairs: dict[str, str] = {}
    seen: set[str] = set()
    for name in _MODULES:
        try:
            module = import_module(name)
        except ImportError:  # another version of Python
            continue
        holders = [module, *(one for _, one in inspect.getmembers(module, inspect.isclass))]
        for holder in holders:
            for _, one in inspect.getmembers(holder, lambda one: inspect.isroutine(one) or inspect.isclass(one)):
                question, _, rest = (inspect.getdoc(one) or "").partition("\n\n")
                if len(rest) >= MIN_CHARS and rest not in seen and "(" not in question[:40]:  # no signature
                    pairs.setdefault(" ".join(question.split()), rest)
                    seen.add(rest)
    step = max(1.0, len(pairs) / most)
    names = list(pairs)
    return {names[int(place * step)]: pairs[names[int(place * step)]] for place in range(min(most, len(pairs)))}


def run_bench(pairs: Mapping[str, str], encoder: Any) -> dict[str, Any]:
    """`encoder` has `embed`, of texts. Each question is asked of the index of a store with a file for each document."""
    documents = [chunks_of(text, SIZE) for text in pairs.values()]
    vectors = iter(encoder.embed([chunk for chunks in documents for chunk in chunks]))
    kept, added, owner, number = dict[str, tuple[int, bytes]](), dict[str, list[Chunk]](), dict[int, int](), 0
    for place, chunks in enumerate(documents):
        kept[str(place)] = 1, msgspec.json.encode({"attributes": {}})
        added[str(place)] = [Chunk(number + i, text, _bytes(next(vectors))) for i, text in enumerate(chunks, 1)]
        owner |= {chunk.number: place for chunk in added[str(place)]}
        number += len(chunks)
    index = StoreIndex()
    index.update(1, kept, added)
    questions = list(pairs)
    asked = [_bytes(vector) for vector in encoder.embed(questions)]
    rows: list[dict[str, Any]] = []
    for what, weights in (("words alone (BM25)", (0.0, 1.0)), ("vectors alone", (1.0, 0.0)), ("both", (1.0, 1.0))):
        ranks: list[int] = []
        for place, (question, vector) in enumerate(zip(questions, asked, strict=True)):
            wanted = Wanted([question], RESULTS, None, 0.0, True, *weights)
            found = dict.fromkeys(owner[chunk.number] for chunk in ranked(index, [vector], wanted))
            ranks.append(list(found).index(place) if place in found else RESULTS)
        rows.append({"what": what, **figures(ranks)})
    return {"num_questions": len(questions), "num_chunks": number, "rankings": rows}


def figures(ranks: Sequence[int]) -> dict[str, float]:
    """Recall, and the normalised discounted cumulative gain of the first ten. `ranks`: the place, from 0, of the one
    right document of each question."""
    places = np.asarray(ranks)
    recalls = {f"recall_at_{most}": round(float((places < most).mean()), 3) for most in CUTOFFS}
    return {**recalls, "ndcg_at_10": round(float(np.where(places < 10, 1 / np.log2(places + 2), 0).mean()), 3)}


def _bytes(vector: Any) -> bytes:
    return np.asarray(vector, "<f4").tobytes()


_COLUMNS: Final = (
    Column("ranking", "what", is_left=True),
    *(Column(f"recall@{most}", f"recall_at_{most}", ".3f") for most in CUTOFFS),
    Column("nDCG@10", "ndcg_at_10", ".3f"),
)


@experiment(
    "search-quality",
    count("--questions", 1000, "Questions, each with a document of its own.", most=5000, to="num_questions"),
)
def bench_search_quality(num_questions: int) -> Report:
    """Measure how often a vector store finds the right document, by words, by vectors and by both."""
    report = run_bench(questions_and_documents(num_questions), TextEncoder())
    about = f"{report['num_questions']:,} questions, as many documents, {report['num_chunks']:,} chunks"
    return Report(report, [about, TableOf(_COLUMNS, report["rankings"])])
