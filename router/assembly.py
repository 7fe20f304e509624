"""Puts the parts of a router together that serve requests."""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
from prometheus_client import CollectorRegistry

from kvloom_common.access.exposure import exposure_risk
from kvloom_common.access.identities import Identities
from kvloom_common.access.kv_shares import KvShares
from kvloom_common.access.listener_tls import ListenerTls, listener_tls
from kvloom_common.callers import Callers, configured_callers
from kvloom_common.config import KvloomConfig, with_constants
from kvloom_common.discovery.announcer import advertised_address
from kvloom_common.discovery.process_finder import ProcessFinder
from kvloom_common.kv_share import KvShare
from kvloom_common.models.card_service import ModelCardServicer
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.models.model_card import PackedCard
from kvloom_common.models.model_routes import ModelRoutes
from kvloom_common.process import service
from kvloom_common.process.access_log import AccessLog
from kvloom_common.replay.stream_retention import ResumeSettings
from kvloom_common.tenancy.table import TenantTable
from kvloom_common.tracing.tracer import open_tracer
from kvloom_common.trust.fabric_trust import FabricTrust
from router.answers.named_calls import NamedCalls
from router.answers.resumable_answers import ResumableAnswers, ResumeMetrics
from router.caller_scope import CallerScopes, caller_access
from router.continuation_tickets import ContinuationTickets
from router.core.core import RouterCore
from router.core.priority_classes import JUDGE
from router.core_driver import CoreDriver
from router.core_settings import declared_classes
from router.features.configured import RouterFeatures, new_observer
from router.features.judges import JudgeDesk
from router.links.link_sessions import LinkSessions
from router.links.safety_link import ModerationLink, SafetyLink, safety_finder
from router.listener import RouterListener
from router.metering.delivery_witness import DeliveryWitness
from router.overview.overview import Overview
from router.overview.samples import FleetSamples, RequestCounts
from router.overview.servicer import OverviewServicer
from router.records import RouterRecords, new_records
from router.request_validator import RequestValidator
from router.router_servicer import RouterServicer
from router.rpc.access_log import RpcAccessLog
from router.rpc.api_key_check import ApiKeyCheck
from router.rpc.certificate_check import CertificateCheck
from router.rpc.limits import RpcLimits, RpcSettings
from router.rpc.provider_check import ProviderCheck
from router.rpc.tenant_check import TenantCheck
from router.side_call_desk import SideCallDesk
from router.tenancy.lease_client import LeaseClient

SERVER_OPTIONS: Final = [
    *service.SERVER_OPTIONS,
    # A client whose machine has failed must not hold its requests for long: it answers no pings.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # The default is a minute.
]
_MAX_STREAMS_PER_CONNECTION: Final = 4096
"""RPCs open at a time on one HTTP/2 connection, as many as one caller may have. Further ones wait at the client."""


@dataclasses.dataclass(frozen=True, slots=True)
class RouterParts:
    """The parts that serve the requests of one router."""

    incarnation_id: str
    callers: Callers
    records: RouterRecords
    driver: CoreDriver
    safety_finder: ProcessFinder
    safety_link: SafetyLink | None
    moderation: ModerationLink
    features: RouterFeatures
    intake: RequestValidator
    leases: LeaseClient | None
    side_calls: SideCallDesk
    samples: FleetSamples
    overview: Overview
    answers: ResumableAnswers
    limits: RpcLimits
    tls: ListenerTls | None
    for_clients: RouterListener
    for_fabric: RouterListener | None
    """For processes that know the fabric's secret; None when there is none."""


def assemble(
    config: KvloomConfig,
    core: RouterCore,
    catalogue: Catalogue,
    router_id: str,
    registry: CollectorRegistry,
    *,
    shares_port: bool,
    trust: FabricTrust,
    is_draining: Callable[[], bool],
) -> RouterParts:
    """Raises StartError, ConfigError."""
    incarnation_id = uuid.uuid4().hex
    tls = _checked_tls(config)
    routes = ModelRoutes(config.routes)
    callers = configured_callers(config, trust, router_id)
    identities = callers.identities
    tenants = TenantTable if identities is None else lambda: identities.tenants.table
    if not trust.has_secret and (tls is not None or callers.are_authenticated):
        raise service.StartError(
            "TLS, tenants, API keys and auth providers for clients need the fabric's secret (fabric.secret_file or "
            "KVLOOM_FABRIC_SECRET): without it, edges use the same port as clients"
        )
    records = new_records(config, core, identities, router_id, incarnation_id, trust, registry)
    tickets = ContinuationTickets(trust.sealer) if trust.has_secret else None  # without a secret all are trusted
    tracer = open_tracer(config.tracing, "router", router_id)
    driver = CoreDriver(core, new_observer(tracer, core, catalogue, routes, records, tickets))
    if records.witness is not None:
        driver.add_tap(DeliveryWitness(records.witness))
    finder = safety_finder(config, router_id, trust.sealer)
    link = _safety_link(config, finder, driver, trust)
    features = RouterFeatures(
        config,
        driver,
        core,
        catalogue,
        routes,
        trust,
        lambda: "" if link is None else link.policy_revision,
        lambda: tenants().prices,
        registry,
        tracer,
    )
    salts = callers.cache_salts(trust.cache_key)
    classes = declared_classes(config.router.classes)
    intake = RequestValidator(
        catalogue.by_name,
        config.router.max_prompt_tokens,
        lambda: link is not None and link.screens_prompts,
        routes,
        core.has_ready_shard,
        catalogue.adapter_named,
        salts,
        _kv_share_of(config, callers, trust),
        identities.tenants.check_residency if identities is not None and config.fabric.cell else None,
        None if identities is None else identities.tenants.guardrails,
        meters_usage=config.control.enabled,
        caches_results=config.router.result_cache.enabled,
        gives_receipts=config.router.receipts.enabled,
        holds_calls=link is not None and config.safety.answer_mode == "gate",
        classes=classes,
        prefers_others=core.prefers_others if config.router.brownout.enabled else None,
        tickets=tickets,
    )
    if link is not None:
        link.judges = JudgeDesk(driver, intake, classes.get(JUDGE.name))
    leases = _lease_client(config, core, identities, f"{router_id}/{incarnation_id}", driver, trust, registry)
    side_calls = SideCallDesk(driver, has_limits=leases is not None)
    named_calls = NamedCalls(driver, records.usage_records)
    resume = with_constants(config.resume, ResumeSettings)
    answers = ResumableAnswers(resume, driver, intake, named_calls, ResumeMetrics(registry), router_id)
    sessions = LinkSessions(driver, records.usage_records)
    moderation = ModerationLink(link)
    samples = FleetSamples(
        lambda: core.shards, lambda: RequestCounts(core.num_queued_requests, *records.metrics.ended_counts())
    )
    overview = Overview(router_id, core, driver, records.decisions, samples, is_draining)
    rpcs = with_constants(config.callers, RpcSettings)
    limits = RpcLimits(rpcs, callers, config.edge.trusted_proxies)

    async def clear_results(tenant: str | None) -> int:
        return await features.clear_results(None if tenant is None else salts.of_all_times(tenant))

    def new_listener(
        address: Callable[[], str],
        options: Sequence[tuple[str, Any]],
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        *,
        trusts_all: bool,
    ) -> RouterListener:
        servicer = RouterServicer(
            driver,
            intake,
            core,
            records.decisions,
            answers,
            named_calls,
            sessions,
            incarnation_id,
            address,
            CallerScopes(callers, trusts_all=trusts_all),
            moderation,
            registry,
            clear_results,
            side_calls,
        )
        cards = ModelCardServicer(functools.partial(_card, catalogue))
        shown = OverviewServicer(overview if trusts_all else None)
        return RouterListener(servicer, cards, shown, options, interceptors, trust.may_call if trusts_all else None)

    access_log = AccessLog(config.log)
    logged: list[grpc.aio.ServerInterceptor] = [RpcAccessLog(access_log, callers)] if access_log.is_on else []
    options = [*SERVER_OPTIONS, ("grpc.max_concurrent_streams", _MAX_STREAMS_PER_CONNECTION)]
    for_clients = [
        *(service.sharing_port(options) if shares_port else options),
        ("grpc.max_allowed_incoming_connections", config.callers.max_connections),
    ]
    if trust.has_secret:  # otherwise edges use the same port, and send the requests of many clients in a message
        for_clients.append(("grpc.max_receive_message_length", rpcs.max_message_bytes))
    checks = _checks(callers, tls, limits)
    clients = new_listener(lambda: answers.address, for_clients, [*logged, *checks], trusts_all=not trust.has_secret)
    fabric: RouterListener | None = None
    if trust.has_secret:
        own_address = lambda: "" if fabric is None else advertised_address(config, fabric.address)  # noqa: E731
        fabric = new_listener(own_address, options, logged, trusts_all=True)
    return RouterParts(
        incarnation_id,
        callers,
        records,
        driver,
        finder,
        link,
        moderation,
        features,
        intake,
        leases,
        side_calls,
        samples,
        overview,
        answers,
        limits,
        tls,
        clients,
        fabric,
    )


def _checked_tls(config: KvloomConfig) -> ListenerTls | None:
    """Raises StartError if clients' addresses must not be open as they are configured."""
    if risk := exposure_risk(config, config.router.host):
        raise service.StartError(risk)
    return listener_tls(config.tls)


def _checks(callers: Callers, tls: ListenerTls | None, limits: RpcLimits) -> list[grpc.aio.ServerInterceptor]:
    """Returns the checks that each RPC of a client passes, in this order."""
    checks: list[grpc.aio.ServerInterceptor] = []
    if tls is not None and tls.revoked is not None:
        checks.append(CertificateCheck(tls.revoked))
    if callers.identities is not None:
        checks.append(TenantCheck(callers.identities))
    if callers.verifier is not None:
        checks.append(ProviderCheck(callers, callers.verifier))
    checks.append(limits)
    if callers.api_keys is not None:
        checks.append(ApiKeyCheck(callers))
    return checks


def _lease_client(
    config: KvloomConfig,
    core: RouterCore,
    identities: Identities | None,
    producer: str,
    driver: CoreDriver,
    trust: FabricTrust,
    registry: CollectorRegistry,
) -> LeaseClient | None:
    """None: there are no limits."""
    if core.limiter is None or identities is None:
        return None
    core.limiter.table = lambda: identities.tenants.table
    leases = LeaseClient(config, core.limiter, producer, identities.control_addresses, trust, driver.dispatch, registry)
    driver.set_limits(leases)
    return leases


def _card(catalogue: Catalogue, model: str) -> PackedCard | None:
    """Raises KvloomError (PERMISSION_DENIED) if the RPC's caller may not use the model."""
    access = caller_access.get()
    if access is not None:
        access.check_models((model,), catalogue.by_name)
    return catalogue.card(model)


def _kv_share_of(config: KvloomConfig, callers: Callers, trust: FabricTrust) -> Callable[[str], KvShare | None] | None:
    if callers.identities is not None:
        return KvShares(trust.cache_key, callers.identities.tenants.kv_share).of
    percents = config.callers.kv_shares
    return KvShares(trust.cache_key, lambda caller: (caller, percents.get(caller, 0))).of if percents else None


def _safety_link(
    config: KvloomConfig, finder: ProcessFinder, driver: CoreDriver, trust: FabricTrust
) -> SafetyLink | None:
    """Returns None when there is no safety service. Raises StartError when requests need one and none is configured."""
    safety = config.safety
    if safety.port or safety.discover:
        return SafetyLink(finder.candidates, driver, trust, answers_are_gated=safety.answer_mode == "gate")
    if safety.on_unavailable == "refuse":
        raise service.StartError(
            "safety.port is not set: configure a safety service, find one in the registry by safety.discover = true, "
            'or run without one by safety.on_unavailable = "allow"'
        )
    return None
