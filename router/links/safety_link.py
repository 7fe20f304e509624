"""The router's end of the safety service: moderation by request, and the data plane, `SafetyService.Screen`, which is
kept up as long as the router runs.

When a service announces that it drains, the link moves to its successor (a new stream to the same address, or else to
another service of the fleet) without a gap. New prompts and answers go to the successor at once. A running answer moves
as soon as the old service has cleared all of its text. The old stream ends when no verdict is outstanding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import grpc
import structlog

from kvloom.errors import KvloomError, invalid_argument
from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1 import safety_service_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import ModerateRequest, ModerateResponse
from kvloom.v1.safety_service_pb2 import ClassifyRequest
from kvloom_common.access.exposure import is_loopback
from kvloom_common.addresses import join_address
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.announcer import fabric_host
from kvloom_common.discovery.process_finder import ProcessFinder
from kvloom_common.process.cancellation import raise_if_cancelled
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from kvloom_common.trust.seal import PLAIN, Sealer
from router import convert
from router.core.actions import CheckPrompt, ScreenAnswers
from router.core.events import SafetyDown, SafetyUp
from router.core_driver import CoreDriver
from router.links.prompt_filter import PromptFilter
from router.links.reconnect import LinkError, cause_of, reconnect_backoff
from router.links.safety_stream import SafetyStream

log = structlog.get_logger()


_BREAKS = (grpc.aio.AioRpcError, asyncio.InvalidStateError, LinkError, KvloomError, TimeoutError)

LONGEST_PAUSE_SECONDS: Final = 0.4
"""The longest pause between connection attempts. Answers are held meanwhile, for at most `safety.patience_seconds`."""


RETRY_SECONDS: Final = 1.0
_CALLERS_FAULTS: Final = (ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, ErrorReason.ERROR_REASON_INVALID_ARGUMENT)


class QuestionSink(Protocol):
    """Asks models what the service wants to ask them (router/features/judges.py)."""

    def ask(self, question: safety_service_pb2.JudgeQuestion, asker: SafetyStream) -> None: ...

    def forget(self, asker: SafetyStream) -> None:
        """The stream is closed."""
        ...


class SafetyLink:
    """The connection to a safety service. `run` is its only task."""

    def __init__(
        self,
        candidates: Callable[[], Sequence[str]],
        driver: CoreDriver,
        trust: FabricTrust = NO_SECRET,
        *,
        answers_are_gated: bool = False,
    ) -> None:
        """`candidates` returns the addresses to try, the first one first. `answers_are_gated`: so the core searches
        what is new in them (see PrefilteredAnswers)."""
        self._answers_are_gated = answers_are_gated
        self._candidates = candidates
        self._driver = driver
        self._trust = trust
        self.judges: QuestionSink | None = None
        """Asks the models that the service wants to ask. It is set before `run`; None: there are none."""
        self.tried = asyncio.Event()
        """Set once the core knows that the service is up, or it could not be reached."""
        self._current: SafetyStream | None = None
        self._draining_streams: list[SafetyStream] = []
        """Streams that a successor has replaced and that still have verdicts outstanding."""
        self._drain_announced = asyncio.Event()
        """Set when the current stream's service announces that it drains."""

    @property
    def screens_prompts(self) -> bool:
        """True when the service needs prompts' text. This is True while the policy is not known."""
        return self._current is None or self._current.policy.screens_prompts

    @property
    def policy_revision(self) -> str | None:
        """The revision of the policy in force; None while it is not known."""
        return None if self._current is None else self._current.policy.revision

    async def classify(self, request: safety_service_pb2.ClassifyRequest) -> safety_service_pb2.ClassifyResponse:
        """Names the categories of the policy to which texts belong, or what is to be hidden or is forbidden in them.
        Raises KvloomError (SAFETY_UNAVAILABLE, REQUEST_TOO_LARGE, INVALID_ARGUMENT)."""
        if self._current is None:
            raise safety_unavailable()
        try:
            return await self._current.classify(request)
        except grpc.aio.AioRpcError as error:
            known = from_rpc_error(error)
            if known.reason in _CALLERS_FAULTS:
                raise known from error
            raise safety_unavailable() from error
        except grpc.aio.UsageError as error:  # its channel was closed before the call,
            raise safety_unavailable() from error
        except asyncio.CancelledError as error:  # or during it, since the stream has broken
            raise_if_cancelled()
            raise safety_unavailable() from error

    async def run(self) -> None:
        """Runs until it is cancelled."""
        backoff = reconnect_backoff(LONGEST_PAUSE_SECONDS)
        while True:
            started = self._driver.now()
            try:
                await self._serve_connections()
            except _BREAKS as error:
                log.warning("safety_link_broke", cause=cause_of(error))
            except Exception:
                log.exception("safety_link_failed")
            raise_if_cancelled()
            self.tried.set()
            await asyncio.sleep(backoff.next_seconds(self._driver.now() - started))

    # -- SafetySink ---------------------------------------------------------------------------------------------------

    def check_prompt(self, check: CheckPrompt) -> None:
        if self._current is not None:
            self._current.check_prompt(check)

    def screen_answers(self, answers: ScreenAnswers) -> None:
        current = self._current
        if current is None:
            return
        for stream in self._draining_streams:
            answers, still_there = _split(answers, stream)
            self._screen(stream, still_there)
        self._screen(current, answers)

    def _screen(self, stream: SafetyStream, answers: ScreenAnswers) -> None:
        cleared = stream.answers.take(
            answers.slots, answers.deltas, answers.close_slots, stream.outgoing, answers.skips, answers.scopes
        )
        if stream.outgoing:
            stream.flush(sum(map(len, answers.deltas)), stream.outgoing.close_slots)
        if cleared is not None:
            self._driver.dispatch(cleared)  # It is handled after the current event.

    # -- connections --------------------------------------------------------------------------------------------------

    async def _serve_connections(self) -> None:
        """Serves one stream after the other, each the successor of the last. Raises when a stream in use breaks."""
        stream = await self._open()
        self._drain_announced.clear()
        self._driver.set_safety(self)
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                tasks.add(asyncio.create_task(self._serve(stream), name="safety stream"))
                self._switch_to(stream)
                stream = await self._successor(tasks)
        finally:
            self._current = None
            self._draining_streams.clear()
            for task in tasks:
                task.cancel()
            self._driver.set_safety(None)
            self._driver.dispatch(SafetyDown())
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _successor(self, tasks: set[asyncio.Task[None]]) -> SafetyStream:
        """Returns a stream to the next service once the current one drains and the next one is up. Raises what breaks
        a stream in use."""
        opening = asyncio.create_task(self._open_successor(), name="safety successor")
        try:
            while not opening.done():
                done, _ = await asyncio.wait({opening, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                for task in done & tasks:
                    tasks.discard(task)
                    task.result()
            return opening.result()
        except BaseException:
            opening.cancel()
            (opened,) = await asyncio.gather(opening, return_exceptions=True)
            if isinstance(opened, SafetyStream):
                await opened.close()
            raise

    async def _open_successor(self) -> SafetyStream:
        await self._drain_announced.wait()
        self._drain_announced.clear()
        backoff = reconnect_backoff()
        while True:
            try:
                return await self._open()
            except _BREAKS as error:
                log.info("safety_successor_awaited", cause=cause_of(error))
            await asyncio.sleep(backoff.next_seconds(0.0))

    async def _open(self) -> SafetyStream:
        """A stream to the first service that accepts one. Raises what the last one failed with."""
        failure: BaseException = LinkError("no safety service is known")
        for address in self._candidates():
            try:
                return await SafetyStream.open(address, self._trust, answers_are_searched=self._answers_are_gated)
            except _BREAKS as error:
                raise_if_cancelled()
                failure = error
        raise failure

    def _switch_to(self, stream: SafetyStream) -> None:
        old, self._current = self._current, stream
        if old is not None:
            self._draining_streams.append(old)
            old.hand_over_to(stream)
        self._report_policy(stream)
        self.tried.set()
        log.info("safety_link_opened", address=stream.address, policy_revision=stream.policy.revision)

    async def _serve(self, stream: SafetyStream) -> None:
        """Returns when the stream has been replaced and is done, and raises when it breaks."""
        writer = asyncio.create_task(stream.write_frames(), name="safety writer")
        try:
            while not stream.is_done:
                self._on_frame(stream, await stream.read())
        except (*_BREAKS, asyncio.CancelledError):  # gRPC cancels the reader of a cancelled call.
            raise_if_cancelled()
            if not stream.is_done:
                raise
        finally:
            if stream in self._draining_streams:
                self._draining_streams.remove(stream)
            writer.cancel()
            stream.is_closed = True
            if self.judges is not None:
                self.judges.forget(stream)
            await asyncio.gather(writer, stream.close(), return_exceptions=True)

    def _on_frame(self, stream: SafetyStream, frame: safety_service_pb2.ScreenResponse) -> None:
        if frame.HasField("policy"):
            stream.take_policy(frame.policy)
            if stream is self._current:
                self._report_policy(stream)
        stream.note(frame)
        for question in frame.judge_questions:
            if self.judges is not None:
                self.judges.ask(question, stream)
        for verdict in frame.prompts:
            self._driver.dispatch(convert.verdict_from_proto(verdict))
        if frame.slots or frame.halts or frame.closed_slots or frame.flagged_slots:
            self._driver.dispatch(convert.screened_from_proto(frame))
        if stream.is_replaced and self._current is not None:
            stream.hand_over_to(self._current)
        if frame.draining and stream is self._current:
            self._drain_announced.set()

    def _report_policy(self, stream: SafetyStream) -> None:
        policy = stream.policy
        prefilter, prompt_filter = stream.answers.prefilter, PromptFilter.from_policy(policy)
        self._driver.dispatch(SafetyUp(policy.screens_prompts, policy.screens_answers, prefilter, prompt_filter))


def safety_unavailable() -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_SAFETY_UNAVAILABLE,
        "The safety service cannot be reached.",
        retry_after_seconds=RETRY_SECONDS,
    )


def _split(answers: ScreenAnswers, replaced: SafetyStream) -> tuple[ScreenAnswers, ScreenAnswers]:
    """Returns (answers of other streams, answers that the replaced stream still screens)."""
    own = replaced.answers
    entries = list(zip(answers.slots, answers.deltas, strict=True))
    parts = [
        ScreenAnswers(
            slots=[slot for slot, _ in entries if (slot in own) == is_own],
            deltas=[delta for slot, delta in entries if (slot in own) == is_own],
            close_slots=[slot for slot in answers.close_slots if (slot in own) == is_own],
            skips=[skip for skip in answers.skips if (skip[0] in own) == is_own],
            scopes=[scope for scope in answers.scopes if (scope[0] in own) == is_own],
        )
        for is_own in (False, True)
    ]
    return parts[0], parts[1]


def safety_finder(config: KvloomConfig, router_id: str, sealer: Sealer = PLAIN) -> ProcessFinder:
    """Finds the service of this machine first, and then those of others."""
    # The service of this machine listens where its fabric does; a configured one may be on another machine.
    host = fabric_host(config, config.safety.host) if is_loopback(config.safety.host) else config.safety.host
    configured = join_address(host, config.safety.port) if config.safety.port else ""
    return ProcessFinder(config.redis if config.safety.discover else None, "safety", router_id, configured, sealer)


class ModerationLink:
    """Asks the safety service. Nothing is blocked: the caller learns what the policy says."""

    def __init__(self, safety: SafetyLink | None) -> None:
        """`safety` is None when none is configured."""
        self._safety = safety

    async def moderate(self, request: ModerateRequest) -> ModerateResponse:
        """Raises KvloomError (INVALID_ARGUMENT, SAFETY_UNAVAILABLE, REQUEST_TOO_LARGE)."""
        if not request.texts:
            raise invalid_argument("texts must hold at least one text.", "texts")
        if self._safety is None:
            message = "This fabric has no safety service, which moderations need (docs/operate/safety.md)."
            raise KvloomError(ErrorReason.ERROR_REASON_SAFETY_UNAVAILABLE, message)
        wanted = ClassifyRequest(texts=request.texts)
        if request.HasField("mask"):
            wanted.mask.CopyFrom(request.mask)
        if request.HasField("check"):
            wanted.check.CopyFrom(request.check)
        found = await self._safety.classify(wanted)
        return ModerateResponse(
            results=found.results, categories=found.categories, policy_revision=found.policy_revision
        )
