"""Edge holds what all handlers share: the configuration, the link to the router, the models, and admission control."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from edge_http.admission import Admission, EdgeSettings
from edge_http.answers.answer import AnswerFeature
from edge_http.answers.features import CacheUseHeaders, ReceiptDetails
from edge_http.fetching import UrlFetcher
from edge_http.metrics import EdgeMetrics
from edge_http.offered_models import OfferedModels
from edge_http.openai.responses.left_summaries import LeftSummaries
from edge_http.orchestrator_link import OrchestratorLink
from edge_http.resume.idempotent_answers import IdempotentAnswer, IdempotentAnswers
from edge_http.resume.remote_responses import NoRemoteResponses, RemoteResponses
from edge_http.resume.response_name import new_edge_tag
from edge_http.resume.resumable_stream import ResumableStream
from edge_http.resume.table import ResumeTable
from edge_http.tenant_usage import TenantUsage
from edge_http.wire.cors import Cors
from edge_http.wire.keep_alive import KeepAlive
from edge_http.wire.open_sockets import OpenSockets
from edge_http.wire.request_callers import RequestCallers
from edge_http.wire.sse import WriteCoalescer
from edge_http.wire.unknown_fields import UnknownFields
from kvloom.router_link.link import RouterLink
from kvloom.router_link.tracked_request import Assignment
from kvloom_common.callers import Callers
from kvloom_common.config import KvloomConfig, with_constants
from kvloom_common.delivery_log import DeliveryLog
from kvloom_common.discovery.records import MetricsTarget
from kvloom_common.limits.memory_watch import MemoryLevel
from kvloom_common.models.model_routes import NO_ROUTES, ModelRoutes
from kvloom_common.models.served_model import ServedModel
from kvloom_common.process.access_log import NO_ACCESS_LOG, AccessLog
from kvloom_common.process.control_socket import run_folder
from kvloom_common.receipts.key_files import key_path, public_path
from kvloom_common.replay.stream_retention import ResumeSettings
from kvloom_common.trust.state_seal import StateSealer

if TYPE_CHECKING:
    from edge_http.tracing import EdgeTracing


class LossReports(Protocol):
    """Settles the usage records of answers that move from one edge to another; see kvloom/router_link/group.py."""

    def link_ids(self) -> list[str]: ...

    def assignments(self, handle: int) -> Sequence[Assignment]: ...

    def note_delegated_loss(self, link_id: str, request_id: str, num_tokens: int) -> None: ...


BUILT_IN_CLASSES: Final = frozenset({"interactive", "batch"})


class Edge:
    """The state of one edge process. It lives on the event loop."""

    def __init__(
        self,
        config: KvloomConfig,
        link: RouterLink,
        models: Mapping[str, ServedModel],
        losses: LossReports | None = None,
        callers: Callers | None = None,
        access_log: AccessLog = NO_ACCESS_LOG,
        routes: ModelRoutes = NO_ROUTES,
    ) -> None:
        """`losses` is None when the router runs in this process: its usage records end with it. `callers` names the
        callers of requests; None: without a key. `models`: by name and alias; they may come and go."""
        edge = self.config = with_constants(config.edge, EdgeSettings)
        self.admission = Admission(edge, config.callers)
        self.request_timeout_seconds = config.fabric.request_timeout_seconds
        self.drain_timeout_seconds = config.fabric.drain_timeout_seconds
        self.resume_config = with_constants(config.resume, ResumeSettings)
        self.link = link
        self.losses = losses
        self.metrics = EdgeMetrics(lambda: self.admission.num_running, lambda: self.link.connected)
        self.fields = UnknownFields(self.metrics.on_ignored_field, refuses_all=edge.strict_fields)
        self.resume = ResumeTable(self.resume_config, self.metrics)
        self.idempotent_answers = IdempotentAnswers(self.resume_config)
        self.tag = new_edge_tag()
        """Identifies this process; it is part of the ids of its responses."""
        self.callers = RequestCallers(callers or Callers(), edge.trusted_proxies)
        wait_for_shards = config.router.overload.start_patience_seconds > 0
        self.models = OfferedModels(models, routes, link, self.callers, wait_for_shards=wait_for_shards)
        self.may_connect: Callable[[asyncio.BaseTransport], bool] = lambda _: True
        """Says if a new connection is served."""
        self.access_log = access_log
        self.cors = Cors(edge.cors_origins) if edge.cors_origins else None
        self.sockets = OpenSockets()
        self.summaries = LeftSummaries(edge.summary_model) if edge.summary_model else None
        """None: turns that are left out are not summed up."""
        self.write_coalescer = WriteCoalescer()
        self.keep_alive = KeepAlive(edge.stream_keep_alive_seconds, edge.stream_head_seconds)
        self.features: Sequence[AnswerFeature] = (
            *((CacheUseHeaders(),) if config.router.result_cache.enabled else ()),
            *((ReceiptDetails(),) if config.router.receipts.enabled else ()),
        )
        """The features that are on."""
        classes = [one.name for one in config.router.classes]
        self.class_names: frozenset[str] = BUILT_IN_CLASSES.union(classes) if classes else frozenset()
        """The classes of requests (docs/concepts/scheduling.md), with the built-in ones, if any is declared."""
        self.may_have_classes = self.callers.have_tenants or bool(classes)
        """True when a request that names no class may have one: classes are declared, or its key may have one."""
        receipts = config.router.receipts
        self.receipt_keys = public_path(key_path(receipts.key_file, config.data_dir)) if receipts.enabled else None
        """The file with the public keys of receipts; None: there are no receipts."""
        self.usage: TenantUsage | None = None
        """None without tenants."""
        self.fetcher = UrlFetcher(edge.fetch_origins)
        """Fetches files and images that requests name by URLs."""
        self.orchestrator: OrchestratorLink | None = None
        """None: nothing is stored."""
        self.state_sealer = StateSealer(b"")
        """Seals what clients keep for the fabric."""
        self.tracing: EdgeTracing | None = None
        """None: there are no traces."""
        self.witness: DeliveryLog | None = None
        """None: nobody compares what is metered with what is delivered."""
        self.remote_responses: RemoteResponses = NoRemoteResponses()
        """The responses of the other edges, once this one listens: they need its address."""
        self.num_watchers = 0
        """Pages of administrators that read events now."""
        self.run_folder = run_folder(Path(config.data_dir))
        """That of the `kvloom up` which has started this edge."""
        self.list_targets: Callable[[], Awaitable[Sequence[MetricsTarget]]] = _no_targets
        """Lists the processes of the fleet that serve /metrics; set once this edge listens."""

    def add_usage(self, usage: TenantUsage) -> None:
        """Tell callers what answers cost."""
        self.usage = usage
        self.features = (*self.features, usage)

    def find_by_key(self, tenant: str, idempotency_key: str) -> ResumableStream | IdempotentAnswer | None:
        """The response of this edge that a caller's idempotency key stands for."""
        return self.resume.find_by_key(tenant, idempotency_key) or self.idempotent_answers.find_by_key(
            tenant, idempotency_key
        )

    def on_memory_level(self, level: MemoryLevel) -> None:
        """Called by the watch of this process's memory."""
        self.admission.on_memory_level(level)
        if level != MemoryLevel.NORMAL:
            for model in self.models.by_name.values():
                model.tokenizer.release_caches()

    def not_ready_reason(self, model: str = "") -> str:
        """Returns why no request (for this model) can be served now; "" when one can."""
        if self.admission.draining or self.admission.leaving:
            return "this edge is draining"
        return self.models.not_ready_reason(model)


async def _no_targets() -> Sequence[MetricsTarget]:
    return ()
