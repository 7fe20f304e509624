"""The router's observer of its driver, which keeps metrics, the log, the decision log and usage records."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import structlog

from kvloom.errors import KvloomError
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.models.model_routes import ModelRoutes
from router.continuation_tickets import ContinuationTickets
from router.core.actions import (
    AnswerResampled,
    BrownoutStepChanged,
    PlacementDecided,
    PrefillLegCounted,
    RequestDegraded,
    RequestEnded,
    RequestsMoved,
    SequencesPreempted,
    ShardHealthChanged,
)
from router.core.core import RouterCore
from router.core.events import JUDGE_CLIENT_ID
from router.metering.delivery_witness import note_settled
from router.metering.suspensions import is_believed
from router.records import RouterRecords
from router.usage_records import Credit

log = structlog.get_logger()


class RouterObserver:
    """Implements `router.core_driver.Observer`."""

    def __init__(
        self,
        core: RouterCore,
        catalogue: Catalogue,
        routes: ModelRoutes,
        records: RouterRecords,
        tickets: ContinuationTickets | None,
    ) -> None:
        self._core = core
        self._catalogue = catalogue
        self._routes = routes
        self._records = records
        self._tickets = tickets
        self._metrics = records.metrics
        self._decisions = records.decisions
        self._usage_records = records.usage_records
        self._metering = records.metering
        self._differing: dict[str, frozenset[str]] = {}
        """The models whose shards differ in their variant."""

    def placement_decided(self, decision: PlacementDecided) -> None:
        if decision.request.client_id == JUDGE_CLIENT_ID:  # nobody asks for it, and its end is not told
            return
        self._decisions.placement_decided(decision)
        self._metrics.placement_decided(decision)

    def request_ended(self, ended: RequestEnded) -> None:
        record = b""
        if self._metering is not None:
            record = self._metering.request_ended(ended)
        if self._tickets is not None:
            self._tickets.request_ended(ended)
        self._usage_records.request_ended(ended, record)
        self._decisions.request_ended(ended)
        self._metrics.request_ended(ended)

    def own_request_ended(self, ended: RequestEnded) -> None:
        if self._metering is not None:
            self._metering.request_ended(ended)

    def answers_discarded(self, client_id: str, request_ids: Sequence[str]) -> None:
        if self._metering is not None:
            for request_id in request_ids:
                record = self._usage_records.take(client_id, request_id)
                if record:
                    self._metering.discarded(record)

    def tokens_credited(self, credit: Credit) -> None:
        if self._metering is not None and credit.record and is_believed(credit.record, self._records.suspensions):
            corrected = self._metering.tokens_lost(credit.record, credit.num_tokens)
            if self._records.witness is not None:
                note_settled(self._records.witness, corrected)
        self._metrics.tokens_credited(credit)

    def request_refused(self, error: KvloomError) -> None:
        self._metrics.request_refused(error)

    def fleet_changed(self) -> None:
        self._catalogue.set_adapters(
            {model.name: {one.name: one.checksum for one in model.adapters} for model in self._core.fleet.models}
        )
        withdrawn = {model.name for model in self._core.fleet.models if model.is_withdrawn}
        self._routes.follow_successors(self._catalogue.successors(withdrawn))
        self._decisions.fleet_changed()
        self._report_variants()

    def shard_health_changed(self, change: ShardHealthChanged) -> None:
        log.warning("shard_health_changed", shard_id=change.shard_id, health=change.state.value, symptom=change.symptom)
        self._metrics.shard_health_changed(change)

    def requests_moved(self, moved: RequestsMoved) -> None:
        log.info(
            "requests_moved", from_shard_id=moved.shard_id, num_requests=moved.num_requests, reason=moved.reason.value
        )
        self._metrics.requests_moved(moved)

    def sequences_preempted(self, preempted: SequencesPreempted) -> None:
        log.info(
            "sequences_preempted",
            shard_id=preempted.shard_id,
            tenant=preempted.tenant,
            num_sequences=len(preempted.slots),
        )
        self._metrics.sequences_preempted(preempted)

    def prefill_leg_counted(self, counted: PrefillLegCounted) -> None:
        self._metrics.prefill_leg_counted(counted)

    def answer_resampled(self, change: AnswerResampled) -> None:
        named = {key: value for key, value in msgspec.structs.asdict(change).items() if value}
        log.warning("answer_resampled", **named)
        self._metrics.answer_resampled()

    def brownout_step_changed(self, change: BrownoutStepChanged) -> None:
        report = log.warning if change.step > change.previous_step else log.info
        report(
            "brownout_step_changed",
            model=change.model,
            step=change.step,
            previous_step=change.previous_step,
            fast_burn_rate=round(change.fast_burn_rate, 3),
            slow_burn_rate=round(change.slow_burn_rate, 3),
        )

    def request_degraded(self, degraded: RequestDegraded) -> None:
        self._metrics.request_degraded(degraded)

    def _report_variants(self) -> None:
        """Warn when shards of one model compute different bits, whenever that changes."""
        differing = {m.name: m.variants for m in self._core.fleet.models if len(m.variants) > 1}
        for model, variants in differing.items():
            if self._differing.get(model) != variants:
                log.warning("shard_variants_differed", model=model, variants=sorted(variants))
        self._differing = differing
