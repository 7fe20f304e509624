"""Synthetic workloads in which shared prefixes, KV memory and decoding decide (docs/notes/routing).

A class of requests is so many per second, each with one of a number of shared prefixes, own tokens, and an answer. Own
and output lengths are exponential. Traces have Mooncake's format, and a shorter one is the beginning of a longer one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tools.simulate.fleet.profile import PROFILES
from tools.simulate.runs import RunSpec, TraceSource
from tools.simulate.traces.mooncake import BLOCK_SIZE

_FIRST_OWN_ID: Final = 1_000_000_000
_IDS_PER_PREFIX: Final = 1000


class RequestClass(NamedTuple):
    per_second: float
    num_prefixes: int
    prefix_tokens: int
    own_tokens: float
    output_tokens: float
    """Means."""
    zipf: float = 0.0
    """The exponent of the law by which prefixes are chosen; 0: all are equally likely."""


class Regime(NamedTuple):
    num_shards: int
    capacity_blocks: int | None
    """KV blocks of a shard; None: as in the profile."""
    seconds: float
    classes: tuple[RequestClass, ...]

    def run(self) -> RunSpec:
        """The simulation, without its trace, policy and seed."""
        return RunSpec(
            trace=TraceSource(path="", format="mooncake"),
            load=1.0,
            policy="",
            profile=PROFILES["8b"],
            num_shards=self.num_shards,
            capacity_blocks=self.capacity_blocks,
        )


_REASONING: Final = RequestClass(12, 1, 512, 300, 3000)
REGIMES: Final[Mapping[str, Regime]] = {
    "one-prompt-100": Regime(100, 256, 120, (RequestClass(1, 1, 94_000, 5000, 1000),)),
    "one-prompt-20": Regime(20, 256, 120, (RequestClass(2, 1, 94_000, 5000, 1000),)),
    "six-prompts-8": Regime(8, None, 200, (RequestClass(6, 6, 60_000, 2000, 300),)),
    "twelve-prompts-8": Regime(8, None, 400, (RequestClass(1, 12, 95_000, 5000, 500),)),
    "many-prompts-64": Regime(64, None, 25, (RequestClass(56, 48, 60_000, 2000, 300),)),
    "zipf-prompts-32": Regime(32, 400, 60, (RequestClass(40, 200, 12_000, 1500, 300, 1.1),)),
    "reasoning-8": Regime(8, None, 120, (_REASONING,)),
    "reasoning-and-documents-8": Regime(
        8, None, 150, (_REASONING._replace(per_second=8), RequestClass(1, 8, 40_000, 8000, 200))
    ),
}


class _Line(msgspec.Struct):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


def write_trace(path: Path, name: str, seed: int, time_share: float = 1.0) -> None:
    """Write that draw of the regime to a file, or the first part of it."""
    regime, chooser = REGIMES[name], random.Random(f"{name}/{seed}")
    rows: list[tuple[float, int, int, int, int]] = []
    for number, one in enumerate(regime.classes):
        weights = [1 / (prefix + 1) ** one.zipf for prefix in range(one.num_prefixes)]
        at = 0.0
        while (at := at + chooser.expovariate(one.per_second)) < regime.seconds * time_share:
            prefix = number * _IDS_PER_PREFIX + chooser.choices(range(one.num_prefixes), weights)[0]
            num_own = max(1, int(chooser.expovariate(1 / one.own_tokens)))
            num_output = max(1, int(chooser.expovariate(1 / one.output_tokens)))
            rows.append((at, one.prefix_tokens // BLOCK_SIZE, prefix, num_own, num_output))
    next_id = _FIRST_OWN_ID
    lines: list[bytes] = []
    for at, num_shared, prefix, num_own, num_output in sorted(rows):
        end_id = next_id - (-num_own // BLOCK_SIZE)
        shared = range(_IDS_PER_PREFIX * prefix, _IDS_PER_PREFIX * prefix + num_shared)
        line = _Line(int(1000 * at), num_shared * BLOCK_SIZE + num_own, num_output, [*shared, *range(next_id, end_id)])
        lines.append(msgspec.json.encode(line))
        next_id = end_id
    path.write_bytes(b"\n".join([*lines, b""]))
