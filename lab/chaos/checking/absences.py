"""Judges how requests for a model were answered while it was unloaded or asleep. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from lab.chaos.fabric.faults import Disturbance, FaultKind, Probe

EXPECTED_ANSWERS: Final[Mapping[FaultKind, str]] = {
    FaultKind.UNLOAD_MODEL: "404 model_not_found",
    FaultKind.SLEEP_MODEL: "503 no_shard_ready",
}


def absence_problems(probes: Iterable[Probe], disturbances: Sequence[Disturbance], begin: float) -> list[str]:
    """The requests that were answered otherwise although no other fault was in effect. `begin` is the start of the load
    on the monotonic clock."""
    return [
        f"at {probe.began_at - begin:.1f} s, {probe.model} being away by {probe.kind}: answered {probe.answer}, not "
        f"{EXPECTED_ANSWERS[probe.kind]}"
        for probe in probes
        if probe.answer != EXPECTED_ANSWERS[probe.kind] and not _is_disturbed(probe, disturbances)
    ]


def absence_figures(probes: Iterable[Probe]) -> dict[str, int]:
    """How often each answer came."""
    return dict(Counter(f"{probe.kind}: {probe.answer}" for probe in probes).most_common())


def _is_disturbed(probe: Probe, disturbances: Sequence[Disturbance]) -> bool:
    return any(
        (one.kind, one.target) != (probe.kind, probe.model) and one.is_felt(probe.began_at, probe.ended_at)
        for one in disturbances
    )
