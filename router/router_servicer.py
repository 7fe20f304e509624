"""kvloom.v1.RouterService: every RPC that clients can call, each a few lines on top of the core driver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NoReturn

import grpc
import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from kvloom.errors import KvloomError, invalid_argument
from kvloom.transport.grpc_errors import abort
from kvloom.v1 import router_service_pb2_grpc
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import (
    CANCEL_OUTCOME_ALREADY_ENDED,
    CANCEL_OUTCOME_CANCELLED,
    CANCEL_OUTCOME_NOT_FOUND,
    CancelRequest,
    CancelResponse,
    ChargeCallRequest,
    ChargeCallResponse,
    ClearResultCacheRequest,
    ClearResultCacheResponse,
    ExplainRequest,
    ExplainResponse,
    GenerateRequest,
    GetMetricsRequest,
    GetMetricsResponse,
    ListModelsRequest,
    ListModelsResponse,
    ModerateRequest,
    ModerateResponse,
    PlanRequest,
    PlanResponse,
    ResumeRequest,
    RouterServiceConnectRequest,
)
from kvloom_common.callers import Callers
from kvloom_common.metrics.exposition import exposition_of
from kvloom_common.models.model_routes import BYTES_PER_TOKEN
from router import convert
from router.answers.generate import GenerateCall
from router.answers.named_calls import NamedCalls, name_of
from router.answers.resumable_answers import ResumableAnswers
from router.answers.resume import serve_generate, serve_resume
from router.caller_scope import CallerScopes, owner_of
from router.core.core import RouterCore
from router.core.events import RequestCancelled
from router.core_driver import CoreDriver
from router.decisions.log import DecisionLog
from router.decisions.responses import explanation_to_proto, not_remembered, plan_to_proto, without_load
from router.links.client_link import ClientLink
from router.links.link_sessions import LinkSessions
from router.links.safety_link import ModerationLink
from router.prompt_checks import MAX_NAME_CHARS
from router.request_validator import RequestValidator
from router.side_call_desk import SideCallDesk

log = structlog.get_logger()

PLAN_CLIENT_ID: Final = "plan"
MAX_METRICS: Final = 64
MAX_OTHER_REQUESTS: Final = 64
"""How many further requests with the same id of their caller's an explanation names."""

Context = grpc.aio.ServicerContext[Any, Any]


class RouterServicer(router_service_pb2_grpc.RouterServiceServicer):
    def __init__(
        self,
        driver: CoreDriver,
        intake: RequestValidator,
        core: RouterCore,
        decisions: DecisionLog,
        answers: ResumableAnswers,
        named_calls: NamedCalls,
        link_sessions: LinkSessions,
        incarnation_id: str = "",
        link_address: Callable[[], str] = lambda: "",
        scopes: CallerScopes | None = None,
        moderation: ModerationLink | None = None,
        metrics_registry: CollectorRegistry = REGISTRY,
        clear_result_cache: Callable[[str | None], Awaitable[int]] | None = None,
        side_calls: SideCallDesk | None = None,
    ) -> None:
        """`link_address` is where only this router serves those who use this servicer."""
        self._metrics_registry = metrics_registry
        self._clear_result_cache = clear_result_cache
        self._link_address = link_address
        self._scopes = scopes or CallerScopes(Callers(), trusts_all=True)
        self._moderation = moderation or ModerationLink(None)
        self._side_calls = side_calls or SideCallDesk(driver, has_limits=False)
        self._driver = driver
        self._intake = intake
        self._core = core
        self._decisions = decisions
        self._answers = answers
        self._named_calls = named_calls
        self._link_sessions = link_sessions
        self._incarnation_id = incarnation_id
        self._links: set[ClientLink] = set()

    async def Generate(self, request: GenerateRequest, context: Context) -> None:
        try:
            if self._answers.is_wanted(request):
                await serve_generate(self._answers, request, context, self._scopes.of(context))
            else:
                scope = self._scopes.of(context)
                call = GenerateCall(
                    self._driver, self._intake, self._named_calls, context, self._answers.address, scope
                )
                await call.serve(request)
        except KvloomError as error:
            await abort(context, error)
        except Exception:
            await _abort_internal(context, "Generate")

    async def Resume(self, request: ResumeRequest, context: Context) -> None:
        try:
            await serve_resume(self._answers, request, context)
        except KvloomError as error:
            await abort(context, error)
        except Exception:
            await _abort_internal(context, "Resume")

    async def Connect(self, request_iterator: AsyncIterator[RouterServiceConnectRequest], context: Context) -> None:
        address, incarnation_id = self._link_address(), self._incarnation_id
        scope = self._scopes.of(context)
        link = ClientLink(self._driver, self._intake, context, self._link_sessions, address, incarnation_id, scope)
        self._links.add(link)
        try:
            await link.serve()
        finally:
            self._links.discard(link)

    async def Plan(self, request: PlanRequest, context: Context) -> PlanResponse:
        scope = self._scopes.of(context)
        expected = request.ByteSize() // BYTES_PER_TOKEN
        try:
            await self._side_calls.charge(scope, expected)
            accepted = await self._intake.accept_generate(request.request, PLAN_CLIENT_ID, scope=scope)
            self._side_calls.settle(scope, len(accepted.request.prompt_token_ids) - expected)
            plan = self._core.plan(accepted.request, self._driver.now())
            brownout = str(self._core.expected_degradation(accepted.request) or "")
            response = plan_to_proto(plan, accepted.model, accepted.chosen, brownout)
            return response if scope.access is None else without_load(response)
        except KvloomError as error:
            # The intake names fields of the nested request.
            field = f"request.{error.field}" if error.field else ""
            named = error.renamed(field, error.message)
            await abort(context, named)
        except Exception:
            await _abort_internal(context, "Plan")

    async def Explain(self, request: ExplainRequest, context: Context) -> ExplainResponse:
        if bool(request.request_id) == bool(request.client_request_id):
            message = "One of request_id and client_request_id is required, and not both."
            await abort(context, invalid_argument(message, "request_id"))
        scope = self._scopes.of(context)
        try:
            await self._side_calls.charge(scope, 0)
        except KvloomError as error:
            await abort(context, error)
        others: list[str] = []
        wanted = scope.request_id(request.request_id)
        if request.client_request_id:
            same_client_id = self._decisions.find_by_client_request_id(request.client_request_id)
            own = [name for name in same_client_id if scope.contains(name)][: 1 + MAX_OTHER_REQUESTS]
            wanted, others = (own[0] if own else ""), [scope.given_id(name) for name in own[1:]]
        remembered = self._decisions.find(wanted)
        if remembered is None:
            field = "request_id" if request.request_id else "client_request_id"
            asked = request.request_id or request.client_request_id
            await abort(context, not_remembered(asked[:MAX_NAME_CHARS], field))
        try:
            explanation = explanation_to_proto(remembered, others)
        except Exception:
            await _abort_internal(context, "Explain")
        explanation.request_id = scope.given_id(remembered.request_id)  # without the caller
        if scope.access is not None:
            for decision in explanation.decisions:
                without_load(decision.plan)
        return explanation

    async def Moderate(self, request: ModerateRequest, context: Context) -> ModerateResponse:
        scope = self._scopes.of(context)
        if (request.HasField("mask") or request.HasField("check")) and scope.caller is not None:
            message = "Only processes of the fabric may ask what is to be hidden, and what is forbidden."
            await abort(context, KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message))
        try:
            await self._side_calls.charge(scope, request.ByteSize() // BYTES_PER_TOKEN)
            return await self._moderation.moderate(request)
        except KvloomError as error:
            await abort(context, error)
        except Exception:
            await _abort_internal(context, "Moderate")

    async def Cancel(self, request: CancelRequest, context: Context) -> CancelResponse:
        if not request.request_id:
            await abort(context, invalid_argument("request_id is required.", "request_id"))
        scope = self._scopes.of(context)
        request_id = scope.request_id(request.request_id)
        if request.resume_token:
            name = name_of(request.request_id, request.resume_token, owner_of(context))
            num_tokens = request.num_received_tokens if request.HasField("num_received_tokens") else None
            found = self._named_calls.settle(name, request_id, num_tokens)
            return CancelResponse(found=found)
        if request.link_id:
            link_id = scope.link_id(request.link_id[:MAX_NAME_CHARS])
            found = self._link_sessions.settle(link_id, request_id, request.num_received_tokens)
            return CancelResponse(found=found)
        if self._core.has_request(request_id):
            self._driver.dispatch(RequestCancelled(request_id))
            return CancelResponse(found=True, outcome=CANCEL_OUTCOME_CANCELLED)
        remembered = self._decisions.find(request_id)
        outcome = CANCEL_OUTCOME_NOT_FOUND if remembered is None else CANCEL_OUTCOME_ALREADY_ENDED
        return CancelResponse(outcome=outcome)

    async def ChargeCall(self, request: ChargeCallRequest, context: Context) -> ChargeCallResponse:
        if self._scopes.of(context).caller is not None:
            message = "Only processes of the fabric may charge calls."
            await abort(context, KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message))
        try:
            return await self._side_calls.serve(request)
        except KvloomError as error:
            await abort(context, error)
        except Exception:
            await _abort_internal(context, "ChargeCall")

    async def ListModels(self, request: ListModelsRequest, context: Context) -> ListModelsResponse:
        scope = self._scopes.of(context)
        try:
            return ListModelsResponse(
                models=self._intake.fleet_shown(convert.fleet_to_proto(self._core.fleet), scope).models
            )
        except KvloomError as error:
            await abort(context, error)

    async def GetMetrics(self, request: GetMetricsRequest, context: Context) -> GetMetricsResponse:
        if self._scopes.of(context).caller is not None:
            message = "Only processes of the fabric may read its metrics here."
            await abort(context, KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message))
        if len(request.names) > MAX_METRICS:
            await abort(context, invalid_argument(f"names may have at most {MAX_METRICS} entries.", "names"))
        text = await asyncio.to_thread(exposition_of, self._metrics_registry, frozenset(request.names))
        return GetMetricsResponse(text=text, incarnation_id=self._incarnation_id)

    async def ClearResultCache(self, request: ClearResultCacheRequest, context: Context) -> ClearResultCacheResponse:
        if self._scopes.of(context).caller is not None:
            message = "Only processes of the fabric may clear its caches."
            await abort(context, KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message))
        tenant = request.tenant if request.HasField("tenant") else None
        try:
            num_answers = 0 if self._clear_result_cache is None else await self._clear_result_cache(tenant)
        except Exception:  # Redis cannot be reached
            await _abort_internal(context, "ClearResultCache")
        return ClearResultCacheResponse(num_answers=num_answers)

    def end_streams(self) -> None:
        """Closes every client's stream cleanly because the router stops."""
        self._answers.end_running()
        for link in list(self._links):
            link.end()


async def _abort_internal(context: Context, rpc: str) -> NoReturn:
    """Handles a bug of the router: the stack trace goes to the log, never to the caller."""
    log.exception("rpc_failed", rpc=rpc)
    error = KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "The router failed on this request.")
    await abort(context, error)
