"""The simulations behind the tables of docs/notes/routing/policy-comparison.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, Literal

from msgspec.structs import replace

from router.core.placement import POLICIES
from tools.simulate.fleet.profile import PROFILES
from tools.simulate.runs import BOUND, CapacitySpec, RunSpec, TraceSource

DEFAULT_POLICY: Final = "ect"
RIVALS: Final = ("conductor", "gaie", "dynamo_w16")
CONTEST: Final = (DEFAULT_POLICY, *RIVALS)
SEEDS: Final = (0, 1, 2)
CONTEST_SEEDS: Final = (0, 1)
CONTEST_CALLS: Final = 8000
"""The number of WEKA calls in tables that compare the default policy with its rivals only, for a fifth of the time."""
NUM_SHARDS: Final = 8
MOONCAKE_RATE: Final = 3.25
WEKA_USERS: Final = (80, 110)

CLASSES: Final = "classes"
"""The table of docs/notes/routing/class-placement.md."""
CLASS_RATES: Final = (1.0, 1.5, 2.0)
CLASS_CALLS: Final = 2000
CLASS_SEEDS: Final = (1,)
"""Not the seed with which the rule was chosen."""
BATCH_SHARE: Final = 0.3
NO_CLASSES: Final = ", no classes"
"""Behind the name of a policy: neither routers nor shards are told which requests are batch."""
CLASS_POLICIES: Final = (
    DEFAULT_POLICY,
    f"{DEFAULT_POLICY}{NO_CLASSES}",
    *RIVALS,
    "sglang",
    f"round_robin{NO_CLASSES}",
)

Job = RunSpec | CapacitySpec
TableKind = Literal["figures", "contest", "capacity", "classes"]
"""`figures` has one workload and a row for each policy. `contest` has a row for each setting and compares the default
policy with its rivals. `capacity` has the highest load of each of these. `classes` has the figures of each class."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    label: str
    run: RunSpec
    """The run; its policy and seed are replaced."""


@dataclasses.dataclass(frozen=True, slots=True)
class StudyTable:
    kind: TableKind
    rows: Sequence[Row]
    policies: Sequence[str]

    def job(self, row: Row, policy: str, seed: int) -> RunSpec:
        has_classes = not policy.endswith(NO_CLASSES)
        return replace(row.run, policy=policy.removesuffix(NO_CLASSES), seed=seed, has_classes=has_classes)

    def capacity_job(self, row: Row, policy: str) -> CapacitySpec:
        return CapacitySpec(run=replace(row.run, policy=policy), seeds=CONTEST_SEEDS)

    def jobs(self) -> list[Job]:
        if self.kind == "capacity":
            return [self.capacity_job(row, policy) for row in self.rows for policy in self.policies]
        return [self.job(row, policy, seed) for row in self.rows for policy in self.policies for seed in self.seeds]

    @property
    def seeds(self) -> Sequence[int]:
        if self.kind == "classes":
            return CLASS_SEEDS
        return SEEDS if self.kind == "figures" else CONTEST_SEEDS


@dataclasses.dataclass(frozen=True, slots=True)
class StudyPlan:
    mooncake_path: str
    weka_path: str

    @property
    def names(self) -> list[str]:
        return ["mooncake", *(f"weka_{users}" for users in WEKA_USERS), *self._contests(), "capacity", "rates"]

    @property
    def capacity_job(self) -> CapacitySpec:
        """The rates of the table "rates" are multiples of this capacity."""
        return CapacitySpec(run=replace(self.mooncake, policy=DEFAULT_POLICY), seeds=CONTEST_SEEDS)

    def table(self, name: str, capacity: float | None) -> StudyTable:
        """`capacity` is the result of `capacity_job`. Only "rates" needs it."""
        all_policies = (*POLICIES, BOUND)
        if name == "mooncake":
            return StudyTable("figures", [Row("Mooncake", self.mooncake)], all_policies)
        if name.startswith("weka_"):
            return StudyTable("figures", [Row("WEKA", self.weka(int(name.removeprefix("weka_"))))], all_policies)
        if name == CLASSES:
            mixed = replace(self.mooncake, batch_share=BATCH_SHARE, max_requests=CLASS_CALLS)
            rates = [Row(f"×{rate:g}", replace(mixed, load=rate)) for rate in CLASS_RATES]
            return StudyTable("classes", rates, CLASS_POLICIES)
        if name == "capacity":
            rows = [Row("Mooncake, rate ×", self.mooncake), Row("WEKA, users", self._short_weka)]
            return StudyTable("capacity", rows, (*CONTEST, BOUND))
        if name == "rates":
            assert capacity is not None
            rows = [
                Row(f"{share:.0%} of capacity (×{share * capacity:.2f})", replace(self.mooncake, load=share * capacity))
                for share in (0.5, 0.75, 1.0, 1.25, 1.5)
            ]
            return StudyTable("contest", rows, CONTEST)
        return StudyTable("contest", self._contests()[name], CONTEST)

    @property
    def mooncake(self) -> RunSpec:
        """The run of Mooncake's conversation trace, without policy and seed."""
        source = TraceSource(path=self.mooncake_path, format="mooncake")
        return RunSpec(trace=source, load=MOONCAKE_RATE, policy="", profile=PROFILES["70b"], num_shards=NUM_SHARDS)

    def weka(self, users: int) -> RunSpec:
        """The run of WEKA's sessions with so many users, without policy and seed."""
        return replace(self.mooncake, trace=TraceSource(path=self.weka_path, format="weka"), load=float(users))

    @property
    def _short_weka(self) -> RunSpec:
        return replace(self.weka(WEKA_USERS[0]), max_requests=CONTEST_CALLS)

    def _contests(self) -> dict[str, list[Row]]:
        mooncake, weka = self.mooncake, self._short_weka
        both = (("Mooncake", mooncake, 512), (f"WEKA {WEKA_USERS[0]} users", weka, 64))
        return {
            "staleness": [
                Row(f"{name}, {age:g} s", replace(run, staleness_seconds=age))
                for name, run, _ in both
                for age in (0.0, 0.5, 2.0)
            ],
            "shards": [Row(f"Mooncake, {count} shards", _with_shards(mooncake, count)) for count in (4, 8, 32, 128)]
            + [Row(f"WEKA, {count} shards, {count * 10} users", _with_shards(weka, count)) for count in (4, 8, 32)],
            "kv_capacity": [
                Row(f"{name}, ×{factor:g}", _with_capacity(run, factor, block_size))
                for name, run, block_size in both
                for factor in (0.5, 1.0, 2.0)
            ],
            "routers": [
                Row(f"{name}, {count}", replace(run, num_routers=count)) for name, run, _ in both for count in (1, 2, 4)
            ],
            "profile": [Row(f"{name}, 8b", replace(run, profile=PROFILES["8b"])) for name, run, _ in both],
            "engine": [
                Row("Mooncake, FCFS", mooncake),
                Row("Mooncake, shortest prefill first", replace(mooncake, engine_order="shortest_prefill")),
                Row("Mooncake, peer fetch 100 GB/s", replace(mooncake, peer_fetch_bytes_per_second=100e9)),
            ],
        }


def _with_shards(run: RunSpec, count: int) -> RunSpec:
    """Change the number of shards and keep the load per shard."""
    return replace(run, num_shards=count, load=run.load * count / run.num_shards)


def _with_capacity(run: RunSpec, factor: float, block_size: int) -> RunSpec:
    if factor == 1.0:
        return run
    return replace(run, capacity_blocks=int(run.profile.capacity_tokens * factor) // block_size)
