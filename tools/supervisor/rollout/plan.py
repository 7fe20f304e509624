"""RolloutPlan is what an operator asks for: the new version, the steps, and what is acceptable."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from kvloom_common.config import ModelConfig
from kvloom_common.models.configured import merged_settings
from tools.failures import CommandError
from tools.supervisor.rollout.judge import RolloutLimits

MAX_STEPS: Final = 64
MAX_HOLD_SECONDS: Final = 86_400.0
MAX_SHARDS: Final = 1024
MAX_HOLDS: Final = 10
"""How many times as long as planned a step may wait for enough requests."""


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Use `checked` for one that comes from outside."""

    version: str
    """The new version, as NAME@VERSION."""
    path: str = ""
    """The path, as for `kvloom models load`. "": the registered model of this name and version."""
    num_shards: int | None = None
    """None: as many as the old version."""
    shard: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The settings of [shard] that differ from those of the old version."""
    steps: Sequence[float] = (1, 10, 50, 100)
    """The share of the sessions in each step, in percent."""
    hold_seconds: float = 30.0
    """How long a step lasts at least."""
    drain_seconds: float = 600.0
    """How long answers of the version that goes may take to end."""
    limits: RolloutLimits = dataclasses.field(default_factory=RolloutLimits)
    scored_share: float = 0.0
    """The share of the old version's answers that the new one scores, from 0 to 1."""

    @property
    def name(self) -> str:
        """By which clients request the model."""
        return self.version.rpartition("@")[0]

    def checked(self) -> RolloutPlan:
        """Raises CommandError."""
        name, _, version = self.version.rpartition("@")
        if not name or not version:
            raise CommandError(f"{self.version!r}: name the new version as NAME@VERSION")
        steps = list(self.steps)
        if not 1 <= len(steps) <= MAX_STEPS or steps != sorted(set(steps)) or steps[-1] != 100 or not steps[0] > 0:
            raise CommandError(f"steps: up to {MAX_STEPS} growing percentages above 0, the last of which is 100")
        limits = self.limits
        gap = limits.max_likelihood_gap
        for name, value, most in (
            ("hold", self.hold_seconds, MAX_HOLD_SECONDS),
            ("drain", self.drain_seconds, MAX_HOLD_SECONDS),
            ("max_error_rate_increase", limits.max_error_rate_increase, 1.0),
            ("scored_share", self.scored_share, 1.0),
            ("max_ttft_ratio", limits.max_ttft_ratio, 1e6),
            ("max_likelihood_gap", 0.0 if gap is None else gap, 1e6),
            ("min_requests", limits.min_requests, 1e9),
        ):
            if not (math.isfinite(value) and 0 <= value <= most):
                raise CommandError(f"{name}: from 0 to {most:g}")
        if self.num_shards is not None and not 1 <= self.num_shards <= MAX_SHARDS:
            raise CommandError(f"num_shards: from 1 to {MAX_SHARDS}")
        return self

    def successor_of(self, old: ModelConfig) -> ModelConfig:
        """The new version: as the old one, but for its files and what the plan says otherwise. It has the names of the
        old one, but for the name of that very version."""
        aliases = dict.fromkeys([self.name, *old.aliases])
        return msgspec.structs.replace(
            old,
            name=self.version,
            path=self.path or self.version,
            version=self.version.rpartition("@")[2],
            sha256="",
            aliases=list(aliases),
            succeeds=old.name,
            shard=merged_settings(old.shard, self.shard),
        )


def shard_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Parses assignments like `sim.step_ms=5`: values are JSON, or else strings. Raises CommandError."""
    found: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not key or not equals:
            raise CommandError(f"{assignment!r} is not KEY=VALUE, for example torch.weights=int8")
        *tables, name = key.split(".")
        try:
            setting: dict[str, Any] = {name: msgspec.json.decode(text)}
        except msgspec.DecodeError:
            setting = {name: text}
        for table in reversed(tables):
            setting = {table: setting}
        found = merged_settings(found, setting)
    return found
