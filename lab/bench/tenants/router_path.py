"""The router's path of a request, repeated in this process without sockets: from the bytes of a Submit to those for the
shard, and from the shard's frame to the usage record and the bytes for the client.

Leases are granted at once in this process, so what asking Redis and `control` takes is not in the figures; how often
they are asked is.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import msgspec

from kvloom.text.token_ids import pack_token_ids
from kvloom.v1 import control_service_pb2 as pb
from kvloom.v1.generation_pb2 import (
    FINISH_REASON_LENGTH,
    Choice,
    SamplingParams,
    SequenceFinish,
    SequenceStart,
    StepFrame,
    StopConditions,
)
from kvloom.v1.router_service_pb2 import GenerateRequest, RouterServiceConnectRequest, Submit
from kvloom.v1.shard_service_pb2 import LoadReport, ShardServiceConnectRequest, ShardServiceConnectResponse
from kvloom_common.config import KvloomConfig
from kvloom_common.models.served_model import ServedModel
from kvloom_common.tenancy.limits import NO_LIMITS, Limits, limits_to_proto
from kvloom_common.tenancy.prices import Prices
from kvloom_common.tenancy.table import TenantTable
from lab.bench.tenants.paired import differences, estimate
from lab.bench.tenants.variants import ABOUT, ALL_LIMITS, IDENTITY, KEY_LIMITS, OFF
from router import convert
from router.core.actions import LeasesWanted, LimitsCounted, RequestEnded
from router.core.core import RouterCore
from router.core.events import (
    KvSnapshotArrived,
    LeasesGranted,
    RequestArrived,
    SafetyUp,
    ShardDescription,
    ShardUp,
    StepArrived,
)
from router.core.lease_messages import LeaseGrant
from router.core.tenancy.limiter import Limiter
from router.core_config import core_config
from router.core_driver import CoreDriver
from router.intake import Intake
from router.metering.meter import Meter
from router.tenancy.lease_desk import epoch_clock

NUM_LIVE: Final = 32
"""Requests that run at the same time."""
BATCH: Final = 250
"""Requests of one variant between those of the others."""
NUM_PROMPT_TOKENS: Final = 96
LIMITS: Final = Limits(
    requests_per_minute=10_000_000,
    tokens_per_minute=1_000_000_000,
    max_concurrent_requests=10_000,
    tokens_per_day=1_000_000_000_000,
    monthly_budget_nanos=1_000_000_000_000_000,
)
_TENANT: Final = "bench/web"
_KEY_ID: Final = "key_bench"
_MODEL: Final = "bench"
_CLIENT: Final = "c"
_ROUTER: Final = "r/1"


class RouterPath:
    """One router with one simulated shard. `limits` are those of the key, the project and the organisation; None:
    there are no tenants."""

    def __init__(self, limits: tuple[Limits, Limits, Limits] | None) -> None:
        self._has_tenants = limits is not None
        config = KvloomConfig()
        config.control.enabled = self._has_tenants
        self._table = TenantTable() if limits is None else _table(*limits)
        limiter = Limiter(lambda: self._table, epoch_clock()) if self._has_tenants else None
        observer = cast(Any, _Observer(Meter(_ROUTER, self._prices)))  # of the rest it makes nothing
        self._driver = CoreDriver(RouterCore(core_config(config), seed=1, limiter=limiter), observer)
        models: dict[str, ServedModel] = {}
        self._intake = Intake(models, 100_000, lambda: False, meters_usage=self._has_tenants)
        self._client, self._shard = _Client(), _Shard()
        self._driver.add_client(_CLIENT, self._client)
        self._driver.add_shard("s0", self._shard)
        self.desk = _Desk(self._driver)
        if self._has_tenants:
            self._driver.set_limits(self.desk)
        self._driver.dispatch(SafetyUp(False, False))
        self._driver.dispatch(ShardUp(ShardDescription("s0", "i", _MODEL, 16, 1_000_000, 10_000, 4096)))
        self._driver.dispatch(KvSnapshotArrived("s0", 0, ()))
        self._num_requests = 0
        self._prompt = pack_token_ids(list(range(NUM_PROMPT_TOKENS)))

    def serve(self) -> None:
        """Submit one request, and answer the one that has run longest once NUM_LIVE run."""
        self._submit()
        running = self._shard.slots
        if len(running) > NUM_LIVE:
            self._answer(running.popleft())

    def _submit(self) -> None:
        self._num_requests += 1
        number = self._num_requests
        submit = Submit(
            request=GenerateRequest(
                request_id=f"chatcmpl-{number:016x}",
                model=_MODEL,
                sampling=SamplingParams(temperature=0.0, seed=1),
                stop=StopConditions(max_tokens=1),
                timeout_seconds=600.0,
            ),
            packed_prompt_token_ids=self._prompt,
            prompt_text="x",
            choices=[Choice(slot=number)],
        )
        if self._has_tenants:
            submit.tenant, submit.key_id = _TENANT, _KEY_ID
        data = RouterServiceConnectRequest(submits=[submit]).SerializeToString()
        for wanted in RouterServiceConnectRequest.FromString(data).submits:
            self._driver.dispatch(RequestArrived(self._intake.request_from_submit(wanted, _CLIENT)))

    def _answer(self, slot: int) -> None:
        step = StepFrame(
            slots=[slot],
            token_ids=[7],
            deltas=[" word"],
            starts=[SequenceStart(slot=slot)],
            finishes=[SequenceFinish(slot=slot, reason=FINISH_REASON_LENGTH, num_output_tokens=1)],
        )
        data = ShardServiceConnectResponse(step=step, load=_LOAD).SerializeToString()
        frame = ShardServiceConnectResponse.FromString(data)
        self._driver.dispatch(StepArrived("s0", convert.step_from_frame(frame.step)))

    def _prices(self) -> Prices:
        return self._table.prices


_LOAD: Final = LoadReport(num_running=NUM_LIVE, num_own_running=NUM_LIVE, num_available_blocks=900_000)


class _Client:
    """Takes steps as a client's stream would write them."""

    def send_step(self, step: Any) -> None:
        frame = StepFrame()
        convert.fill_frame(frame, step)
        frame.SerializeToString()

    def send_fleet(self, fleet: Any) -> None:
        pass


class _Shard:
    """Takes work as a shard's stream would write it."""

    def __init__(self) -> None:
        self.slots: deque[int] = deque()

    def submit(self, attempt: Any) -> None:
        submits = [convert.submit_to_proto(attempt, packs_token_ids=True)]
        ShardServiceConnectRequest(submits=submits).SerializeToString()
        self.slots.append(attempt.choices[0].slot)

    def cancel(self, cancel: Any) -> None:
        pass

    def want_kv_snapshot(self) -> None:
        pass


class _Observer:
    """Makes usage records. The rest of what a router's own does has nothing of tenants."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._num_records = 0

    def request_ended(self, ended: RequestEnded) -> None:
        if ended.usage is not None:
            self._num_records += 1
            self._meter.record(ended, self._num_records)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_arguments: None


class _Desk:
    """Grants what is asked for, as if all limits were always full, and counts the questions."""

    def __init__(self, driver: CoreDriver) -> None:
        self._driver = driver
        self.num_questions: Counter[str] = Counter()
        """By who was asked. A question may be about many limits."""

    def leases_wanted(self, action: LeasesWanted) -> None:
        self.num_questions.update({"control" if want.name.kind.is_budget else "redis" for want in action.wants})
        grants = [
            LeaseGrant(want.name, want.wanted, want.limit, want.limit, want.asked_at, want.number)
            for want in action.wants
        ]
        self._driver.dispatch(LeasesGranted(grants))

    def limits_counted(self, action: LimitsCounted) -> None:
        pass


def _table(key: Limits, tenant: Limits, organisation: Limits) -> TenantTable:
    table = TenantTable()
    table.apply(
        pb.FollowResponse(
            table_id="t",
            version=1,
            begins_snapshot=True,
            is_complete=True,
            organisations=[pb.OrganisationEntry(id="bench", limits=limits_to_proto(organisation))],
            tenants=[pb.TenantEntry(id=_TENANT, limits=limits_to_proto(tenant))],
            keys=[pb.KeyEntry(id=_KEY_ID, digest=b"1" * 32, tenant=_TENANT, limits=limits_to_proto(key))],
            prices=[pb.Price(id="p", model="*", prompt_nanos=150, cached_nanos=75, output_nanos=600)],
            has_prices=True,
        )
    )
    return table


_LIMITS_OF: Final[Mapping[str, tuple[Limits, Limits, Limits] | None]] = {
    OFF: None,
    IDENTITY: (NO_LIMITS, NO_LIMITS, NO_LIMITS),
    KEY_LIMITS: (LIMITS, NO_LIMITS, NO_LIMITS),
    ALL_LIMITS: (LIMITS, LIMITS, LIMITS),
}


async def measure_router_path(num_rounds: int, max_seconds: float) -> dict[str, Any]:
    """CPU-us a request of the variants in turns, and how often Redis and `control` were asked."""
    paths = {name: RouterPath(limits) for name, limits in _LIMITS_OF.items()}
    for path in paths.values():
        _measure(path)
    for path in paths.values():
        path.desk.num_questions.clear()
    figures: dict[str, list[float]] = {name: [] for name in paths}
    ends_at = time.monotonic() + max_seconds
    num_done = 0
    while num_done < num_rounds and (not num_done or time.monotonic() < ends_at):
        num_done += 1
        for name in list(paths) if num_done % 2 else list(paths)[::-1]:
            figures[name].append(_measure(paths[name]))
        await asyncio.sleep(0)
    report: dict[str, Any] = {"num_rounds": num_done, "variants": {}}
    for name, values in figures.items():
        report["variants"][name] = {
            "about": ABOUT[name],
            "cpu_us_per_request": msgspec.to_builtins(estimate(values)),
            "best": round(min(values), 1),
            "over_off": None if name == OFF else msgspec.to_builtins(differences(figures[OFF], values)),
            "questions_per_1000_requests": {
                owner: round(1000 * count / (num_done * BATCH), 1)
                for owner, count in sorted(paths[name].desk.num_questions.items())
            },
        }
    return report


def _measure(path: RouterPath) -> float:
    """CPU-us a request of one batch."""
    began = time.thread_time_ns()
    for _ in range(BATCH):
        path.serve()
    return (time.thread_time_ns() - began) / BATCH / 1e3


def router_path_table(report: Mapping[str, Any]) -> str:
    """The report for people."""
    found = report["variants"]
    confidence = found[OFF]["cpu_us_per_request"]["confidence"]
    lines = [f"CPU-us a request in a router without sockets; medians of {report['num_rounds']} rounds"]
    lines.append(
        f"  {'':<10}{'median':>8}{'best':>8}{'over off':>10}  {f'{confidence:.0%} between':<18}questions a 1,000"
    )
    for name, one in found.items():
        over, between = "", ""
        if one["over_off"] is not None:
            over = f"{one['over_off']['median']:+.1f}"
            between = f"{one['over_off']['low']:+.1f} and {one['over_off']['high']:+.1f}"
        asked = ", ".join(f"{owner} {count:g}" for owner, count in one["questions_per_1000_requests"].items())
        cpu = one["cpu_us_per_request"]["median"]
        lines.append(f"  {name:<10}{cpu:>8.1f}{one['best']:>8.1f}{over:>10}  {between:<18}{asked}")
    return "\n".join(lines)
