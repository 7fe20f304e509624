"""WEKA's traces of coding-agent sessions (github.com/callanjfox/kv-cache-tester): one session per JSON line.

Block ids are local to a session, except those of the tools (equal for sessions with equally many tool tokens) and of
the system prompt after them (equal if both counts are). Each call follows its think time after the end of the previous
one.

A subagent is a tool call that runs between two calls of its session, recorded with the time of its end. Its calls are
replayed at that place one after the other, and the time that the subagent took is not waited for again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from tools.failures import CommandError
from tools.simulate.traces.closed_loop import ClosedTrace, Session, Turn
from tools.simulate.traces.reading import (
    MAX_CALLS,
    BlockId,
    PromptTokenCount,
    ReadFraction,
    Seconds,
    TokenCount,
    line_error,
    read_records,
)
from tools.simulate.traces.trace import hash_base

BLOCK_SIZE: Final = 64
MAX_THINK_SECONDS: Final = 300.0
"""Users who are away for longer, up to 7 hours in the trace, are not at work: N users would be mostly absent ones."""
MAX_NESTING: Final = 8


class _Call(msgspec.Struct, tag_field="type", tag="n"):
    t: Seconds
    prompt: PromptTokenCount = msgspec.field(name="in")
    out: TokenCount
    hash_ids: list[BlockId]
    think_time: Seconds | None = None
    api_time: Seconds | None = None
    model: str = ""


class _StreamedCall(_Call, tag="s"):
    pass


class _Subagent(msgspec.Struct, tag_field="type", tag="subagent"):
    t: Seconds
    """When it ended."""
    requests: list[_Call | _StreamedCall | _Subagent]
    duration_ms: Annotated[float, msgspec.Meta(ge=0)] | None = None


class _Line(msgspec.Struct):
    requests: list[_Call | _StreamedCall | _Subagent]
    tool_tokens: TokenCount = 0
    system_tokens: TokenCount = 0
    block_size: Annotated[int, msgspec.Meta(ge=1, le=65536)] = BLOCK_SIZE
    hash_id_scope: Literal["local"] = "local"


def read_weka(
    path: Path, on_fraction: ReadFraction | None = None, max_think_seconds: float = MAX_THINK_SECONDS
) -> ClosedTrace:
    """Longer think times are cut. Raises CommandError."""
    sessions: list[Session] = []
    block_size: int | None = None
    num_calls = 0
    for line_number, line in read_records(path, _Line, on_fraction):
        if line.block_size != (block_size or line.block_size):
            raise line_error(path, line_number, "block_size", f"{line.block_size}, but {block_size} before")
        block_size = line.block_size
        reader = _SessionReader(path, line_number, line)
        turns = tuple(
            dataclasses.replace(turn, think_seconds=min(turn.think_seconds, max_think_seconds))
            for turn in reader.turns(line.requests, "requests", 0)
        )
        num_calls += len(turns)
        if num_calls > MAX_CALLS:
            raise line_error(path, line_number, "requests", f"more than {MAX_CALLS} calls")
        if turns:
            sessions.append(Session(turns, reader.shared))
    if block_size is None or not sessions:
        raise CommandError(f"{path}: no calls in it")
    return ClosedTrace(sessions, block_size)


@dataclasses.dataclass(slots=True)
class _SessionReader:
    path: Path
    line_number: int
    line: _Line
    shared: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        size, tool, system = self.line.block_size, self.line.tool_tokens, self.line.system_tokens
        self.shared = (
            (tool // size, hash_base("weka tools", tool)),
            ((tool + system) // size, hash_base("weka system", tool, system)),
        )

    def turns(self, requests: list[_Call | _StreamedCall | _Subagent], field: str, depth: int) -> Iterator[Turn]:
        if depth > MAX_NESTING:
            raise line_error(self.path, self.line_number, field, f"subagents nested deeper than {MAX_NESTING}")
        ended_at: float | None = None
        """When the previous entry ended, on the recorded clock of the session. None if there is none."""
        after_subagent = False
        for index, request in enumerate(requests):
            place = f"{field}[{index}]"
            if isinstance(request, _Subagent):
                begin = request.t - (request.duration_ms or 0.0) / 1e3
                gap = 0.0 if ended_at is None else max(0.0, begin - ended_at)
                for turn in self.turns(request.requests, f"{place}.requests", depth + 1):
                    yield dataclasses.replace(turn, think_seconds=turn.think_seconds + gap)
                    gap = 0.0
                ended_at, after_subagent = request.t, True
                continue
            think = request.think_time
            if think is None or after_subagent:
                think = 0.0 if ended_at is None else max(0.0, request.t - ended_at)
            yield self._turn(request, think, place)
            ended_at, after_subagent = request.t + (request.api_time or 0.0), False

    def _turn(self, request: _Call, think_seconds: float, place: str) -> Turn:
        num_full_blocks, rest = divmod(request.prompt, self.line.block_size)
        if len(request.hash_ids) > num_full_blocks + (rest > 0):
            problem = f"{len(request.hash_ids)} blocks for a prompt of {request.prompt} tokens"
            raise line_error(self.path, self.line_number, f"{place}.hash_ids", problem)
        runs = _runs(request.hash_ids[:num_full_blocks])
        return Turn(think_seconds, request.prompt, max(1, request.out), runs, request.model)


def _runs(ids: list[int]) -> tuple[tuple[int, int], ...]:
    """Ids as half-open runs (first, end). Most are consecutive, and 27 million separate ids would fill the memory."""
    if not ids:
        return ()
    breaks = [index for index, (a, b) in enumerate(itertools.pairwise(ids), 1) if b != a + 1]
    return tuple((ids[a], ids[b - 1] + 1) for a, b in zip([0, *breaks], [*breaks, len(ids)], strict=True))
