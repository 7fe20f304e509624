"""The gRPC server of the safety service."""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Callable
from typing import Any, Final

import grpc
import structlog

from kvloom.errors import KvloomError, invalid_argument
from kvloom.transport.grpc_errors import abort
from kvloom.v1 import safety_service_pb2, safety_service_pb2_grpc
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.safety_service_pb2 import CheckWish, Classification, Mask, MaskWish
from kvloom_common.backend import serve_announced
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.announcer import fabric_host
from kvloom_common.metrics.exporter import MetricsExporter, NoMetrics
from kvloom_common.process.request_context import request_fields
from kvloom_common.process.service import (
    SERVER_OPTIONS,
    StartError,
    bind,
    set_serving,
    sharing_port,
    stop_event,
)
from kvloom_common.text.restored_text import with_placeholders
from kvloom_common.tracing.tracer import open_tracer
from kvloom_common.transport.checked_server import CheckedServer
from kvloom_common.transport.local_server import LocalServer
from kvloom_common.transport.standard_services import add_health_and_reflection
from kvloom_common.trust.fabric_trust import FabricTrust
from safety_svc.audit import Audit
from safety_svc.classify import broken_categories
from safety_svc.connection import Found, ScreenConnection, excerpt_of, finding, prompt_judge
from safety_svc.guardrails import AskModel, Guardrails, no_model
from safety_svc.masks import masks_of
from safety_svc.metrics import STREAMS
from safety_svc.policy import Hit, PolicyError, SafetyPolicy
from safety_svc.policy_file import PolicyFile
from safety_svc.rule_modes import Mode, UnknownGuardrailError
from safety_svc.rule_plugins import RuleFailedError
from safety_svc.screen import CHARS_PER_SLICE, AnswerScreener, check_long_prompt

log = structlog.get_logger()


SERVICE_NAME: Final = safety_service_pb2.DESCRIPTOR.services_by_name["SafetyService"].full_name
MAX_TEXTS: Final = 256
MAX_TEXTS_CHARS: Final = 2**20
STOP_GRACE_SECONDS: Final = 1.0
TAKE_OVER_SECONDS: Final = 0.5
"""How long a successor that waits for this process to stop may take until it listens on the shared port."""


class SafetyServicer(safety_service_pb2_grpc.SafetyServiceServicer):
    """Implements the RPCs of SafetyService."""

    def __init__(self, policy_file: PolicyFile, mask_key: bytes = b"", audit: Audit | None = None) -> None:
        """`mask_key` is the fabric's; without one, placeholders are those of this process."""
        self._policy_file = policy_file
        self._audit = audit or Audit()
        self._guardrails = Guardrails()
        self._mask_key = hmac.digest(mask_key or os.urandom(32), b"kvloom masks", "sha256")
        self._connections: set[ScreenConnection] = set()

    def close(self) -> None:
        """Ask guardrails nothing more."""
        self._guardrails.close()

    async def drain(self) -> None:
        """Ask all routers to connect to another safety service."""
        await asyncio.gather(*(connection.drain() for connection in self._connections))

    async def Classify(  # noqa: N802  (gRPC's name)
        self,
        request: safety_service_pb2.ClassifyRequest,
        context: grpc.aio.ServicerContext[safety_service_pb2.ClassifyRequest, safety_service_pb2.ClassifyResponse],
    ) -> safety_service_pb2.ClassifyResponse:
        if len(request.texts) > MAX_TEXTS or sum(map(len, request.texts)) > MAX_TEXTS_CHARS:
            message = f"At most {MAX_TEXTS} texts, with {MAX_TEXTS_CHARS} characters in all, are classified at a time."
            await abort(context, KvloomError(ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, message, field="texts"))
        policy = self._policy_file.current
        try:
            if request.HasField("mask"):
                found = (
                    asyncio.to_thread(masks_of, policy, text, request.mask, self._mask_key) for text in request.texts
                )
                results = [safety_service_pb2.Classification(masks=await masks) for masks in found]
            elif request.HasField("check"):
                results = await self._judged(policy, request, context)
            else:
                results = [
                    safety_service_pb2.Classification(categories=sorted(await broken_categories(policy, text)))
                    for text in request.texts
                ]
        except RuleFailedError:
            await abort(context, _rule_failed())
        return safety_service_pb2.ClassifyResponse(
            results=results, categories=policy.categories, policy_revision=policy.revision
        )

    async def _judged(
        self, policy: SafetyPolicy, request: safety_service_pb2.ClassifyRequest, context: Any
    ) -> list[safety_service_pb2.Classification]:
        """Raises RuleFailedError."""
        wish, results = request.check, list[safety_service_pb2.Classification]()
        try:
            policy.scopes.check(wish.tenant, wish.guardrails)
        except UnknownGuardrailError as error:
            message = f"guardrails: there is no {str(error)[:128]!r} that this caller may name."
            await abort(context, invalid_argument(message, "guardrails"))
        common = self._mask_key, self._guardrails, self._ask_model(), self._audit
        for text in request.texts:
            result, hit = await judged(policy, text, wish, *common)
            if hit is not None and hit.is_failure:
                raise RuleFailedError
            results.append(result)
        return results

    def _ask_model(self) -> AskModel:
        """By any router that is connected."""
        return next((connection.ask_model for connection in self._connections), no_model)

    async def Screen(  # noqa: N802  (gRPC's name)
        self,
        request_iterator: object,  # noqa: ARG002  (frames are read through the context)
        context: grpc.aio.ServicerContext[safety_service_pb2.ScreenRequest, safety_service_pb2.ScreenResponse],
    ) -> None:
        with STREAMS.track_inprogress():
            connection = ScreenConnection(self._policy_file, context, self._audit, self._guardrails)
            self._connections.add(connection)
            try:
                await connection.serve()
            finally:
                self._connections.discard(connection)


def _rule_failed() -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_SAFETY_UNAVAILABLE, "A rule of the safety policy cannot be applied.")


async def serve(
    config: KvloomConfig,
    port: int,
    metrics: MetricsExporter | NoMetrics,
    trust: FabricTrust,
    *,
    shares_port: bool = False,
    name: str = "safety",
) -> None:
    """Serve until SIGTERM. With `shares_port`, other processes may listen on the same port (SO_REUSEPORT), so that a
    successor takes over without a gap. Raises StartError."""
    try:
        policy_file = PolicyFile(config.safety.policy_file)
        tracer = open_tracer(config.tracing, "safety", name)
        audit = Audit.at(config.safety, name, tracer)
    except PolicyError as error:
        raise StartError(str(error)) from error
    except OSError as error:
        raise StartError(f"safety.audit_dir: {error.strerror}") from error
    stopping = stop_event()
    server = grpc.aio.server(options=sharing_port(SERVER_OPTIONS) if shares_port else SERVER_OPTIONS)
    servicer = SafetyServicer(policy_file, trust.cache_key, audit)
    safety_service_pb2_grpc.add_SafetyServiceServicer_to_server(servicer, CheckedServer(server, trust.may_call))
    health = add_health_and_reflection(server, [SERVICE_NAME], with_reflection=config.fabric.reflection)
    address = bind(server, fabric_host(config, config.safety.host), port, trust.add_port)
    local = LocalServer(lambda stream: servicer.Screen(None, stream), safety_service_pb2.ScreenRequest)
    await local.start(address)
    await server.start()
    await set_serving(health, [SERVICE_NAME], serving=True)
    log.info("safety_started", address=address, policy_revision=policy_file.current.revision)
    try:
        await serve_announced(
            config, "safety", name, address, metrics, trust, stopping, policy_file, *filter(None, (tracer,))
        )
    except StartError:
        await asyncio.gather(server.stop(None), local.stop(0.0))
        raise
    await set_serving(health, [SERVICE_NAME], serving=False)
    grace_seconds = config.fabric.drain_timeout_seconds if shares_port else STOP_GRACE_SECONDS
    # Both servers reject new streams from now on. Existing streams are served until the routers close them or the grace
    # period ends.
    stopping_servers = asyncio.gather(server.stop(grace_seconds), local.stop(grace_seconds))
    if shares_port:
        await asyncio.sleep(TAKE_OVER_SECONDS)
        await servicer.drain()
    await stopping_servers
    servicer.close()
    audit.close()


async def judged(
    policy: SafetyPolicy,
    text: str,
    wish: CheckWish,
    mask_key: bytes,
    guardrails: Guardrails,
    ask_model: AskModel,
    on_found: Callable[[Found], None],
) -> tuple[Classification, Hit | None]:
    """Return the passages to be hidden in the text, and the hit that forbids it nevertheless. Raises
    RuleFailedError."""
    names = request_fields(request_id=wish.request_id, tenant=wish.tenant)
    target = "answer" if wish.is_answer else "prompt"
    masks: list[Mask] = []
    if wish.is_answer:
        hit, flagged = await _judged_answer(policy, text, wish)
    else:
        hidden_for = MaskWish(tenant=wish.tenant, conversation=wish.conversation, guardrails=wish.guardrails)
        masks = await asyncio.to_thread(masks_of, policy, text, hidden_for, mask_key)
        text = with_placeholders(text, masks)
        judge = prompt_judge(policy, wish.tenant, wish.guardrails)
        hit = await check_long_prompt(policy.prompt, text, judge)
        if hit is None and policy.guardrails:
            hit = await guardrails.judge(policy, text, judge, names, ask_model)
        flagged = judge.flagged
    for rule, mode in flagged.items():
        on_found(Found(target, rule, False, policy.revision, names, needs_review=mode == "review"))
    if hit is None:
        return Classification(masks=masks), None
    if not hit.is_failure:
        excerpt = "" if wish.is_answer else excerpt_of(text, hit)
        on_found(Found(target, hit.rule.name, True, policy.revision, names, excerpt=excerpt))
    return Classification(masks=masks, finding=finding(hit)), hit


async def _judged_answer(policy: SafetyPolicy, text: str, wish: CheckWish) -> tuple[Hit | None, dict[str, Mode]]:
    scope = policy.scopes.of(wish.tenant, wish.guardrails)
    screener = AnswerScreener(policy.answer, policy.watched_answer, scope)
    for start in range(0, len(text), CHARS_PER_SLICE):
        screener.push(text[start : start + CHARS_PER_SLICE])
        if screener.hit is not None:
            break
        await asyncio.sleep(0)
    else:
        screener.close()
    return screener.hit, screener.flagged
