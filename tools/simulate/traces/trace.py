"""A trace that has been read: its calls can be replayed at any load and with any seed, any number of times."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Literal, Protocol, overload

from tools.simulate.workload import SimulatedWorkload
from tools.stable_hash import stable_hash

TraceFormat = Literal["mooncake", "weka", "azure"]
_BASE_MASK = (1 << 62) - 1


class MeasuredWorkload(SimulatedWorkload, Protocol):
    """A workload that knows which of its calls arrive while the load is the requested one."""

    @property
    def num_measured_calls(self) -> int:
        """How many of the first calls to arrive count."""
        ...


class Trace(Protocol):
    @property
    def is_closed_loop(self) -> bool:
        """True when its load is a number of users. Otherwise it is a multiple of the recorded rate."""
        ...

    @property
    def num_calls(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    def workload(self, load: float, seed: int, max_requests: int | None = None) -> MeasuredWorkload:
        """A new workload for one simulation. `load` is a multiple of the rate, or a number of users."""
        ...


def hash_base(*names: object) -> int:
    """The first block hash of a namespace, in which id i has the hash base + i. Two namespaces of a million ids each
    overlap with a probability of 1 in 10^12."""
    return 1 + (stable_hash(*names) & _BASE_MASK)


@dataclasses.dataclass(frozen=True, slots=True)
class HashRuns(Sequence[int]):
    """Block hashes kept as runs of consecutive numbers: some 50 bytes instead of 12 kB for a prompt of 100,000 tokens.

    Iterating is as fast as over a tuple; a single item or a slice takes time in the number of runs.
    """

    runs: tuple[range, ...]

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.runs)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._cut(start, stop) if step == 1 else tuple(self)[index]
        rest = index if index >= 0 else index + len(self)
        if rest >= 0:
            for run in self.runs:
                if rest < len(run):
                    return run[rest]
                rest -= len(run)
        raise IndexError(index)

    def _cut(self, start: int, stop: int) -> HashRuns:
        pieces: list[range] = []
        for run in self.runs:
            if start < len(run) and stop > 0:
                pieces.append(run[max(start, 0) : stop])
            start -= len(run)
            stop -= len(run)
        return HashRuns(tuple(pieces))
