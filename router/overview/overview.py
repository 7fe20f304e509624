"""The fleet, the requests and the samples of one router as messages for operators."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from kvloom.errors import invalid_argument
from kvloom.v1.overview_pb2 import (
    ExplainRequestRequest,
    ExplainRequestResponse,
    GetOverviewRequest,
    GetOverviewResponse,
    GetStartsRequest,
    GetStartsResponse,
    ModelStart,
    QueueOverview,
    RequestOverview,
    ShardOverview,
)
from router.core.actions import RequestEnded
from router.core.core import RouterCore
from router.core.events import OWN_CLIENT_IDS
from router.core.fleet.fleet import ShardState
from router.core_driver import CoreDriver
from router.decisions.log import DecisionLog, RememberedRequest
from router.decisions.responses import explanation_to_proto, not_remembered, outcome_to_proto, without_load
from router.overview.samples import FleetSamples

MAX_REQUESTS: Final = 1000
MAX_OTHER_REQUESTS: Final = 64


class Overview:
    """Answers GetOverview and ExplainRequest. Methods raise KvloomError."""

    def __init__(
        self,
        router_id: str,
        core: RouterCore,
        driver: CoreDriver,
        decisions: DecisionLog,
        samples: FleetSamples,
        is_draining: Callable[[], bool],
    ) -> None:
        self._router_id = router_id
        self._core = core
        self._driver = driver
        self._decisions = decisions
        self._samples = samples
        self._is_draining = is_draining

    async def get_overview(self, request: GetOverviewRequest) -> GetOverviewResponse:
        if request.max_requests > MAX_REQUESTS:
            raise invalid_argument(f"max_requests may be at most {MAX_REQUESTS}.", "max_requests")
        is_wanted = _belongs_to(request.organisation)
        now, at = self._driver.now(), time.time()
        response = GetOverviewResponse(
            router_id=self._router_id,
            at_seconds=at,
            draining=self._is_draining(),
            running=[
                _running(one, at)
                for one in self._core.oldest(
                    lambda live: live.request.client_id not in OWN_CLIENT_IDS and is_wanted(live.request.tenant),
                    request.max_requests,
                    now,
                )
            ],
        )
        if not request.only_now:
            response.ended.extend(map(_ended, self._decisions.latest_ended(is_wanted, request.max_requests)))
        if not request.organisation:
            response.num_live_requests = self._driver.num_live_requests
            response.num_queued_requests = self._core.num_queued_requests
            response.shards.extend(map(self._shard, self._core.shards))
            response.queues.extend(
                QueueOverview(model=model, num_requests=num_requests, num_prompt_tokens=num_tokens)
                for model, (num_requests, num_tokens) in self._core.queued_by_model().items()
            )
            if not request.only_now:
                response.samples.extend(self._samples.since(request.samples_after_seconds))
        return response

    async def get_starts(self, _request: GetStartsRequest) -> GetStartsResponse:
        starts = self._core.starts(self._driver.now())
        return GetStartsResponse(models=[ModelStart(model=name, **start._asdict()) for name, start in starts.items()])

    async def explain_request(self, request: ExplainRequestRequest) -> ExplainRequestResponse:
        if bool(request.request_id) == bool(request.client_request_id):
            raise invalid_argument("One of request_id and client_request_id is required.", "request_id")
        is_wanted = _belongs_to(request.organisation)
        names = [request.request_id] if request.request_id else []
        names += self._decisions.find_by_client_request_id(request.client_request_id)
        found = [one for one in map(self._decisions.find, names) if one is not None and is_wanted(one.tenant)]
        if not found:
            raise not_remembered(request.request_id or request.client_request_id)
        others = [one.request_id for one in found[1 : 1 + MAX_OTHER_REQUESTS]]
        explanation = explanation_to_proto(found[0], others)
        if request.organisation:
            for decision in explanation.decisions:
                without_load(decision.plan)
        return ExplainRequestResponse(explanation=explanation)

    def _shard(self, shard: ShardState) -> ShardOverview:
        about, load = shard.description, shard.load
        return ShardOverview(
            shard_id=about.shard_id,
            model=about.model,
            model_version=about.model_version,
            engine=about.engine,
            variant=about.variant,
            role=about.role,
            health=shard.health.value,
            draining=shard.is_draining,
            withdrawn=shard.is_withdrawn,
            asleep=shard.is_asleep,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_queued_prefill_tokens=load.num_queued_prefill_tokens,
            num_available_blocks=load.num_available_blocks,
            num_blocks=about.num_blocks,
            max_batch=about.max_batch,
            decode_step_seconds=load.decode_step_seconds,
            prefill_tokens_per_second=load.prefill_tokens_per_second,
            adapters=shard.adapters,
            num_prompt_tokens=load.num_prompt_tokens,
            num_cached_tokens=load.num_cached_tokens,
            num_output_tokens=load.num_output_tokens,
            output_tokens_per_second=self._samples.output_rates.get(about.shard_id),
        )


def _belongs_to(organisation: str) -> Callable[[str], bool]:
    """Says if a tenant, "ORGANISATION/PROJECT", is of this organisation. "": every one is."""
    return (lambda tenant: tenant.startswith(f"{organisation}/")) if organisation else lambda _: True


def _running(one: RequestEnded, at: float) -> RequestOverview:
    """A request that runs, from what would be said of it if it ended now."""
    state = "decoding" if one.ttft_seconds is not None else "prefill" if one.num_attempts else "queued"
    message = _request(one, at - one.e2e_latency_seconds, state)
    message.outcome.ClearField("reason")
    message.outcome.ClearField("end")
    return message


def _ended(remembered: RememberedRequest) -> RequestOverview:
    assert remembered.ended is not None
    return _request(remembered.ended, remembered.arrived_at, "ended")


def _request(one: RequestEnded, arrived_at: float, state: str) -> RequestOverview:
    return RequestOverview(
        request_id=one.request_id,
        client_request_id=one.client_request_id,
        tenant=one.tenant,
        model=one.model,
        priority_class=one.priority_class.name,
        arrived_at_seconds=arrived_at,
        state=state,
        outcome=outcome_to_proto(one),
    )
