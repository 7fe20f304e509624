"""Chooses the model of each call of a trace: the one that the trace names, or one chosen by session."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from tools.failures import CommandError
from tools.simulate.traces.trace import HashRuns, MeasuredWorkload
from tools.simulate.workload import Call
from tools.stable_hash import stable_hash

_NUM_SPLIT_BLOCKS: Final = 2
"""Calls without a session belong together if their first blocks are equal. The first alone is often a system prompt
that all share."""
_HASH_MASK: Final = (1 << 63) - 1
_SALT_MASK: Final = (1 << 61) - 1
_WHOLE: Final = 1 << 64


class ModelWorkload:
    """A workload each of whose calls is for one of the models. The same prompt has other blocks for another model, as
    in kvloom, whose block hashes begin with the model."""

    def __init__(self, inner: MeasuredWorkload, models: Sequence[str], shares: Sequence[float] = ()) -> None:
        """Without `shares` the trace must name the model of each call. With them sessions are divided by a stable hash,
        whatever the trace names."""
        self.block_size = inner.block_size
        self._inner = inner
        self._models = models
        self._ends = [end / sum(shares) for end in itertools.accumulate(shares)]
        self._salts: Mapping[str, int] = {name: stable_hash("model", name) & _SALT_MASK for name in models}

    @property
    def num_measured_calls(self) -> int:
        return self._inner.num_measured_calls

    def first_calls(self) -> Iterable[tuple[float, Call]]:
        return [(at, self._assign(call)) for at, call in self._inner.first_calls()]

    def next_calls(self, ended: Call, now: float) -> Iterable[tuple[float, Call]]:
        return [(at, self._assign(call)) for at, call in self._inner.next_calls(ended, now)]

    def _assign(self, call: Call) -> Call:
        """Raises CommandError for a call of an unknown model."""
        name = self._chosen(call) if self._ends else call.model
        salt = self._salts.get(name)
        if salt is None:
            what = f"of the model {name!r}" if name else "that names no model"
            raise CommandError(
                f"--models: call {call.call_id} of the trace is one {what}; --model-shares divides the calls "
                f"between {', '.join(self._models)} by session instead"
            )
        return dataclasses.replace(call, model=name, block_hashes=_salted(call.block_hashes, salt))

    def _chosen(self, call: Call) -> str:
        key = call.session_key or tuple(call.block_hashes[:_NUM_SPLIT_BLOCKS]) or call.call_id
        place = stable_hash("model of", key) / _WHOLE
        return self._models[min(bisect.bisect_right(self._ends, place), len(self._models) - 1)]


def _salted(hashes: Sequence[int], salt: int) -> Sequence[int]:
    if isinstance(hashes, HashRuns):  # they begin below 2**62
        return HashRuns(tuple(range(run.start + salt, run.stop + salt) for run in hashes.runs))
    return tuple((block_hash + salt) & _HASH_MASK for block_hash in hashes)
