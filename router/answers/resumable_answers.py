"""The resumable answers of this router: who may find them, how long they are kept, and how much of them."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable
from typing import Final
from urllib.parse import quote

import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import GenerateRequest
from kvloom_common.process.request_context import request_fields
from kvloom_common.replay.stream_retention import ResumeSettings, StreamRetention
from router import metric_table as table
from router.answers.named_calls import NamedCalls, name_of
from router.answers.resumable_answer import AnswerName, ResumableAnswer
from router.caller_scope import TRUSTED, CallerScope
from router.core.events import ClientGone, RequestArrived
from router.core_driver import CoreDriver
from router.partial_choices import num_wanted_choices
from router.prompt_checks import MAX_NAME_CHARS
from router.request_builder import new_request_id
from router.request_validator import RequestValidator, seed_of

log = structlog.get_logger()

MIN_TOKEN_CHARS: Final = 16
DRAWN_TOKEN_BYTES: Final = 24
MAX_EVENTS: Final = 2**62
"""No answer has as many."""

_numbers = itertools.count(1)


class ResumeMetrics:
    """The metrics of resumable answers, which are updated once for each answer, never for each response."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._resumed = table.RESUMED_STREAMS.series(registry)
        self._replayed = table.REPLAYED_RESPONSES.series(registry)
        self._expired = table.EXPIRED_ANSWERS.series(registry)
        self._evicted = table.EVICTED_ANSWERS.series(registry)
        self._unclaimed = table.UNCLAIMED_RESPONSES.series(registry)

    def watch(
        self, num_kept: Callable[[], float], num_unattended: Callable[[], float], num_bytes: Callable[[], float]
    ) -> None:
        table.RESUMABLE_ANSWERS.watch(self._registry, num_kept)
        table.UNATTENDED_ANSWERS.watch(self._registry, num_unattended)
        table.RESUME_BYTES.watch(self._registry, num_bytes)

    def on_resumed(self, num_replayed: int) -> None:
        self._resumed.inc()
        self._replayed.inc(num_replayed)

    def on_expired(self, num_unclaimed: int) -> None:
        self._expired.inc()
        self._unclaimed.inc(num_unclaimed)

    def on_evicted(self) -> None:
        self._evicted.inc()


class ResumableAnswers:
    """It lives on the event loop and owns the tasks that admit requests."""

    def __init__(
        self,
        config: ResumeSettings,
        dispatcher: CoreDriver,
        intake: RequestValidator,
        named_calls: NamedCalls,
        metrics: ResumeMetrics,
        router_id: str,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._intake = intake
        self._named_calls = named_calls
        self.metrics = metrics
        self.router_id = router_id
        self.address = ""
        """host:port where only this router listens."""
        self._answers: dict[str, ResumableAnswer] = {}
        self._admissions: dict[ResumableAnswer, asyncio.Task[None]] = {}
        self._retention: StreamRetention[ResumableAnswer] = StreamRetention(config, self._remove, metrics.on_evicted)
        metrics.watch(
            lambda: len(self._answers), lambda: self._retention.num_unattended, lambda: self._retention.num_bytes
        )

    def is_wanted(self, request: GenerateRequest) -> bool:
        """True when its answer is to be resumable."""
        wanted = request.resumable if request.HasField("resumable") else self._config.by_default
        return wanted and self._config.grace_seconds > 0

    def begin(
        self,
        request: GenerateRequest,
        caller: str,
        traceparent: str,
        scope: CallerScope = TRUSTED,
        client_request_id: str = "",
    ) -> ResumableAnswer:
        """Open the answer of a request. `caller`: see `owner_of`. Raises KvloomError
        (INVALID_ARGUMENT, DUPLICATE_REQUEST_ID)."""
        request_id = request.request_id or new_request_id()
        if len(request_id) > MAX_NAME_CHARS:
            message = f"request_id has {len(request_id)} characters; at most {MAX_NAME_CHARS}."
            raise invalid_argument(message, "request_id")
        if request.starting_after and not (request.partial_choices and request.starting_after <= MAX_EVENTS):
            message = "starting_after belongs to partial_choices, and is the event_number of a response."
            raise invalid_argument(message, "starting_after")
        token = _checked_token(request.resume_token) if request.resume_token else self._draw_token()
        key = name_of(request_id, token, caller)
        if key in self._answers:
            message = f"A request named {request_id[:MAX_NAME_CHARS]!r} is still kept: resume it."
            raise KvloomError(ErrorReason.ERROR_REASON_DUPLICATE_REQUEST_ID, message, field="request_id")
        answer = ResumableAnswer(
            AnswerName(key, request_id, token, f"resumable#{next(_numbers)}"),
            num_wanted_choices(request),
            self._retention.new_log(request.starting_after),
            self._config.grace_seconds,
            self._retention.on_left,
            self._on_abandoned,
            self._on_ended,
            has_output=any(choice.token_ids for choice in request.partial_choices),
        )
        self._named_calls.open(key, answer.name.client_id, lambda: self._on_settled(answer))
        answer.is_known_to_client = bool(request.resume_token)
        self._answers[key] = answer
        self._retention.add(answer)
        named = GenerateRequest()
        named.CopyFrom(request)
        named.request_id = request_id
        admission = self._admit(answer, named, traceparent, scope, client_request_id)
        task = asyncio.create_task(admission, name=f"intake {request_id}")
        self._admissions[answer] = task
        task.add_done_callback(lambda _: self._admissions.pop(answer, None))
        return answer

    def find(self, request_id: str, token: str, caller: str) -> ResumableAnswer:
        """Raises KvloomError (NOT_FOUND) whether there is none or it is another caller's: clients cannot find out
        which."""
        answer = self._answers.get(name_of(request_id, token, caller))
        if answer is None:
            raise self._not_kept(token)
        return answer

    def end_running(self) -> None:
        """The router stops: running answers end with an error that their readers receive."""
        for answer in list(self._answers.values()):
            answer.end(
                KvloomError(ErrorReason.ERROR_REASON_DRAINING, "The router has stopped.", retry_after_seconds=1.0)
            )

    async def close(self) -> None:
        """Forget all answers; running ones are cancelled in the engine too."""
        admissions = list(self._admissions.values())
        for task in admissions:
            task.cancel()
        await asyncio.gather(*admissions, return_exceptions=True)
        self.end_running()
        for answer in list(self._answers.values()):
            self._remove(answer)

    async def _admit(
        self,
        answer: ResumableAnswer,
        request: GenerateRequest,
        traceparent: str,
        scope: CallerScope,
        client_request_id: str,
    ) -> None:
        """Tokenize and submit the request, whether or not its RPC lasts that long."""
        client_id = answer.name.client_id
        try:
            accepted = await self._intake.accept_generate(request, client_id, traceparent, scope, client_request_id)
        except KvloomError as error:
            self._dispatcher.request_refused(error)
            answer.end(error)
            return
        except Exception:
            names = request_fields(request.request_id, client_request_id, traceparent)
            log.exception("request_intake_failed", **names)
            answer.end(KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "The router failed on this request."))
            return
        if not answer.ended:
            answer.seed = seed_of(accepted.request)
            answer.chosen_model = accepted.chosen_model
            answer.output, answer.guide_field = accepted.output, accepted.guide_field
            self._dispatcher.add_client(client_id, answer)
            self._dispatcher.dispatch(RequestArrived(accepted.request))

    def _on_ended(self, answer: ResumableAnswer) -> None:
        client_id = answer.name.client_id
        self._dispatcher.remove_client(client_id)
        self._dispatcher.dispatch(ClientGone(client_id))
        self._named_calls.close(answer.name.key, client_id)
        if answer.error is not None and not answer.has_responses:
            self._remove(answer)  # refused: the same request may succeed when it is repeated
        else:
            self._retention.on_ended(answer)

    def _on_abandoned(self, answer: ResumableAnswer) -> None:
        if not answer.ended:
            self.metrics.on_expired(answer.num_unclaimed)
            answer.end(KvloomError(ErrorReason.ERROR_REASON_CANCELLED, "The client did not come back."))
        self._remove(answer)

    def _on_settled(self, answer: ResumableAnswer) -> None:
        """Its client has continued the answer at another router, and will not come back."""
        answer.end(KvloomError(ErrorReason.ERROR_REASON_CANCELLED, "The client has gone on at another router."))
        self._remove(answer)

    def _remove(self, answer: ResumableAnswer) -> None:
        if self._answers.pop(answer.name.key, None) is not None:
            self._retention.discard(answer)
            answer.close()

    def _draw_token(self) -> str:
        """The token names this router, so that another router can point the client to it."""
        return f"{quote(self.router_id, safe='')}.{secrets.token_urlsafe(DRAWN_TOKEN_BYTES)}"

    def _not_kept(self, token: str) -> KvloomError:
        message = (
            "There is no such answer, or it is no longer kept: only answers begun as resumable can be taken up again, "
            f"only for a limited time and at the router that began them; this is router {self.router_id!r}"
        )
        router_id, separator, _ = token.partition(".")
        if separator and router_id != quote(self.router_id, safe=""):
            message += f", the token is of router {router_id[:MAX_NAME_CHARS]!r}"
        return KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, f"{message}.", field="request_id")


def _checked_token(token: str) -> str:
    if not (MIN_TOKEN_CHARS <= len(token) <= MAX_NAME_CHARS and token.isascii() and token.isprintable()):
        message = f"resume_token must be {MIN_TOKEN_CHARS} to {MAX_NAME_CHARS} printable ASCII characters."
        raise invalid_argument(message, "resume_token")
    return token
