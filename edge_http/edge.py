"""Edge holds what all handlers share: the configuration, the link to the router, the models, and admission control."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from aiohttp import web

from edge_http.metrics import EdgeMetrics
from edge_http.orchestrator_link import OrchestratorLink
from edge_http.resume.idempotent_answers import IdempotentAnswer, IdempotentAnswers
from edge_http.resume.remote_responses import NoRemoteResponses, RemoteResponses
from edge_http.resume.response_name import new_edge_tag
from edge_http.resume.resumable_stream import ResumableStream
from edge_http.resume.table import ResumeTable
from edge_http.tenant_usage import TenantUsage
from edge_http.wire.cors import Cors
from edge_http.wire.fair_yield import FairYield
from edge_http.wire.keep_alive import KeepAlive
from edge_http.wire.request_callers import RequestCallers
from edge_http.wire.sse import WriteCoalescer
from edge_http.wire.unknown_fields import UnknownFields
from kvloom.adapters import unknown_name
from kvloom.errors import KvloomError, unsupported
from kvloom.router_link.link import RouterLink
from kvloom.router_link.tracked_request import Assignment
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import ModelInfo
from kvloom_common.access.caller_access import check_models, usable
from kvloom_common.callers import Callers
from kvloom_common.config import EdgeConfig, KvloomConfig, with_constants
from kvloom_common.delivery_log import DeliveryLog
from kvloom_common.discovery.records import MetricsTarget
from kvloom_common.limits.byte_budget import ByteBudget, memory_error
from kvloom_common.limits.keyed_counts import KeyedCounts
from kvloom_common.limits.memory_policy import LARGE_BYTES, MemoryLevel
from kvloom_common.models.model_routes import NO_ROUTES, Feature, ModelRoutes
from kvloom_common.models.served_model import ServedModel, adapters_by_model
from kvloom_common.process.access_log import NO_ACCESS_LOG, AccessLog
from kvloom_common.process.control_socket import run_folder
from kvloom_common.receipts.key_files import key_path, public_path
from kvloom_common.replay.stream_retention import ResumeSettings
from kvloom_common.trust.state_seal import StateSealer

if TYPE_CHECKING:
    from edge_http.tracing import EdgeTracing

GENERATE: Final = "generate"
EMBED: Final = "embed"
"""Capabilities; see ShardInfo.capabilities in shard_service.proto."""
BUSY_RETRY_SECONDS: Final = 1.0
DRAINING_RETRY_SECONDS: Final = 5.0


class LossReports(Protocol):
    """Settles the usage records of answers that move from one edge to another; see kvloom/router_link/group.py."""

    def link_ids(self) -> list[str]: ...

    def assignments(self, handle: int) -> Sequence[Assignment]: ...

    def note_delegated_loss(self, link_id: str, request_id: str, num_tokens: int) -> None: ...


_CAPABILITIES: Final[Mapping[Feature, str]] = {"schema": "guided", "logprobs": "logprobs", "vision": "vision"}
"""The capabilities that shards must have for a feature. Tools are a matter of the prompt and of parsing."""


BUILT_IN_CLASSES: Final = frozenset({"interactive", "batch"})
PENDING_BODIES: Final = 64
"""All bodies together that are being received or parsed may have so many times `max_body_bytes`. Beyond that requests
are rejected at once."""


class EdgeSettings(EdgeConfig):
    max_header_bytes: int = 16 * 2**10
    """A request line or a header; all together may have twice that. Proxies and browsers send at most 8 or 16 KiB."""
    max_messages: int = 4096
    """More messages than any context window holds."""
    max_buffered_bytes: int = 256 * 2**10
    """The bytes that may wait for a slow reader, per stream: some ten thousand tokens. Beyond that the request is
    cancelled."""
    max_answer_bytes: int = 32 * 2**20
    """The size of an answer that is not streamed. Beyond that the request is cancelled. No model's longest answers,
    with log-probabilities, come near."""
    max_pending_answer_bytes: int = 256 * 2**20
    """The size of all answers together that are not streamed, while they are collected and sent. Beyond that the
    answer that needs more fails."""


class AdmissionPermit:
    """A running request's place under the concurrency limit. The end of the `with` block releases it, unless
    `handed_over` is set: then the code that took the permit over must call `release`."""

    __slots__ = ("handed_over", "release")

    def __init__(self, release: Callable[[], None]) -> None:
        self.release = release
        self.handed_over = False

    def __enter__(self) -> AdmissionPermit:
        return self

    def __exit__(self, *_fault: object) -> None:
        if not self.handed_over:
            self.release()


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
        self.caller_limits = config.callers
        self.request_timeout_seconds = config.fabric.request_timeout_seconds
        self.drain_timeout_seconds = config.fabric.drain_timeout_seconds
        self.resume_config = with_constants(config.resume, ResumeSettings)
        self.link = link
        self.models = models
        self.routes = routes
        self.losses = losses
        self.metrics = EdgeMetrics(lambda: self.num_running, lambda: self.link.connected)
        self.fields = UnknownFields(self.metrics.on_ignored_field, refuses_all=edge.strict_fields)
        self.resume = ResumeTable(self.resume_config, self.metrics)
        self.idempotent_answers = IdempotentAnswers(self.resume_config)
        self.tag = new_edge_tag()
        """Identifies this process; it is part of the ids of its responses."""
        self.callers = RequestCallers(callers or Callers(), edge.trusted_proxies)
        self.may_connect: Callable[[asyncio.BaseTransport], bool] = lambda _: True
        """Says if a new connection is served."""
        self.access_log = access_log
        self.cors = Cors(edge.cors_origins) if edge.cors_origins else None
        self.bodies = ByteBudget(
            PENDING_BODIES * edge.max_body_bytes,
            "request bodies",
            least_share_bytes=edge.max_body_bytes,
            ends_large=True,
        )
        """The bytes of requests that have been received but not processed yet."""
        self.collected = ByteBudget(
            edge.max_pending_answer_bytes, "answers that are not streamed", least_share_bytes=edge.max_answer_bytes
        )
        """The bytes of answers that are collected or being sent."""
        self.pipelined = ByteBudget(PENDING_BODIES * edge.max_body_bytes // 4, "pipelined requests")
        """The bytes of requests that wait behind another one of their connection."""
        self.fair_yield = FairYield()
        self.write_coalescer = WriteCoalescer()
        self.keep_alive = KeepAlive(edge.stream_keep_alive_seconds, edge.stream_head_seconds)
        self.has_result_cache = config.router.result_cache.enabled
        """True when routers have a result cache; then responses tell if it had the answer."""
        classes = [one.name for one in config.router.classes]
        self.class_names: frozenset[str] = BUILT_IN_CLASSES.union(classes) if classes else frozenset()
        """The classes of requests (docs/concepts/scheduling.md), with the built-in ones, if any is declared."""
        self.may_have_classes = self.callers.have_tenants or bool(classes)
        """True when a request that names no class may have one: classes are declared, or its key may have one."""
        receipts = config.router.receipts
        self.receipt_keys = public_path(key_path(receipts.key_file, config.data_dir)) if receipts.enabled else None
        """The file with the public keys of receipts; None: there are no receipts."""
        self.num_running = 0
        self._num_running_by_caller = KeyedCounts[str]()
        self.usage: TenantUsage | None = None
        """None without tenants."""
        self.orchestrator: OrchestratorLink | None = None
        """None: nothing is stored."""
        self.state_sealer = StateSealer(b"")
        """Seals what clients keep for the fabric."""
        self.tracing: EdgeTracing | None = None
        """None: there are no traces."""
        self.witness: DeliveryLog | None = None
        """None: nobody compares what is metered with what is delivered."""
        self._remote_responses: RemoteResponses = NoRemoteResponses()
        self.num_watchers = 0
        """Pages of administrators that read events now."""
        self.run_folder = run_folder(Path(config.data_dir))
        """That of the `kvloom up` which has started this edge."""
        self.list_targets: Callable[[], Awaitable[Sequence[MetricsTarget]]] = _no_targets
        """Lists the processes of the fleet that serve /metrics; set once this edge listens."""
        self._draining = False
        self._refuses_all = False
        """Draining, or out of memory."""
        self._leaving = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def remote_responses(self) -> RemoteResponses:
        """The responses of the other edges."""
        return self._remote_responses

    def join(self, remote_responses: RemoteResponses) -> None:
        """Make the responses of the other edges reachable. This happens after construction because the other edges
        need the address of this one, which is known once it listens."""
        self._remote_responses = remote_responses

    def find_by_key(self, tenant: str, idempotency_key: str) -> ResumableStream | IdempotentAnswer | None:
        """The response of this edge that a caller's idempotency key stands for."""
        return self.resume.find_by_key(tenant, idempotency_key) or self.idempotent_answers.find_by_key(
            tenant, idempotency_key
        )

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def leaving(self) -> bool:
        """A successor accepts new connections: each existing one is served one last request, then closed."""
        return self._leaving

    def leave(self) -> None:
        self._leaving = True

    def drain(self) -> None:
        """Admit no new requests from now on; running ones continue."""
        self._draining = self._refuses_all = True

    def on_memory_level(self, level: MemoryLevel) -> None:
        """Running answers continue at every level."""
        self._refuses_all = self._draining or level >= MemoryLevel.FULL
        most = None if level == MemoryLevel.NORMAL else LARGE_BYTES
        for budget in (self.bodies, self.collected, self.pipelined):
            budget.restrict(most)
        if most is not None:
            for model in self.models.values():
                model.tokenizer.release_caches()

    def is_idle(self) -> bool:
        """True when no request runs."""
        return not self.num_running

    async def wait_idle(self) -> None:
        """Return once no request runs."""
        await self._idle.wait()

    def admit(self, caller: str) -> AdmissionPermit:
        """Admit one more running request of this caller. Raises KvloomError (DRAINING, OVERLOADED, RATE_LIMITED,
        QUEUE_FULL)."""
        if self._refuses_all:
            raise draining_error() if self._draining else memory_error()
        limit = self.caller_limits.max_concurrent_requests
        if caller and self._num_running_by_caller[caller] >= limit:
            raise caller_limit_error(limit)
        self.check_room()
        self.num_running += 1
        self._num_running_by_caller.add(caller)
        self._idle.clear()
        return AdmissionPermit(functools.partial(self._release, caller))

    def check_room(self) -> None:
        """A request whose body is still being received does not count until the body is complete. Raises KvloomError
        (QUEUE_FULL)."""
        if self.num_running - self.bodies.num_leases >= self.config.max_concurrent_requests:
            raise KvloomError(
                ErrorReason.ERROR_REASON_QUEUE_FULL,
                "This server is at its limit of concurrent requests.",
                retry_after_seconds=BUSY_RETRY_SECONDS,
            )

    def _release(self, caller: str) -> None:
        self.num_running -= 1
        self._num_running_by_caller.remove(caller)
        if not self.num_running:
            self._idle.set()

    def check_docs(self) -> None:
        """Raises KvloomError (NOT_FOUND) if the API is not described here."""
        if not self.config.api_docs:
            raise KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, "This path does not exist (edge.api_docs is false).")

    def check_models(self, request: web.BaseRequest, names: Iterable[str]) -> None:
        """Raises KvloomError (PERMISSION_DENIED) for the first model, adapter or route that the caller may not use."""
        principal = self.callers.principal_of(request)
        if principal is not None:
            check_models(principal, names, self.models)

    def check_requested_models(self, request: web.BaseRequest, name: str, more: Sequence[str] | None) -> None:
        """Checks, as `check_models` does, the names in a body: one that stands for all models stands for the usable
        ones."""
        if self.callers.have_tenants:
            names = () if self.routes.is_any(name, self.models) else (name,)
            self.check_models(request, (*names, *(more or ())))

    def usable(self, request: web.BaseRequest, names: Iterable[str]) -> Iterable[str]:
        """Those of these models, adapters and routes that the caller may use."""
        principal = self.callers.principal_of(request)
        return names if principal is None else usable(principal, names, self.models)

    def usable_model(self, request: web.BaseRequest, name: str) -> ServedModel:
        """Finds a model as `find_model` does, for the caller of the request: also raises KvloomError
        (PERMISSION_DENIED)."""
        self.check_models(request, (name,))
        return self.find_model(name)

    def find_model(self, name: str) -> ServedModel:
        """Raises KvloomError (MODEL_NOT_FOUND)."""
        model = self.models.get(name)
        if model is None:
            message = unknown_name(name, adapters_by_model(self.models.values()))
            raise KvloomError(ErrorReason.ERROR_REASON_MODEL_NOT_FOUND, message, field="model")
        return model

    def resolved_name(self, name: str) -> str:
        """The name of the model that an alias stands for; that of no model is returned as it is."""
        model = self.models.get(name)
        return name if model is None else model.name

    def model_able_to(self, name: str, features: Iterable[Feature]) -> ServedModel:
        """Finds a model as `find_model` does, if it is one of several that could take a request: also raises
        KvloomError (NO_SHARD_READY, UNSUPPORTED_PARAMETER) if no shard of it could."""
        model = self.find_model(name)
        info = self.model_info(model.name)
        if info is None or not info.num_ready_shards:
            raise KvloomError(ErrorReason.ERROR_REASON_NO_SHARD_READY, f"No shard that serves {name!r} is ready now.")
        for feature in features:
            needed = _CAPABILITIES.get(feature)
            if needed is not None and needed not in info.capabilities:
                raise unsupported(f"{name!r} is served by an engine without the capability {needed!r}.", "model")
        return model

    def find_embedding_model(self, name: str, use: str = "") -> ServedModel:
        """The model, if it exists and gives embeddings. `use` is a further capability that they must have: "rerank" or
        "score". Raises KvloomError (MODEL_NOT_FOUND, UNSUPPORTED_PARAMETER)."""
        model = self.find_model(name)
        if model.adapter is not None:
            raise unsupported(f"{model.name!r} is an adapter: embeddings are those of its model alone.", "model")
        info = self.model_info(model.name)
        if info is not None and EMBED not in info.capabilities:
            raise unsupported(f"The model {model.name!r} gives no embeddings.", "model")
        if info is not None and use and use not in info.capabilities:
            message = (
                f"The model {model.name!r} has no capability {use!r}: its embeddings were not trained to be compared."
            )
            raise unsupported(message, "model")
        return model

    def model_info(self, name: str) -> ModelInfo | None:
        """The router's description of a model (for an adapter, of its model); None while the router knows of no shard
        that serves it."""
        for model in self.link.fleet.models:
            if model.name == name:
                return model
        base_name = self._base_name(name)
        return self.model_info(base_name) if base_name else None

    def _base_name(self, name: str) -> str:
        """The model of an adapter; "" if the name is not that of an adapter."""
        model = self.models.get(name)
        return "" if model is None else model.base_name

    def window(self, name: str) -> int:
        """The maximum length of a model's prompt and answer together, in tokens; 0 while it is not known."""
        info = self.model_info(name)
        return info.max_model_len if info is not None else 0

    def generation_window(self, name: str) -> int:
        """Returns the window as `window` does. Raises KvloomError (UNSUPPORTED_PARAMETER) for a model that generates no
        text."""
        for info in self.link.fleet.models:
            if info.name == name:
                if info.embedding_size and GENERATE not in info.capabilities:
                    raise unsupported(f"The model {name!r} generates no text: it gives embeddings only.", "model")
                return info.max_model_len
        base_name = self._base_name(name)
        return self.generation_window(base_name) if base_name else 0

    def not_ready_reason(self, model: str = "") -> str:
        """Why no request (for this model) can be served now; "" when one can."""
        if self._draining or self._leaving:
            return "this edge is draining"
        if not self.link.connected:
            return "the router cannot be reached"
        if self.link.fleet.draining:
            return "the router is draining"
        if model and model not in self.models:
            return "the model is not served"
        wanted = {self._base_name(model) or self.models[model].name} if model else self.models
        infos = (info for info in self.link.fleet.models if info.name in wanted)
        return "" if any(info.num_ready_shards for info in infos) else "no shard is ready"


async def _no_targets() -> Sequence[MetricsTarget]:
    return ()


def caller_limit_error(max_requests: int) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_RATE_LIMITED,
        f"You have {max_requests} requests running at this server, which is the most that one caller may have "
        "(callers.max_concurrent_requests).",
        retry_after_seconds=BUSY_RETRY_SECONDS,
    )


def draining_error() -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_DRAINING,
        "This server is stopping and takes no new requests.",
        retry_after_seconds=DRAINING_RETRY_SECONDS,
    )
