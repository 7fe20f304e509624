"""The records that a router writes of requests: metrics, placements, usage."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvloom_common.access.identities import Identities
from kvloom_common.config import KvloomConfig
from kvloom_common.delivery_log import FOLDER as WITNESS_FOLDER
from kvloom_common.delivery_log import DeliveryLog
from kvloom_common.trust.fabric_trust import FabricTrust
from router import metric_table as table
from router.core.actions import RequestEnded
from router.core.core import RouterCore
from router.core.events import OWN_CLIENT_IDS
from router.decisions.file import DecisionWriter, RotatingFile
from router.decisions.journal import DecisionJournal
from router.decisions.log import DecisionLog
from router.incidents.recorded_core import RecordedCore
from router.metering.metering import Metering
from router.metering.suspensions import Suspensions
from router.metrics import RouterMetrics
from router.usage_records import UsageRecords


@dataclasses.dataclass(frozen=True, slots=True)
class RouterRecords:
    metrics: RouterMetrics
    decisions: DecisionLog
    writers: Sequence[DecisionWriter] = ()
    """The writers of the decision log and of the incident log, of which there may be none."""
    usage_records: UsageRecords = dataclasses.field(default_factory=UsageRecords)
    suspensions: Suspensions = dataclasses.field(default_factory=Suspensions)
    metering: Metering | None = None
    """None without tenants."""
    witness: DeliveryLog | None = None
    """None unless it is to be written down what clients outside the fabric are sent."""


def new_records(
    config: KvloomConfig,
    core: RouterCore,
    identities: Identities | None,
    router_id: str,
    incarnation_id: str,
    trust: FabricTrust,
    registry: CollectorRegistry,
) -> RouterRecords:
    """`identities`: None without tenants."""
    metrics = RouterMetrics(lambda: core.fleet.models, lambda: core.shards, registry)
    log, on_dropped = config.router.decision_log, metrics.decisions_dropped
    writers = [core.recorder.writer] if isinstance(core, RecordedCore) else []
    journal: DecisionJournal | None = None
    if log.path:
        writer = DecisionWriter(RotatingFile(Path(log.path)), on_dropped, config_key="router.decision_log.path")
        writers.append(writer)
        policy = config.router.placement.policy
        journal = DecisionJournal(
            writer, on_dropped, lambda: core.shards, policy=policy, router_id=router_id, names_tenants=log.named
        )
    decisions = DecisionLog(log.max_remembered, journal, remembers_unplaced=core.is_explained)
    if identities is None:
        return RouterRecords(metrics, decisions, writers)
    table.TENANT_TABLE.observe(identities.tenants, registry)
    metering = Metering(
        config,
        router_id,
        incarnation_id,
        trust.sealer,
        lambda: identities.tenants.table.prices,
        functools.partial(_progress, core),
        registry,
    )
    witness: DeliveryLog | None = None
    if config.control.witness:
        witness = DeliveryLog(Path(config.data_dir) / WITNESS_FOLDER / f"{router_id}.jsonl")
    return RouterRecords(metrics, decisions, writers, metering=metering, witness=witness)


def _progress(core: RouterCore, min_age_seconds: float) -> list[RequestEnded]:
    now = asyncio.get_running_loop().time()
    return [one for one in core.progress(now - min_age_seconds, now) if one.client_id not in OWN_CLIENT_IDS]
