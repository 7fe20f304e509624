"""`kvloom bench engine --vs`: compares our engine with others on the same model and prompts, alternating within one
run."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_MODEL_NAME, find_builtin_gguf
from tools.bench.engine_peers.contenders import (
    ENGINE_PEERS,
    ContenderError,
    ContenderProcess,
    install,
    own_argv,
    peer_argv,
    run_command,
)

BATCHES: Final = (1, 8, 32)
INT8: Final = "int8"
CHOICES: Final = (INT8, *ENGINE_PEERS)
_PREFILL_TOKENS: Final = 512
_PROMPT_TOKENS: Final = (32, 256)
_DECODE_TOKENS: Final = {1: 48, 8: 64, 32: 80}
"""Answer length by batch size: long enough that all sequences decode together for a while after the last prefill."""
_WARM_UP_TOKENS: Final = 4
_VOCABULARY: Final = range(100, 4000)
"""Ordinary tokens of every model."""
_START_TIMEOUT_SECONDS: Final = 600.0
_ORDER_TIMEOUT_SECONDS: Final = 240.0


class Contender(Protocol):
    """The methods of ContenderProcess that a comparison needs."""

    version: str
    load_seconds: float

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, timeout_seconds: float) -> list[list[float]]: ...
    def rss_bytes(self) -> int: ...
    def close(self) -> None: ...


class Entrant(msgspec.Struct, frozen=True):
    """One engine to be measured. `argv` may install it first, and raises ContenderError when that fails."""

    name: str
    argv: Callable[[], Sequence[str]]


def plan_entrants(
    names: Sequence[str], model: str, model_dir: Path, num_threads: int, cache_dir: Path
) -> list[Entrant]:
    """Our engine first, then the requested ones of CHOICES in the order given."""
    max_batch = max(BATCHES)

    def own(weights: str) -> Callable[[], Sequence[str]]:
        return lambda: own_argv(model_dir, num_threads, max_batch, weights)

    def other(name: str) -> Callable[[], Sequence[str]]:
        def argv() -> Sequence[str]:
            peer = ENGINE_PEERS[name]
            weights = gguf_of(model) if peer.wants_gguf else model_dir
            return peer_argv(peer, install(peer, cache_dir, run_command), weights, num_threads, max_batch)

        return argv

    chosen = dict.fromkeys(names)
    return [
        Entrant("kvloom", own("dtype")),
        *(Entrant("kvloom int8", own(INT8)) if name == INT8 else Entrant(name, other(name)) for name in chosen),
    ]


def gguf_of(model: str) -> Path:
    """The GGUF file of a model as the user named it. Raises ContenderError."""
    if model == BUILTIN_MODEL_NAME:
        try:
            return find_builtin_gguf()
        except EngineError as error:
            raise ContenderError(str(error)) from error
    if model.endswith(".gguf") and Path(model).is_file():
        return Path(model).absolute()
    raise ContenderError("it reads GGUF files only: name the model by its .gguf file")


def compare(
    entrants: Sequence[Entrant],
    num_rounds: int,
    on_progress: Callable[[str], None],
    start: Callable[[Sequence[str], float], Contender] = ContenderProcess,
    max_seconds: float = math.inf,
) -> dict[str, Any]:
    """Return {"engines": [...], "missing": {name: why}}. All engines are up at the same time, and every engine is
    measured before the next measurement begins; figures are medians over the rounds. An engine that fails is reported
    and left out from then on. Ctrl-C ends the run early with the figures so far; so does a round that would not end
    within `max_seconds` of the start."""
    begin = time.monotonic()
    missing: dict[str, str] = {}
    running: dict[str, Contender] = {}
    results: dict[str, dict[str, list[float]]] = {}
    try:
        for entrant in entrants:
            on_progress(f"starting {entrant.name}")
            try:
                running[entrant.name] = start(entrant.argv(), _START_TIMEOUT_SECONDS)
            except ContenderError as error:
                missing[entrant.name] = str(error)
        with contextlib.suppress(KeyboardInterrupt):  # the figures so far are worth having
            _measure(num_rounds, begin + max_seconds, running, results, missing, on_progress)
        engines = [_report(name, contender, results.get(name, {})) for name, contender in running.items()]
    finally:
        for contender in running.values():
            contender.close()
    num_measured = max((len(values) for own in results.values() for values in own.values()), default=0)
    return {"num_rounds": num_measured, "engines": engines, "missing": missing}


def _measure(
    num_rounds: int,
    deadline: float,
    running: dict[str, Contender],
    results: dict[str, dict[str, list[float]]],
    missing: dict[str, str],
    on_progress: Callable[[str], None],
) -> None:
    # Round 0 warms up kernels, caches and pages.
    longest_turn_seconds = 0.0
    for turn in range(num_rounds + 1):
        begin = time.monotonic()
        # The first figures are worth waiting for.
        if turn > 1 and begin + longest_turn_seconds > deadline:
            on_progress(f"no time for round {turn} of {num_rounds}")
            break
        for what, prompts, max_tokens in _orders(turn):
            for name, contender in list(running.items()):
                on_progress(f"round {turn} of {num_rounds}: {what}, {name}")
                try:
                    figure = _figure(what, contender.run(prompts, max_tokens, _ORDER_TIMEOUT_SECONDS))
                except ContenderError as error:
                    missing[name] = f"{what}: {error}"
                    running.pop(name).close()
                    continue
                if turn and figure is not None:
                    results.setdefault(name, {}).setdefault(what, []).append(figure)
        longest_turn_seconds = max(longest_turn_seconds, time.monotonic() - begin)


def decode_rate(times: Sequence[Sequence[float]]) -> float | None:
    """Tokens per second while all sequences decode: from the last one's first token to the first one's end. None when
    they never all decoded at the same time."""
    begin, end = max(own[0] for own in times), min(own[-1] for own in times)
    if end <= begin:
        return None
    return sum(begin < moment <= end for own in times for moment in own) / (end - begin)


def _orders(turn: int) -> list[tuple[str, list[list[int]], int]]:
    """(what, prompts, max_tokens): the same for every engine, and different in every round."""
    chooser = random.Random(turn)

    def prompt(num_tokens: int) -> list[int]:
        return chooser.choices(_VOCABULARY, k=num_tokens)

    shortest, longest = _PROMPT_TOKENS
    orders = [("prefill", [prompt(_PREFILL_TOKENS)], 1)]
    for batch in BATCHES:
        lengths = [shortest + (longest - shortest) * (2 * index + 1) // (2 * batch) for index in range(batch)]
        max_tokens = _DECODE_TOKENS[batch] if turn else _WARM_UP_TOKENS
        orders.append((f"decode {batch}", [prompt(length) for length in lengths], max_tokens))
    return orders


def _figure(what: str, times: Sequence[Sequence[float]]) -> float | None:
    if not all(times):
        raise ContenderError("an answer without tokens")
    return _PREFILL_TOKENS / times[0][0] if what == "prefill" else decode_rate(times)


def _report(name: str, contender: Contender, results: dict[str, list[float]]) -> dict[str, Any]:
    figures = {
        what: {
            "median": round(statistics.median(values), 1),
            "min": round(min(values), 1),
            "max": round(max(values), 1),
        }
        for what, values in results.items()
    }
    return {
        "engine": name,
        "version": contender.version,
        "load_seconds": round(contender.load_seconds, 1),
        "rss_gib": round(contender.rss_bytes() / 2**30, 2),
        "tokens_per_second": figures,
    }


def comparison_table(report: dict[str, Any]) -> str:
    """Render Markdown: medians, with the slowest and the fastest round."""
    whats = ["prefill", *(f"decode {batch}" for batch in BATCHES)]
    lines = [
        f"| tokens/s | {' | '.join(whats)} | RSS, GiB | load, s |",
        f"|---|{'---|' * (len(whats) + 2)}",
    ]
    for engine in report["engines"]:
        cells = [_cell(engine["tokens_per_second"].get(what)) for what in whats]
        lines.append(
            f"| {engine['engine']} ({engine['version']}) | {' | '.join(cells)} | {engine['rss_gib']} "
            f"| {engine['load_seconds']} |"
        )
    lines += [f"\n{name}: not measured: {why}" for name, why in report["missing"].items()]
    return "\n".join(lines)


def _cell(figure: dict[str, float] | None) -> str:
    return f"{figure['median']:.0f} ({figure['min']:.0f} to {figure['max']:.0f})" if figure else "–"
