"""One router: its parts put together, from its start through its drain to its end."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec
import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from kvloom.errors import KvloomError
from kvloom.v1 import router_service_pb2
from kvloom_common.access.exposure import exposure_risk
from kvloom_common.access.kv_shares import KvShares
from kvloom_common.access.listener_tls import listener_tls
from kvloom_common.access.tenant_metrics import observe
from kvloom_common.callers import Callers, configured_callers
from kvloom_common.config import KvloomConfig
from kvloom_common.delivery_log import FOLDER as WITNESS_FOLDER
from kvloom_common.delivery_log import DeliveryLog
from kvloom_common.discovery.announcer import Announcer, advertised_address, fabric_host, name_owner
from kvloom_common.discovery.process_finder import ProcessFinder
from kvloom_common.discovery.records import NameTakenError, RouterRecord
from kvloom_common.discovery.registry import RouterRegistry, ShardRegistry
from kvloom_common.kv_share import KvShare
from kvloom_common.limits.address_limit import AddressLimit
from kvloom_common.limits.connection_sweep import ConnectionSweep
from kvloom_common.limits.memory_policy import MemoryLevel
from kvloom_common.limits.memory_watch import MemoryWatch
from kvloom_common.models.card_service import SERVICE_NAME as CARD_SERVICE_NAME
from kvloom_common.models.card_service import ModelCardServicer
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.models.model_card import PackedCard
from kvloom_common.models.model_routes import ModelRoutes
from kvloom_common.models.rollout_follower import RolloutFollower
from kvloom_common.process import service
from kvloom_common.process.access_log import AccessLog
from kvloom_common.process.watched_files import following
from kvloom_common.receipts.key_files import key_path
from kvloom_common.tenancy.prices import Prices
from kvloom_common.tenancy.table import TenantTable
from kvloom_common.transport.standard_services import add_health_and_reflection
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from router.answers.named_calls import NamedCalls
from router.answers.resumable_answers import ResumableAnswers, ResumeMetrics
from router.caller_scope import CallerScopes, caller_access
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
from router.core.events import SHADOW_CLIENT_ID, DrainEnded, DrainStarted
from router.core_driver import CoreDriver
from router.core_settings import declared_classes
from router.decisions.file import DecisionWriter, RotatingFile
from router.decisions.journal import DecisionJournal
from router.decisions.log import DecisionLog
from router.health import HealthReporter
from router.links.fleet_watcher import FleetWatcher
from router.links.link_sessions import LinkSessions
from router.links.local_link import LocalRouterLink
from router.links.moderation import ModerationLink
from router.links.safety_finder import safety_finder
from router.links.safety_link import SafetyLink
from router.listener import RouterListener
from router.metering.delivery_witness import DeliveryWitness, note_settled
from router.metering.metering import Metering
from router.metering.suspensions import Suspensions, is_believed
from router.metrics import RouterMetrics
from router.receipts.writer import ReceiptWriter, chat_template_checksum
from router.request_validator import RequestValidator
from router.result_cache.cache import ResultCache
from router.result_cache.metrics import ResultCacheMetrics
from router.result_cache.pieces import pieces_of
from router.result_cache.request_key import KEY_BYTES
from router.result_cache.shared import SharedResultCache
from router.result_recorder import ResultRecorder
from router.router_servicer import RouterServicer
from router.rpc.access_log import RpcAccessLog
from router.rpc.api_key_check import ApiKeyCheck
from router.rpc.certificate_check import CertificateCheck
from router.rpc.limits import RpcLimits
from router.rpc.provider_check import ProviderCheck
from router.rpc.tenant_check import TenantCheck
from router.shadow.traffic import ShadowTraffic
from router.side_call_desk import SideCallDesk
from router.tenancy.lease_client import LeaseClient
from router.usage_records import Credit, UsageRecords

log = structlog.get_logger()

ROUTER_SERVICE_NAME: Final = router_service_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name
SERVICE_NAMES: Final = (ROUTER_SERVICE_NAME, CARD_SERVICE_NAME)
SERVER_OPTIONS: Final = [
    *service.SERVER_OPTIONS,
    # A client whose machine has failed must not hold its requests for long: it answers no pings.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # The default is a minute.
]
CLOSE_GRACE_SECONDS: Final = 1.0
CANCEL_AGAIN_SECONDS: Final = 0.2


class RouterServer:
    """Owns the core driver, the links and the gRPC server of one router. Call `start` and then `serve`, once each."""

    def __init__(
        self,
        config: KvloomConfig,
        core: RouterCore,
        catalogue: Catalogue,
        router_id: str = "router",
        metrics_registry: CollectorRegistry = REGISTRY,
        *,
        shares_port: bool = False,
        trust: FabricTrust = NO_SECRET,
    ) -> None:
        """`catalogue` has the models whose files this machine has; the cards of the others come from their shards. With
        `shares_port`, other processes may listen on the router's port (SO_REUSEPORT), for example a
        successor."""
        self._config = config
        self._core = core
        self._router_id = router_id
        self._incarnation_id = uuid.uuid4().hex
        self._trust = trust
        self._draining = False
        self._differing: dict[str, frozenset[str]] = {}
        """The models whose shards differ in their variant."""
        self._metrics = RouterMetrics(lambda: core.fleet.models, lambda: core.shards, metrics_registry)
        self._driver = CoreDriver(core, self)
        self._safety_finder = safety_finder(config, router_id, trust.sealer)
        self._safety_link = _safety_link(config, self._safety_finder, self._driver, trust)
        self._moderation = ModerationLink(self._safety_link)
        self._registry = ShardRegistry(config.redis.url, config.redis.key_prefix, trust.sealer)
        self._watcher = FleetWatcher(self._registry, router_id, self._driver, trust, catalogue)
        self._catalogue = catalogue
        routes = self._routes = ModelRoutes(config.routes)
        self.shadows = ShadowTraffic(self._driver, core, catalogue.by_name, metrics_registry)
        """Compares answers with those of candidates. It may be changed while the router runs."""
        self.shadows.configure(config.shadows)
        self._rollouts = RolloutFollower(config, trust.sealer, routes, self.shadows.follow_rollouts)
        callers = configured_callers(config, trust, router_id)
        if callers.identities is not None:
            observe(callers.identities.tenants, metrics_registry, "router")
        self._cache_salts = callers.cache_salts(trust.cache_key)
        self._tickets = ContinuationTickets(trust.sealer) if trust.has_secret else None
        """None if all clients are trusted."""
        intake = RequestValidator(
            catalogue.by_name,
            config.router.max_prompt_tokens,
            self._needs_prompt_text,
            routes,
            core.has_ready_shard,
            catalogue.adapter_named,
            self._cache_salts,
            _kv_share_of(config, callers, trust),
            meters_usage=config.control.enabled,
            caches_results=config.router.result_cache.enabled,
            gives_receipts=config.router.receipts.enabled,
            classes=declared_classes(config.router.classes),
            prefers_others=core.prefers_others if config.router.brownout.enabled else None,
            tickets=self._tickets,
        )
        self._intake = intake
        self.prices: Callable[[], Prices] = lambda: self._tenants().prices
        """The prices of requests; without tenants there are none."""
        self._keeper = self._new_keeper(metrics_registry)
        self._shared_results: SharedResultCache | None = None
        if self._keeper is not None:
            self._driver.set_keeper(self._keeper)
            self._shared_results = self._share_results(self._keeper)
        self._decision_writer: DecisionWriter | None = None
        """None when the decision log has no file."""
        self._decisions = DecisionLog(
            config.router.decision_log.max_remembered,
            self._new_decision_journal(),
            remembers_unplaced=config.router.decision_log.sample_share > 0,
        )
        self._usage_records = UsageRecords()
        self._suspensions = Suspensions()
        self._metering: Metering | None = None
        """None without tenants."""
        if callers.identities is not None:
            self._metering = Metering(
                config,
                router_id,
                self._incarnation_id,
                trust.sealer,
                self.prices,
                self._progress,
                metrics_registry,
            )
        self._witness: DeliveryLog | None = None
        """None unless it is to be written down what clients outside the fabric are sent."""
        if callers.identities is not None and config.control.witness:
            self._witness = DeliveryLog(Path(config.data_dir) / WITNESS_FOLDER / f"{router_id}.jsonl")
            self._driver.add_tap(DeliveryWitness(self._witness))
        self._leases: LeaseClient | None = None
        if core.limiter is not None and callers.identities is not None:
            core.limiter.table = self._tenants
            self._leases = LeaseClient(
                config,
                core.limiter,
                f"{router_id}/{self._incarnation_id}",
                callers.identities.control_addresses,
                trust,
                self._driver.dispatch,
                metrics_registry,
            )
            self._driver.set_limits(self._leases)
        self._side_calls = SideCallDesk(self._driver, has_limits=self._leases is not None)
        named_calls = NamedCalls(self._driver, self._usage_records)
        self._answers = ResumableAnswers(
            config.router.resume, self._driver, intake, named_calls, ResumeMetrics(metrics_registry), router_id
        )
        sessions = LinkSessions(self._driver, self._usage_records)

        self._limits = RpcLimits(config.router, callers, config.edge.trusted_proxies)
        access_log = AccessLog(config.log)
        interceptors: list[grpc.aio.ServerInterceptor] = []
        if access_log.is_on:
            interceptors.append(RpcAccessLog(access_log, callers))
        self.callers = callers
        self._tls = listener_tls(config.tls)
        if risk := exposure_risk(config, config.router.host):
            raise service.StartError(risk)
        if not trust.has_secret and (self._tls is not None or callers.are_authenticated):
            raise service.StartError(
                "TLS, tenants, API keys and auth providers for clients need the fabric's secret (fabric.secret_file or "
                "KVLOOM_FABRIC_SECRET): without it, edges use the same port as clients"
            )

        def new_listener(
            address: Callable[[], str],
            options: Sequence[tuple[str, Any]],
            checks: Sequence[grpc.aio.ServerInterceptor] = (),
            *,
            trusts_all: bool,
        ) -> RouterListener:
            servicer = RouterServicer(
                self._driver,
                intake,
                core,
                self._decisions,
                self._answers,
                named_calls,
                sessions,
                self._incarnation_id,
                address,
                CallerScopes(callers, trusts_all=trusts_all),
                self._moderation,
                metrics_registry,
                self._clear_result_cache,
                self._side_calls,
            )
            may_call = trust.may_call if trusts_all else None
            return RouterListener(servicer, ModelCardServicer(self._card), options, [*interceptors, *checks], may_call)

        checks: list[grpc.aio.ServerInterceptor] = [self._limits]
        if callers.api_keys is not None:
            checks.append(ApiKeyCheck(callers))
        if callers.verifier is not None:
            checks.insert(0, ProviderCheck(callers, callers.verifier))
        if callers.identities is not None:
            checks.insert(0, TenantCheck(callers.identities))

        if self._tls is not None and self._tls.revoked is not None:
            checks.insert(0, CertificateCheck(self._tls.revoked))

        options = [*SERVER_OPTIONS, ("grpc.max_concurrent_streams", config.router.max_streams_per_connection)]
        for_clients = service.sharing_port(options) if shares_port else options
        if trust.has_secret:  # otherwise edges use the same port, and send the requests of many clients in a message
            for_clients = [*for_clients, ("grpc.max_receive_message_length", config.router.max_message_bytes)]
        self._for_clients = new_listener(
            lambda: self._answers.address,
            [*for_clients, ("grpc.max_allowed_incoming_connections", config.router.max_connections)],
            checks,
            trusts_all=not trust.has_secret,
        )
        self._for_fabric: RouterListener | None = None
        """For processes that know the fabric's secret; None when there is none."""
        if trust.has_secret:
            self._for_fabric = new_listener(lambda: self._advertised(self.internal_address), options, trusts_all=True)
        health = add_health_and_reflection(
            self._for_clients.server, SERVICE_NAMES, with_reflection=config.router.reflection
        )
        self._health = HealthReporter(health, SERVICE_NAMES, self._is_serving)
        self._metrics.watch(self._gauges)
        most, proxies = config.router.max_connections_per_address, config.edge.trusted_proxies
        self._sweep = ConnectionSweep(most, lambda: AddressLimit(most, proxies))
        self._memory = MemoryWatch(
            "router", config.router.max_memory_bytes, self._on_memory_level, metrics_registry, self._is_idle
        )

    async def start(self, host: str, port: int, own_port: int | None = None) -> str:
        """Binds the ports; clients that connect wait until `serve` opens them. Returns the address, which is that of
        `own_port` if one is given. Raises StartError when a port is taken or the decision log's file cannot be
        written."""
        if self._decision_writer is not None:
            self._decision_writer.open()
        if self._metering is not None:
            await self._metering.start()
        add_port = NO_SECRET.add_port if self._tls is None else self._tls.add_port
        self._for_clients.bind(host, port, add_port)
        if own_port is not None:
            self._for_clients.bind(host, own_port, add_port)
        if self._for_fabric is not None:
            self._for_fabric.bind(fabric_host(self._config, host), 0, self._trust.add_port)
        self._answers.address = self._advertised(self._for_clients.address)
        self._sweep.ports = self._for_clients.ports
        return self._for_clients.address

    @property
    def internal_address(self) -> str:
        """Where the processes of the fabric reach this router; "" when it has no secret."""
        return "" if self._for_fabric is None else self._for_fabric.address

    def local_link(self, name: str) -> LocalRouterLink:
        """Returns a link to this router for an edge in the same process."""
        link = LocalRouterLink(self._driver, self._intake, name, self._moderation, self._side_calls)
        if self._metering is not None:
            self._usage_records.open(link.client_id, link.client_id)
        return link

    async def serve(self, stop: asyncio.Event, on_open: Callable[[], None] = lambda: None) -> None:
        """Serves until `stop` is set, and then drains. `on_open` is called when the router can be reached. Raises what
        one of the router's own tasks raised."""
        try:
            files = self._memory, self._sweep, self._tls, self.callers.watched
            watched = filter(None, (*files, self._rollouts, self._shared_results, self._witness))
            async with following(*watched), asyncio.TaskGroup() as tasks:
                owned = [
                    tasks.create_task(self._watcher.run(), name="fleet watcher"),
                    tasks.create_task(self._health.run(), name="health reporter"),
                ]
                if self._safety_link is not None:
                    owned.append(tasks.create_task(self._safety_finder.run(), name="safety finder"))
                    owned.append(tasks.create_task(self._connect_safety(self._safety_link), name="safety link"))
                if self._metering is not None:
                    owned.append(tasks.create_task(self._metering.run(), name="metering"))
                    owned.append(tasks.create_task(self._suspensions.watch(), name="suspensions"))
                if self._leases is not None:
                    owned.append(tasks.create_task(self._leases.run(), name="leases of limits"))
                if self._decision_writer is not None:
                    tasks.create_task(self._decision_writer.run(), name="decision writer")
                await service.wait_to_open(self._find_peers(), stop)
                announcer = await self._open()
                on_open()
                announcing = tasks.create_task(announcer.run(), name="announcer")
                await stop.wait()
                await _cancel_all([announcing])
                await announcer.withdraw()
                await self._drain()
                await self._close_streams()
                await _cancel_all(owned)
                if self._decision_writer is not None:
                    self._decision_writer.close()  # Its task ends once the remaining lines are written.
        finally:
            await self._close_streams()
            await self._answers.close()
            self.shadows.close()
            self._driver.close()
            if self._metering is not None:
                await self._metering.close()
            await self._registry.close()
            if self._shared_results is not None:
                await self._shared_results.close()

    def _card(self, model: str) -> PackedCard | None:
        """Raises KvloomError (PERMISSION_DENIED) if the RPC's caller may not use the model."""
        access = caller_access.get()
        if access is not None:
            access.check_models((model,), self._catalogue.by_name)
        return self._catalogue.card(model)

    def _tenants(self) -> TenantTable:
        identities = self.callers.identities
        return TenantTable() if identities is None else identities.tenants.table

    def _is_idle(self) -> bool:
        return not self._driver.num_live_requests

    def _on_memory_level(self, level: MemoryLevel) -> None:
        self._limits.on_memory_level(level)
        self._intake.on_memory_level(level)
        if level > MemoryLevel.NORMAL:
            self._catalogue.release_caches()

    async def _find_peers(self) -> None:
        """Requests that arrive before the shards and the safety service are known would be rejected although nothing is
        wrong. At a port shared with other routers that may be any client's request."""
        await self._watcher.wait_until_tried()
        if self.callers.identities is not None:
            await self.callers.identities.tried.wait()
        if self._safety_link is not None:
            await self._safety_link.tried.wait()

    async def _connect_safety(self, link: SafetyLink) -> None:
        await self._safety_finder.found.wait()
        await link.run()

    async def _open(self) -> Announcer[RouterRecord]:
        """Raises StartError if another machine has a router of this name."""
        registry = RouterRegistry(self._config.redis.url, self._config.redis.key_prefix, self._trust.sealer)
        clients_address = self._answers.address
        address = self._advertised(self.internal_address) if self.internal_address else clients_address
        owner = name_owner(self._config.data_dir)
        record = RouterRecord(address, self._router_id, self._incarnation_id, clients_address, owner)
        announcer = Announcer(registry, record)
        try:
            await announcer.wait_for_name()
        except NameTakenError as error:
            await announcer.close()
            raise service.StartError(str(error)) from error
        for listener in self._listeners:
            await listener.start()
        log.info("router_started", address=self._for_clients.address, internal_address=self.internal_address)
        return announcer

    def _advertised(self, address: str) -> str:
        return advertised_address(self._config, address)

    async def _drain(self) -> None:
        self._draining = True
        self.shadows.close()
        self._driver.dispatch(DrainStarted())
        self._health.refresh()
        log.info("drain_began", num_live_requests=self._driver.num_live_requests)
        try:
            async with asyncio.timeout(self._config.router.drain_timeout_seconds):
                await self._driver.wait_idle()
        except TimeoutError:
            log.warning("drain_timed_out", num_live_requests=self._driver.num_live_requests)
            self._driver.dispatch(DrainEnded())

    async def _close_streams(self) -> None:
        await asyncio.gather(*(listener.stop(CLOSE_GRACE_SECONDS) for listener in self._listeners))

    @property
    def _listeners(self) -> list[RouterListener]:
        return [self._for_clients] if self._for_fabric is None else [self._for_clients, self._for_fabric]

    def _new_keeper(self, registry: CollectorRegistry) -> ResultRecorder | None:
        """None: there is neither a result cache nor receipts. Raises StartError."""
        link = self._safety_link
        cache, receipts = self._new_result_cache(registry), self._new_receipt_writer()
        if cache is None and receipts is None:
            return None
        return ResultRecorder(cache, receipts, lambda: "" if link is None else link.policy_revision, time.time)

    def _share_results(self, keeper: ResultRecorder) -> SharedResultCache | None:
        settings, redis = self._config.router.result_cache, self._config.redis
        if not (settings.enabled and settings.shared and redis.url):
            return None
        shared = SharedResultCache(redis.url, redis.key_prefix, self._trust.sealer, settings.shared_timeout_seconds)
        keeper.share(shared, self._driver.pass_on)
        return shared

    def _new_result_cache(self, registry: CollectorRegistry) -> ResultCache | None:
        settings, models = self._config.router.result_cache, self._catalogue.by_name
        if not settings.enabled:
            return None
        cache = ResultCache(
            settings,
            self._trust.caller_key or (b"shared" if settings.shared else secrets.token_bytes(KEY_BYTES)),
            lambda request, choice: pieces_of(
                models[request.model].tokenizer if request.model in models else None, request, choice
            ),
            lambda request: request.cache_salt,
        )
        ResultCacheMetrics(cache, registry)
        return cache

    async def _clear_result_cache(self, tenant: str | None) -> int:
        """Raises RedisError, OSError if the shared answers cannot be cleared."""
        scopes = None if tenant is None else self._cache_salts.of_all_times(tenant)
        num_answers = 0 if self._keeper is None else self._keeper.clear(scopes)
        if self._shared_results is not None:
            await self._shared_results.clear(scopes)
        return num_answers

    def _new_receipt_writer(self) -> ReceiptWriter | None:
        """Raises StartError."""
        settings, models = self._config.router.receipts, self._catalogue.by_name
        if not settings.enabled:
            return None
        # Only here, because a router without receipts needs no cryptography.
        from kvloom_common.receipts.keys import ReceiptKeyError, made_or_read

        try:
            signer = made_or_read(key_path(settings.key_file, self._config.data_dir))
        except ReceiptKeyError as error:
            raise service.StartError(str(error)) from error
        return ReceiptWriter(signer, lambda: self.prices(), lambda model: chat_template_checksum(models.get(model)))

    def _new_decision_journal(self) -> DecisionJournal | None:
        settings = self._config.router.decision_log
        if not settings.path:
            return None
        on_dropped = self._metrics.decisions_dropped
        self._decision_writer = DecisionWriter(RotatingFile(Path(settings.path), settings.max_bytes), on_dropped)
        policy = self._config.router.placement.policy
        return DecisionJournal(
            self._decision_writer, on_dropped, lambda: self._core.shards, policy=policy, router_id=self._router_id
        )

    # -- Observer -----------------------------------------------------------------------------------------------------

    def placement_decided(self, decision: PlacementDecided) -> None:
        self._decisions.placement_decided(decision)

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
        if self._metering is not None and credit.record and is_believed(credit.record, self._suspensions):
            corrected = self._metering.tokens_lost(credit.record, credit.num_tokens)
            if self._witness is not None:
                note_settled(self._witness, corrected)
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
        if self._keeper is not None:
            self._keeper.fleet_changed(shard.description for shard in self._core.shards)
        self._report_variants()
        self._health.refresh()

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

    def _progress(self, min_age_seconds: float) -> list[RequestEnded]:
        now = self._driver.now()
        return [one for one in self._core.progress(now - min_age_seconds, now) if one.client_id != SHADOW_CLIENT_ID]

    # -- state --------------------------------------------------------------------------------------------------------

    def _report_variants(self) -> None:
        """Warn when shards of one model compute different bits, whenever that changes."""
        differing = {m.name: m.variants for m in self._core.fleet.models if len(m.variants) > 1}
        for model, variants in differing.items():
            if self._differing.get(model) != variants:
                log.warning("shard_variants_differed", model=model, variants=sorted(variants))
        self._differing = differing

    def _is_serving(self) -> bool:
        has_safety = self._driver.has_safety or self._config.safety.on_unavailable == "allow"
        has_shard = any(model.num_ready_shards for model in self._core.fleet.models)
        return has_shard and has_safety and not self._draining

    def _needs_prompt_text(self) -> bool:
        return self._safety_link is not None and self._safety_link.screens_prompts

    def _gauges(self) -> dict[str, float]:
        return {
            "requests_live": self._driver.num_live_requests - self.shadows.num_in_flight,
            "requests_queued": self._core.num_queued_requests,
            "clients_connected": self._driver.num_clients,
            "safety_connected": float(self._driver.has_safety),
            "decisions_remembered": self._decisions.num_remembered,
            "draining": float(self._draining),
        }


async def _cancel_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels the tasks, repeatedly: the Redis client loses a cancellation that comes while its connection breaks."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_SECONDS)


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
        return SafetyLink(finder.candidates, driver, trust)
    if safety.on_unavailable == "refuse":
        raise service.StartError(
            "safety.port is not set: configure a safety service, find one in the registry by safety.discover = true, "
            'or run without one by safety.on_unavailable = "allow"'
        )
    return None
