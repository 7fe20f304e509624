"""`kvloom-lab bench encoder-peers`: our engine with an encoder beside ONNX Runtime, on the same texts in turn."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import pydoc
import re
import statistics
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from kvloom_common.text.tokenizer import ModelTokenizer
from lab.bench.engine_peers.contenders import ContenderError, ContenderProcess, EnginePeer, install, run_command
from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_ENCODER_NAME
from tools.bench.engine.command import measure_and_print, resolve, show_progress
from tools.failures import CommandError
from tools.options import data_dir_option, option

ONNX: Final = EnginePeer("onnxruntime", "onnxruntime==1.32.0", False, also=("onnx==1.23.2", "safetensors"))
_WORKER: Final = Path(__file__).with_name("onnx_worker.py")
_NUM_TEXTS: Final = 256
_BATCH: Final = 32
_WORDS: Final = 110
_ALONE: Final = 16
"""The number of texts that are embedded one by one."""
_TIMEOUT_SECONDS: Final = 600.0
_SUBJECTS: Final = ("argparse", "asyncio", "collections", "datetime", "email", "http.client", "logging", "pathlib")
_MORE_SUBJECTS: Final = ("random", "shutil", "socket", "sqlite3", "statistics", "subprocess", "tarfile", "unittest")


@click.command("encoder-peers")
@option("--model", default=BUILTIN_ENCODER_NAME, show_default=True, help="Name or directory of a BERT.")
@option("--threads", "num_threads", type=click.IntRange(0), default=0, help="0: one per core.")
@click.option("--rounds", "num_rounds", type=click.IntRange(1, 50), default=3, show_default=True)
@data_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench_encoder_peers(model: str, num_threads: int, num_rounds: int, data_dir: Path | None, as_json: bool) -> None:
    """Measure our engine and ONNX Runtime in turn: texts of 110 words in batches of 32, and one by one."""
    folder, model_dir = resolve(model, data_dir)
    num_threads = num_threads or os.cpu_count() or 1
    try:
        measure_and_print(as_json, encoder_table, lambda: compare_encoders(model_dir, num_threads, num_rounds, folder))
    except (ContenderError, OSError) as error:
        raise CommandError(str(error)) from error


def compare_encoders(model_dir: Path, num_threads: int, num_rounds: int, folder: Path) -> dict[str, Any]:
    """Return what `encoder_table` renders. Raises ContenderError and OSError."""
    texts, questions, answers = _token_ids(model_dir)
    batches = [texts[first : first + _BATCH] for first in range(0, len(texts), _BATCH)]
    own = (sys.executable, "-P", "-m", "lab.bench.encoder_peers.kvloom_worker", str(model_dir), str(num_threads))
    argvs = {
        "onnxruntime": (
            str(install(ONNX, folder / "engines", run_command)), str(_WORKER), str(model_dir), str(num_threads)
        ),
        "kvloom": (*own, "{}"),
        "kvloom, 8-bit weights": (*own, json.dumps({"weights": "int8"})),
        "kvloom, torch's operators, float32": (*own, json.dumps({"kernels": "torch", "dtype": "float32"})),
    }  # fmt: skip
    running: dict[str, ContenderProcess] = {}
    try:
        for name, argv in argvs.items():
            show_progress(f"{name}: start")
            running[name] = ContenderProcess(argv, _TIMEOUT_SECONDS)
        return _measured(running, batches, questions, answers, num_rounds)
    finally:
        for process in running.values():
            process.close()


def _measured(
    running: dict[str, ContenderProcess],
    batches: list[list[list[int]]],
    questions: list[list[int]],
    answers: list[list[int]],
    num_rounds: int,
) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in running}
    alone: dict[str, list[float]] = {name: [] for name in running}
    vectors: dict[str, Any] = {}
    for turn, (name, process) in itertools.product(range(num_rounds + 1), running.items()):
        show_progress(f"round {turn} of {num_rounds}, {name}" if turn else f"warm-up, {name}")
        told = [_embed(process, batch) for batch in (batches if turn else batches[:1])]
        times = [_embed(process, [text])[0] for text in batches[0][:_ALONE]]
        if turn:
            rates[name].append(sum(map(len, batches)) / sum(seconds for seconds, _ in told))
            alone[name].append(statistics.median(times))
            vectors[name] = np.concatenate([found for _, found in told])
    exact = vectors["onnxruntime"]
    engines = []
    for name, process in running.items():
        found = {
            "engine": name,
            "version": process.version,
            "texts_per_second": statistics.median(rates[name]),
            "seconds_of_one": statistics.median(alone[name]),
            "least_cosine": float((vectors[name] * exact).sum(1).min()),
            "ndcg_at_10": ndcg(_embed(process, questions)[1] @ _embed(process, answers)[1].T),
        }
        engines.append(found)
    return {"num_texts": sum(map(len, batches)), "num_rounds": num_rounds, "engines": engines}


def _embed(process: ContenderProcess, texts: Sequence[Sequence[int]]) -> tuple[float, Any]:
    told = process.ask({"texts": texts}, _TIMEOUT_SECONDS, "seconds", "vectors")
    if len(told["vectors"]) != len(texts):
        raise ContenderError("texts without a vector")
    return told["seconds"], np.array(told["vectors"])


def ndcg(scores: Any) -> float:
    """The normalised discounted cumulative gain of the first ten answers, of questions each of which has the one right
    answer of its own number: `scores` are [questions, answers]."""
    ranks = (scores > scores.diagonal()[:, None]).sum(1)
    return float(np.where(ranks < 10, 1 / np.log2(ranks + 2), 0).mean())


def _token_ids(model_dir: Path) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """The texts of Python's help, and the first sentences and the rest of its functions' docstrings."""
    tokenizer = ModelTokenizer.load(model_dir)

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode_now(text, add_special_tokens=True))

    subjects = [import_module(name) for name in (*_SUBJECTS, *_MORE_SUBJECTS)]
    help_texts = " ".join(pydoc.plain(pydoc.render_doc(subject)) for subject in subjects)
    words = itertools.cycle(re.findall(r"\b[a-z]{2,}\b", help_texts))
    texts = [" ".join(itertools.islice(words, _WORDS)) for _ in range(_NUM_TEXTS)]
    pairs = {
        first: rest.strip()[:600]
        for subject in subjects
        for _, function in inspect.getmembers(subject, inspect.isroutine)
        for first, _, rest in [(inspect.getdoc(function) or "").partition("\n\n")]
        if len(rest) > 100
    }
    return [ids(text)[:256] for text in texts], [ids(first) for first in pairs], [ids(rest) for rest in pairs.values()]


def encoder_table(report: dict[str, Any]) -> str:
    """Render Markdown."""
    first = report["engines"][0]
    lines = [
        f"{report['num_texts']} texts of {_WORDS} words, medians of {report['num_rounds']} rounds",
        "",
        f"| engine | texts/s, batches of {_BATCH} | beside {first['engine']} | one text, ms | beside it | least cosine "
        "| nDCG@10 |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in report["engines"]:
        rate = one["texts_per_second"] / first["texts_per_second"]
        alone = first["seconds_of_one"] / one["seconds_of_one"]
        cosine = math.floor(one["least_cosine"] * 1e5) / 1e5
        lines.append(
            f"| {one['engine']} ({one['version']}) | {one['texts_per_second']:.1f} | {rate:.2f} "
            f"| {one['seconds_of_one'] * 1e3:.1f} | {alone:.2f} | {cosine:.5f} | {one['ndcg_at_10']:.4f} |"
        )
    return "\n".join(lines)
