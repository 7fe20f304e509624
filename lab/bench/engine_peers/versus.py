"""`kvloom-lab bench engine-peers`: compares our engine with others on the same model and prompts, alternating within
one run."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from lab.bench.engine_peers.contenders import (
    ENGINE_PEERS,
    ContenderError,
    ContenderProcess,
    install,
    own_argv,
    peer_argv,
    run_command,
)
from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_MODEL_NAME, find_builtin_gguf

BATCHES: Final = (1, 8, 32)
OWN_SETTINGS: Final[dict[str, dict[str, str]]] = {
    "bf16": {"dtype": "bfloat16", "weights": "dtype"},
    "float32": {"dtype": "float32", "weights": "dtype"},
    "int8": {"weights": "int8"},
    "packed": {"weights": "packed"},
}
"""Names for our own engine with other keys of `shard.torch` than the default ones."""
CHOICES: Final = (*OWN_SETTINGS, *ENGINE_PEERS)
PREFILL: Final = "prefill"
_PREFILL_TOKENS: Final = 512
_PROMPT_TOKENS: Final = (32, 256)
_ANSWER_TOKENS: Final = {1: 48, 8: 64, 32: 80}
"""Answer length by batch size: long enough that all sequences decode together for a while after the last prefill."""
_MIN_STEPS_TOGETHER: Final = 16
_WARM_UP_TOKENS: Final = 4
_SHORTENINGS: Final = (1, 2, 4, 8, 16)
"""Prompt lengths are divided by one of these on slow machines."""
_MAX_STEP_TOKENS: Final = 512
_MIN_STEP_TOKENS: Final = 32
"""The most and the fewest prompt tokens that our engine computes in one step. In between it takes those of one second.
"""
_VOCABULARY: Final = range(100, 4000)
"""Ordinary tokens of every model."""
_START_TIMEOUT_SECONDS: Final = 600.0
_START_SHARE: Final = 0.7
"""The share of the time after which no more engines are installed or started, so that the others can be measured."""
_MIN_ORDER_SECONDS: Final = 30.0
"""An engine always gets this long for an order, even when time is up."""
_ORDER_PATIENCE: Final = 5.0
"""How many times as long as expected an order may take, before the engine counts as hung."""


class Contender(Protocol):
    """The methods of ContenderProcess that a comparison needs."""

    version: str
    load_seconds: float

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, timeout_seconds: float) -> list[list[float]]: ...
    def rss_bytes(self) -> int: ...
    def close(self) -> None: ...


class Entrant(msgspec.Struct, frozen=True):
    """One engine to be measured. `argv` may install it first, within some seconds, and raises ContenderError when that
    fails."""

    name: str
    argv: Callable[[float], Sequence[str]]


class EnginePace(msgspec.Struct):
    """How fast one engine has been so far. The defaults are those of an engine of which nothing is known."""

    prefill_tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    batch: int = 1
    """The batch of that step."""

    def order_seconds(self, batch: int, num_prompt_tokens: int, max_tokens: int) -> float:
        """The expected time of an order. Each sequence that a step has more than the known one adds the arithmetic of a
        token, which prefill shows, and half as much again: small batches use the CPU less well."""
        step_seconds = self.step_seconds + 1.5 * max(batch - self.batch, 0) / self.prefill_tokens_per_second
        return num_prompt_tokens / self.prefill_tokens_per_second + max_tokens * step_seconds


class Plan(msgspec.Struct, frozen=True):
    """The sizes of one order."""

    what: str
    prompt_tokens: list[int]
    max_tokens: int


def plan_entrants(
    names: Sequence[str], model: str, model_dir: Path, num_threads: int, cache_dir: Path
) -> list[Entrant]:
    """Our engine as it is configured by default first, then the requested ones of CHOICES in the order given."""
    max_batch = max(BATCHES)

    def own(settings: dict[str, str]) -> Callable[[float], Sequence[str]]:
        return lambda _seconds: own_argv(model_dir, num_threads, max_batch, settings)

    def other(name: str) -> Callable[[float], Sequence[str]]:
        def argv(max_seconds: float) -> Sequence[str]:
            peer = ENGINE_PEERS[name]
            weights = gguf_of(model) if peer.wants_gguf else model_dir
            python = install(peer, cache_dir, run_command, max_seconds)
            return peer_argv(peer, python, weights, num_threads, max_batch)

        return argv

    return [
        Entrant("kvloom", own({})),
        *(
            Entrant(f"kvloom {name}", own(OWN_SETTINGS[name])) if name in OWN_SETTINGS else Entrant(name, other(name))
            for name in dict.fromkeys(names)
        ),
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
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Return {"num_rounds", "engines": [...], "missing": {name: why}, "notes": [...]}. All engines are up at the same
    time, and every engine is measured before the next measurement begins; figures are medians over the rounds.

    An engine that fails is reported with its figures so far, and left out from then on. Everything ends about
    `max_seconds` after the start: what would take longer is left out, and notes say so. Prompts are shorter where the
    slowest engine needs that. Ctrl-C ends the run early with the figures so far.
    """
    return _Comparison(num_rounds, on_progress, max_seconds, clock).run(entrants, start)


class _Comparison:
    def __init__(
        self, num_rounds: int, on_progress: Callable[[str], None], max_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._num_rounds = num_rounds
        self._on_progress = on_progress
        self._max_seconds = max_seconds
        self._clock = clock
        self._begin = clock()
        self._running: dict[str, Contender] = {}
        self._paces: dict[str, EnginePace] = {}
        self._engines: dict[str, dict[str, Any]] = {}
        """By name: what is reported of every engine that has started."""
        self._results: dict[str, dict[str, list[float]]] = {}
        """By name of the engine and of the figure: a value per round."""
        self._missing: dict[str, str] = {}
        self._notes: list[str] = []

    def run(self, entrants: Sequence[Entrant], start: Callable[[Sequence[str], float], Contender]) -> dict[str, Any]:
        try:
            self._start_all(entrants, start)
            self._measure()
        except KeyboardInterrupt:  # the figures so far are worth having
            self._notes.append("interrupted: these are the figures so far")
        finally:
            for contender in self._running.values():
                contender.close()
        num_measured = max((len(values) for own in self._results.values() for values in own.values()), default=0)
        for name, engine in self._engines.items():
            engine["tokens_per_second"] = {
                what: {
                    "median": round(statistics.median(values), 1),
                    "min": round(min(values), 1),
                    "max": round(max(values), 1),
                }
                for what, values in self._results.get(name, {}).items()
            }
        # An engine that failed before its first figure is only named with the reason.
        engines = [
            engine for name, engine in self._engines.items() if name in self._results or name not in self._missing
        ]
        return {"num_rounds": num_measured, "engines": engines, "missing": self._missing, "notes": self._notes}

    def _start_all(self, entrants: Sequence[Entrant], start: Callable[[Sequence[str], float], Contender]) -> None:
        for entrant in entrants:
            self._on_progress(f"starting {entrant.name}")
            name = entrant.name
            try:
                argv = entrant.argv(self._starting_seconds_left())
                contender = start(argv, min(self._starting_seconds_left(), _START_TIMEOUT_SECONDS))
            except (ContenderError, OSError) as error:
                self._missing[name] = str(error)
                continue
            self._running[name] = contender
            self._paces[name] = EnginePace()
            self._engines[name] = {
                "engine": name,
                "version": contender.version,
                "load_seconds": round(contender.load_seconds, 1),
                "rss_gib": None,
            }

    def _measure(self) -> None:
        # Every order is given once to warm up kernels, caches and memory, and measured right after that, so that a slow
        # machine has its first figures early.
        plans: list[Plan] = []
        for index, batch in enumerate((0, *BATCHES)):
            share = 1 / (1 + len(BATCHES) - index)
            plan = self._plan(batch, share * self._seconds_left())
            if plan is not None:
                warm_up = msgspec.structs.replace(plan, max_tokens=min(plan.max_tokens, _WARM_UP_TOKENS))
                self._give(f"warm-up: {plan.what}", 0, warm_up)
                # The warm-up may have shown how long a step takes.
                plan = self._plan(batch, share * self._seconds_left())
            if plan is None:
                self._note(f"decode {batch} was not measured: there was no time for it")
                continue
            self._give(f"round 1 of {self._num_rounds}: {plan.what}", 1, plan)
            plans.append(plan)
            usual = sum(_lengths(batch))
            if (num_tokens := sum(plan.prompt_tokens)) < usual:
                self._note(f"{plan.what}: {num_tokens} prompt tokens instead of {usual}, for the slowest engine's sake")
        longest_round_seconds = self._round_seconds(plans)
        for turn in range(2, self._num_rounds + 1):
            begin = self._clock()
            if longest_round_seconds > self._seconds_left():
                self._note(f"there was no time for round {turn} of {self._num_rounds}")
                break
            for plan in plans:
                self._give(f"round {turn} of {self._num_rounds}: {plan.what}", turn, plan)
            longest_round_seconds = max(longest_round_seconds, self._clock() - begin)

    def _plan(self, batch: int, max_seconds: float) -> Plan | None:
        """Return the order for a batch, or None if all engines together would take too long over it. Batch 0 is
        prefill, which is measured in any case."""
        if not batch:
            return Plan(PREFILL, [_PREFILL_TOKENS], 1)
        paces = [self._paces[name] for name in self._running]
        return plan_decode(batch, paces, max_seconds)

    def _give(self, progress: str, turn: int, plan: Plan) -> None:
        """Give one order to every engine. Turn 0 is not reported."""
        batch = len(plan.prompt_tokens)
        prompts = _prompts(turn, plan)
        for name, contender in list(self._running.items()):
            self._on_progress(f"{progress}, {name}")
            pace = self._paces[name]
            try:
                times = _answers(contender.run(prompts, plan.max_tokens, self._order_timeout(pace, plan)))
                self._engines[name]["rss_gib"] = round(contender.rss_bytes() / 2**30, 2)
            except (ContenderError, OSError) as error:
                self._missing[name] = f"{plan.what}: {error}"
                self._running.pop(name).close()
                continue
            figure = _PREFILL_TOKENS / times[0][0] if plan.what == PREFILL else decode_rate(times)
            if plan.what == PREFILL:
                pace.prefill_tokens_per_second = figure or 0.0
            elif figure is not None:
                pace.step_seconds, pace.batch = batch / figure, batch
            if turn and figure is not None:
                self._results.setdefault(name, {}).setdefault(plan.what, []).append(figure)
            elif turn:
                self._note(f"{plan.what}, {name}: the sequences never decoded together")

    def _order_timeout(self, pace: EnginePace, plan: Plan) -> float:
        """Several times what the engine is expected to take, but no more than the rest of the time. An engine of which
        nothing is known gets a third of that, so that a hung one leaves time for the others."""
        if not pace.prefill_tokens_per_second:
            seconds = min(self._seconds_left() / 3, _START_TIMEOUT_SECONDS)
        else:
            expected = pace.order_seconds(len(plan.prompt_tokens), sum(plan.prompt_tokens), plan.max_tokens)
            seconds = min(self._seconds_left(), _ORDER_PATIENCE * expected + 2 * _MIN_ORDER_SECONDS)
        return max(seconds, _MIN_ORDER_SECONDS)

    def _round_seconds(self, plans: Sequence[Plan]) -> float:
        """The expected time of one round of all engines."""
        return sum(
            pace.order_seconds(len(plan.prompt_tokens), sum(plan.prompt_tokens), plan.max_tokens)
            for plan in plans
            for name, pace in self._paces.items()
            if name in self._running
        )

    def _seconds_left(self) -> float:
        return max(self._begin + self._max_seconds - self._clock(), 0.0)

    def _starting_seconds_left(self) -> float:
        seconds = self._begin + _START_SHARE * self._max_seconds - self._clock()
        if seconds <= 0 and self._running:
            raise ContenderError("there was no time left to start it (--minutes)")
        return max(seconds, _MIN_ORDER_SECONDS)

    def _note(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)
            self._on_progress(note)


def plan_decode(batch: int, paces: Sequence[EnginePace], max_seconds: float) -> Plan | None:
    """Return the largest order of this batch that all engines together handle in time, warm-up included; None if there
    is none. Answers are so long that the sequences decode together for a while, however long their prompts take."""
    usual_answer = _ANSWER_TOKENS[batch]
    for divisor in _SHORTENINGS:
        lengths = [max(length // divisor, 1) for length in _lengths(batch)]
        num_prefill_steps = max((_num_prefill_steps(sum(lengths), pace) for pace in paces), default=0)
        shortest_answer = num_prefill_steps + _MIN_STEPS_TOGETHER
        if shortest_answer > usual_answer and divisor != _SHORTENINGS[-1]:
            continue  # a longer answer would cost a slow machine more than shorter prompts do
        warm_up_seconds = sum(pace.order_seconds(batch, sum(lengths), _WARM_UP_TOKENS) for pace in paces)
        for max_tokens in (max(usual_answer, shortest_answer), shortest_answer):
            seconds = sum(pace.order_seconds(batch, sum(lengths), max_tokens) for pace in paces)
            if warm_up_seconds + seconds <= max_seconds:
                return Plan(f"decode {batch}", lengths, max_tokens)
    return None


def _num_prefill_steps(num_tokens: int, pace: EnginePace) -> int:
    """The steps in which our engine prefills, with a quarter more to spare."""
    in_a_second = int(pace.prefill_tokens_per_second)
    step_tokens = min(max(in_a_second, _MIN_STEP_TOKENS), _MAX_STEP_TOKENS)
    return math.ceil(1.25 * num_tokens / step_tokens)


def decode_rate(times: Sequence[Sequence[float]]) -> float | None:
    """Tokens per second while all sequences decode: from the last one's first token to the first one's end. None when
    they never all decoded at the same time."""
    begin, end = max(own[0] for own in times), min(own[-1] for own in times)
    if end <= begin:
        return None
    return sum(begin < moment <= end for own in times for moment in own) / (end - begin)


def _answers(times: list[list[float]]) -> list[list[float]]:
    if not all(times):
        raise ContenderError("an answer without tokens")
    return times


def _lengths(batch: int) -> list[int]:
    """The usual prompt lengths of a batch; 0 is the prefill order."""
    if not batch:
        return [_PREFILL_TOKENS]
    shortest, longest = _PROMPT_TOKENS
    return [shortest + (longest - shortest) * (2 * index + 1) // (2 * batch) for index in range(batch)]


def _prompts(turn: int, plan: Plan) -> list[list[int]]:
    """The same for every engine, and different in every round."""
    chooser = random.Random(f"{turn} {plan.what}")
    return [chooser.choices(_VOCABULARY, k=length) for length in plan.prompt_tokens]


def comparison_table(report: dict[str, Any]) -> str:
    """Render Markdown: medians, with the slowest and the fastest round."""
    whats = [PREFILL, *(f"decode {batch}" for batch in BATCHES)]
    lines = [
        f"| tokens/s | {' | '.join(whats)} | RSS, GiB | load, s |",
        f"|---|{'---|' * (len(whats) + 2)}",
    ]
    for engine in report["engines"]:
        cells = [_cell(engine["tokens_per_second"].get(what)) for what in whats]
        rss_gib = "–" if engine["rss_gib"] is None else engine["rss_gib"]
        lines.append(
            f"| {engine['engine']} ({engine['version']}) | {' | '.join(cells)} | {rss_gib} | {engine['load_seconds']} |"
        )
    measured = {engine["engine"] for engine in report["engines"]}
    for name, why in report["missing"].items():
        lines.append(f"\n{name}: {'left out from' if name in measured else 'not measured:'} {why}")
    lines += [f"\n{note}" for note in report["notes"]]
    return "\n".join(lines)


def _cell(figure: dict[str, float] | None) -> str:
    return f"{figure['median']:.0f} ({figure['min']:.0f} to {figure['max']:.0f})" if figure else "–"
