"""The metrics of one process of each role, every one of them with a sample, so that their labels show."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import Metric

from control.service.metrics import CALLS, FOLLOWERS, SNAPSHOTS
from control.usage.metrics import UsageMetrics
from edge_http.answers.answer import EdgeAnswer
from edge_http.metrics import EdgeMetrics
from edge_http.server.router_metrics import RouterGroupCollector
from kvloom.errors import KvloomError
from kvloom.router_link.group import RouterGroup
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason
from kvloom_common.access.tenant_metrics import observe
from kvloom_common.access.tenants import Tenants
from kvloom_common.config import KvloomConfig, ResultCacheConfig
from kvloom_common.tenancy.table import TenantTable
from kvloom_common.trust.fabric_trust import NO_SECRET
from router.answers.resumable_answers import ResumeMetrics
from router.core.actions import (
    LegOutcome,
    LimitsCounted,
    MoveReason,
    PrefillLegCounted,
    RequestDegraded,
    RequestEnded,
    RequestsMoved,
    SequencesPreempted,
    ShardHealthChanged,
)
from router.core.fleet.shard_health import HealthState
from router.core.lease_messages import LimitCount
from router.core.load.prediction import PlacementPrediction
from router.core.objectives import Cause, Objectives, ObjectivesOutcome
from router.core.request_end import RelocationCounts
from router.core.tenancy.limiter import Limiter
from router.metering.metrics import MeteringMetrics
from router.metrics import GAUGES, RouterMetrics
from router.result_cache.cache import ResultCache
from router.result_cache.metrics import ResultCacheMetrics
from router.shadow.metrics import PairMetrics, ShadowMetrics
from router.tenancy.lease_client import LeaseClient
from router.usage_records import Credit
from safety_svc.metrics import ANSWERS, BLOCKS, POLICY_LOADS, PROMPTS, STREAMS
from shard_server.engines.base import AdaptersState, EngineLoad, KvShareUsage
from shard_server.metrics import ShardMetrics

MODEL: Final = "tiny"
_SUFFIXES: Final = ("_created",)


@dataclasses.dataclass(frozen=True)
class Family:
    """What Prometheus shows of one metric."""

    name: str
    kind: str
    about: str
    labels: tuple[str, ...]
    """Sorted, without `le`."""
    bounds: tuple[str, ...]
    """The buckets of a histogram."""

    @property
    def sample_name(self) -> str:
        """How queries name it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def families(metrics: Iterable[Metric]) -> list[Family]:
    found: list[Family] = []
    for metric in metrics:
        samples = [sample for sample in metric.samples if not sample.name.endswith(_SUFFIXES)]
        labels = {label for sample in samples for label in sample.labels}
        bounds = list(dict.fromkeys(sample.labels["le"] for sample in samples if "le" in sample.labels))
        assert samples, f"{metric.name} has no sample: this fake must make one"
        found.append(
            Family(metric.name, metric.type, metric.documentation, tuple(sorted(labels - {"le"})), tuple(bounds))
        )
    return found


def all_families() -> dict[str, list[Family]]:
    """By role."""
    return {
        "edge": families(_of_this_project(_edge().collect())),
        "router": families(_router().collect()),
        "shard": families(_shard().collect()),
        "safety": families(_safety()),
        "control": families(_control()),
    }


def _of_this_project(metrics: Iterable[Metric]) -> Iterator[Metric]:
    """Without prometheus_client's own, which are the same in all processes."""
    return (metric for metric in metrics if not metric.name.startswith(("process_", "python_")))


def _edge() -> Any:
    metrics = EdgeMetrics(lambda: 0.0, lambda: True)
    group = types.SimpleNamespace(num_reattached=0, num_given_up=0, num_parked=0)
    metrics.add(RouterGroupCollector(cast(RouterGroup, group)))
    metrics.watch_resumable(lambda: 0.0, lambda: 0.0, lambda: 0.0)
    metrics.on_response("/v1/models", 200)
    error = KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "")
    answer = types.SimpleNamespace(error=error, started_at=0.0, first_token_at=1.0, num_output_tokens=2, num_choices=1)
    metrics.on_answer("chat", MODEL, cast(EdgeAnswer, answer), num_prompt_tokens=3, num_events=4)
    metrics.on_discarded("chat", MODEL, "refusal", 3)
    metrics.on_ignored_field("rid")
    metrics.on_continued("chat", MODEL, "large")
    observe(Tenants(max_stale_seconds=1.0), metrics.registry, "edge")
    return metrics.registry


def _router() -> CollectorRegistry:
    registry = CollectorRegistry()
    model = types.SimpleNamespace(name=MODEL, num_ready_shards=1, brownout_step=0)
    shard = types.SimpleNamespace(description=types.SimpleNamespace(shard_id="shard-0"), health=HealthState.HEALTHY)
    metrics = RouterMetrics(lambda: cast(Any, [model]), lambda: cast(Any, [shard]), registry)
    prediction = PlacementPrediction(0.0, 0.1, 0.1, 4, 0.01, 0.0, started_after_seconds=0.2)
    metrics.request_ended(
        RequestEnded(
            "r", "t", MODEL, "s", 1, FinishReason.FINISH_REASON_STOP, 0, 3, 2, 4, 0.1, 0.2, 0.3, prediction=prediction
        )
    )
    error = (FinishReason.FINISH_REASON_ERROR, ErrorReason.ERROR_REASON_QUEUE_FULL)
    metrics.request_ended(
        RequestEnded("r", "t", MODEL, "", 0, *error, 3, 0, 0, 0.1, None, 0.3, moves=RelocationCounts(num_failovers=1))
    )
    refused = ObjectivesOutcome(Objectives(1.0), "interactive", None, Cause.LOAD, deadline_met=False)
    metrics.request_ended(RequestEnded("r", "t", MODEL, "", 0, *error, 3, 0, 0, 0.1, None, 0.3, objectives=refused))
    metrics.tokens_credited(Credit("r", "t", MODEL, 1))
    metrics.request_refused(KvloomError(ErrorReason.ERROR_REASON_INTERNAL, ""))
    metrics.shard_health_changed(ShardHealthChanged("shard-0", HealthState.SUSPECTED, "stalled"))
    metrics.requests_moved(RequestsMoved("shard-0", 1, MoveReason.NOTICE))
    metrics.sequences_preempted(SequencesPreempted("shard-0", "t", [1]))
    metrics.prefill_leg_counted(PrefillLegCounted("shard-0", MODEL))
    metrics.prefill_leg_counted(PrefillLegCounted("shard-0", MODEL, LegOutcome.USED))
    metrics.request_degraded(RequestDegraded(MODEL, ("max_tokens",)))
    metrics.watch(lambda: dict.fromkeys(GAUGES, 0.0))
    _limits(registry)
    MeteringMetrics(registry)
    ResumeMetrics(registry).watch(lambda: 0.0, lambda: 0.0, lambda: 0.0)
    shadow = PairMetrics(ShadowMetrics(registry), MODEL, "candidate")
    shadow.scored(2, 1.0, 1.5)
    shadow.generated("stop", 2, 2)
    shadow.skipped("busy")
    shadow.failed("internal")
    observe(Tenants(max_stale_seconds=1.0), registry, "router")
    ResultCacheMetrics(ResultCache(ResultCacheConfig(), b"", lambda _request, _choice: None), registry)
    return registry


def _limits(registry: CollectorRegistry) -> None:
    config = KvloomConfig()
    config.redis.url = "redis://127.0.0.1:1"
    limiter = Limiter(TenantTable, lambda now: now)
    desk = LeaseClient(config, limiter, "router-0/1", list, NO_SECRET, lambda _: None, registry)
    desk.limits_counted(LimitsCounted([LimitCount("requests_per_minute", "refused")]))


def _shard() -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = ShardMetrics(MODEL, block_size=16, num_blocks=64, registry=registry)
    metrics.on_step(
        EngineLoad(num_available_blocks=32, kv_shares=KvShareUsage(), lost_reports=("statistics",)), 1, 0, 8, 0.01
    )
    metrics.on_start(32, 16, 0.01, 0.02)
    metrics.on_finish(FinishReason.FINISH_REASON_STOP, 0.1)
    metrics.on_unwanted_end(0)
    metrics.on_adapters(AdaptersState([], 8, 0.0, 0, 0, [], []))
    return registry


def _safety() -> list[Metric]:
    """Its metrics are those of the process, so the samples stay at 0."""
    POLICY_LOADS.labels("loaded").inc(0)
    BLOCKS.labels("prompt", "rule").inc(0)
    assert all((ANSWERS, PROMPTS, STREAMS))
    return [metric for metric in REGISTRY.collect() if metric.name.startswith("kvloom_safety_")]


def _control() -> list[Metric]:
    """Likewise."""
    CALLS.labels("ListKeys", "").inc(0)
    assert all((FOLLOWERS, SNAPSHOTS))
    registry = CollectorRegistry()
    usage = UsageMetrics(registry)
    usage.failures.labels("redis").inc(0)
    usage.alerts.labels("sent").inc(0)
    own = [metric for metric in REGISTRY.collect() if metric.name.startswith("kvloom_control_")]
    return [*own, *registry.collect()]


def router_of_many(count: int) -> CollectorRegistry:
    """A router that knows so many models, of a shard each."""
    registry = CollectorRegistry()
    models = [types.SimpleNamespace(name=f"model-{i}", num_ready_shards=1, brownout_step=0) for i in range(count)]
    shards = [
        types.SimpleNamespace(description=types.SimpleNamespace(shard_id=f"s-{i}"), health=HealthState.HEALTHY)
        for i in range(count)
    ]
    metrics = RouterMetrics(lambda: cast(Any, models), lambda: cast(Any, shards), registry)
    metrics.watch(lambda: dict.fromkeys(GAUGES, 0.0))
    return registry


def table_of(found: Iterable[Family]) -> str:
    """The table of docs/metrics.md."""
    rows = ["| metric | type | labels | what it counts |", "|---|---|---|---|"]
    for family in sorted(found, key=lambda family: family.sample_name):
        labels = ", ".join(f"`{label}`" for label in family.labels) or "–"
        rows.append(f"| `{family.sample_name}` | {family.kind} | {labels} | {family.about} |")
    return "\n".join(rows)
