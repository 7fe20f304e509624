"""The history of a simulation as text: the events that each router handled, and the actions that followed."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from kvloom_common.finish_reasons import FINISH_REASON_NAMES
from lab.dst.environment import TraceEntry
from lab.dst.scenario import Scenario
from router.core.events import Request, RequestArrived
from router.core.frames import Finish, Step

MAX_ITEMS: Final = 6
"""The most items of a list that are shown; of a longer one it is the length."""


def scenario_lines(scenario: Scenario) -> list[str]:
    """The sizes, settings and kinds of faults that the seed determines."""
    shards = ", ".join(
        f"{s.model} batch {s.max_batch} window {s.max_model_len} blocks {s.num_blocks}x{s.block_size}"
        for s in scenario.shards
    )
    return [
        f"routers {scenario.num_routers}, tenants {len(scenario.tenants)}, shards: {shards}",
        f"{scenario.config}",
        f"faults: {', '.join(sorted(scenario.rates)) or 'none'}",
    ]


def history_lines(trace: Sequence[TraceEntry], num_lines: int) -> list[str]:
    """The newest `num_lines` entries, oldest first."""
    newest = itertools.islice(trace, max(0, len(trace) - num_lines), None)
    return [
        f"{time - 100.0:9.4f} {router} {_shown(event)}{' -> ' if actions else ''}{'; '.join(map(_shown, actions))}"
        for time, router, event, actions in newest
    ]


def _shown(value: object, *, has_arrived: bool = False) -> str:
    """A value in a few words: a struct by its name and those of its fields that say something, and a request by its id
    unless it has just arrived."""
    match value:
        case Request() if not has_arrived:
            return value.request_id
        case Step():
            return _step(value)
        case msgspec.Struct():
            fields = [(name, getattr(value, name)) for name in value.__struct_fields__]
            arrived = isinstance(value, RequestArrived)
            shown = [f"{name} {_shown(own, has_arrived=arrived)}" for name, own in fields if own]
            return f"{type(value).__name__}({', '.join(shown)})"
        case enum.Enum():
            return value.name.lower()
        case list() | tuple() | set() | frozenset() | dict():
            if len(value) > MAX_ITEMS:
                return f"{len(value)} items"
            if isinstance(value, dict):
                return f"{{{', '.join(f'{_shown(key)}: {_shown(own)}' for key, own in value.items())}}}"
            return f"[{', '.join(map(_shown, value))}]"
        case float():
            return f"{value:g}"
        case str() | int() | bytes() | Exception():
            return str(value)
        case _:
            return type(value).__name__


def _step(step: Step) -> str:
    parts: list[str] = []
    if step.starts:
        parts.append(f"starts {[start.slot for start in step.starts]}")
    if step.slots:
        counts = step.num_tokens or [1] * len(step.slots)
        ends = list(itertools.accumulate(counts))
        tokens = {
            slot: step.token_ids[end - count : end] for slot, count, end in zip(step.slots, counts, ends, strict=True)
        }
        parts.append(f"tokens {tokens}")
    parts += [f"end {finish.slot} {_end(finish)}" for finish in step.finishes]
    return ", ".join(parts)


def _end(finish: Finish) -> str:
    return FINISH_REASON_NAMES[finish.reason] if finish.error is None else finish.error.reason_name.lower()


def join_lines(lines: Iterable[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
