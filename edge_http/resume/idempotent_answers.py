"""Whole answers to requests with an idempotency key: who repeats the request gets the same answer, and no second one.

The answer is made by a task of its own. A repeat that arrives meanwhile waits for the same answer. If all clients have
disconnected, the task continues for the grace period of resumable streams. A complete answer is kept for a limited
time, within a limit on the memory of all of them. An error is sent to those who wait, and not kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple

import structlog

from edge_http.resume.response_name import ResponseName
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.limits.address_limit import KeyedCounts
from kvloom_common.limits.byte_budget import CALLER_SHARE, ByteLease
from kvloom_common.replay.reader_slot import GraceTimer
from kvloom_common.replay.stream_retention import ResumeSettings

log = structlog.get_logger()

OVERHEAD_BYTES: Final = 2048
"""The memory that a kept answer takes besides its body; counting it bounds many small answers too."""


class WholeBody(NamedTuple):
    """A complete response body."""

    pieces: Sequence[bytes | bytearray]
    num_bytes: int
    headers: Mapping[str, str]


class IdempotentAnswer:
    """One answer, from the request for it until it is forgotten."""

    __slots__ = ("body", "ended", "error", "lease", "name", "num_waiters", "task", "timer")

    def __init__(self, name: ResponseName, lease: ByteLease, task: asyncio.Task[WholeBody]) -> None:
        self.name = name
        self.lease: ByteLease | None = lease
        """The answer's part of the memory for answers that are made or sent; None once it is given back."""
        self.task = task
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.body: WholeBody | None = None
        self.error: KvloomError | None = None
        """Why there is no body; None while the answer is made."""
        self.num_waiters = 0
        self.timer: GraceTimer | None = None
        """Runs while no client waits for a running answer, and while a complete one is kept."""

    @property
    def num_bytes(self) -> int:
        return OVERHEAD_BYTES + (self.body.num_bytes if self.body is not None else 0)


class IdempotentAnswers:
    """It lives on the event loop and owns the tasks of its answers."""

    def __init__(self, config: ResumeSettings) -> None:
        self._config = config
        self._answers: dict[str, IdempotentAnswer] = {}
        """All that can be found, by response id."""
        self._by_key: dict[tuple[str, str], IdempotentAnswer] = {}
        self._complete: OrderedDict[IdempotentAnswer, None] = OrderedDict()
        """Complete answers, the oldest first."""
        self._complete_of_callers: dict[str, OrderedDict[IdempotentAnswer, None]] = {}
        """The same, by caller."""
        self._num_bytes_of_callers = KeyedCounts[str]()
        self.num_bytes = 0
        """The bytes of the complete answers."""

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, response_id: str, caller: bytes) -> IdempotentAnswer | None:
        """Returns None whether there is none or it is another caller's: clients cannot find out which."""
        answer = self._answers.get(response_id)
        if answer is None or not hmac.compare_digest(answer.name.caller, caller):
            return None
        return answer

    def find_by_key(self, tenant: str, idempotency_key: str) -> IdempotentAnswer | None:
        return self._by_key.get((tenant, idempotency_key))

    def begin(
        self, name: ResponseName, lease: ByteLease, job: Coroutine[Any, Any, WholeBody], on_done: Callable[[], None]
    ) -> IdempotentAnswer:
        """Let `job` make the answer that `name`, which has a key, stands for from now on. `on_done` is called when the
        job has ended."""
        answer = IdempotentAnswer(name, lease, asyncio.create_task(job, name=f"response {name.id}"))
        self._answers[name.id] = answer
        self._by_key[name.tenant, name.idempotency_key] = answer

        def on_task_done(task: asyncio.Task[WholeBody]) -> None:
            on_done()
            self._on_ended(answer, task)

        answer.task.add_done_callback(on_task_done)
        return answer

    @contextlib.asynccontextmanager
    async def attend(self, answer: IdempotentAnswer) -> AsyncIterator[WholeBody]:
        """Wait for the end of the answer. Its memory counts until the end of the `async with` block. Raises the
        KvloomError that it ended with."""
        answer.num_waiters += 1
        if not answer.ended.done():
            self._stop_timer(answer)
        try:
            await asyncio.shield(answer.ended)
            if answer.error is not None:
                raise answer.error.with_traceback(None)
            assert answer.body is not None
            yield answer.body
        finally:
            answer.num_waiters -= 1
            if not answer.num_waiters:
                self._on_unattended(answer)

    async def close(self) -> None:
        """End all answers; those that still run are cancelled in the engine too."""
        answers = list(self._answers.values())
        for answer in answers:
            answer.task.cancel()
        await asyncio.gather(*(answer.task for answer in answers), return_exceptions=True)
        for answer in answers:
            self._forget(answer)
            self._give_back(answer)

    def _on_unattended(self, answer: IdempotentAnswer) -> None:
        if answer.ended.done():
            self._give_back(answer)
        else:
            answer.timer = GraceTimer(self._config.grace_seconds, lambda: self._abandon(answer))
            answer.timer.start()

    def _abandon(self, answer: IdempotentAnswer) -> None:
        answer.task.cancel()

    def _on_ended(self, answer: IdempotentAnswer, task: asyncio.Task[WholeBody]) -> None:
        self._stop_timer(answer)
        try:
            answer.body = task.result()
        except KvloomError as error:
            answer.error = error
        except asyncio.CancelledError:
            answer.error = KvloomError(ErrorReason.ERROR_REASON_CANCELLED, "The request was cancelled.")
        except Exception:
            log.exception("request_broke")
            answer.error = KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "Something went wrong on our side.")
        answer.ended.set_result(None)
        config = self._config
        is_kept = answer.body is not None and answer.body.num_bytes <= config.max_response_bytes
        if is_kept and config.idempotency_seconds and self._answers.get(answer.name.id) is answer:
            self._keep(answer)
        else:
            self._forget(answer)
        if not answer.num_waiters:
            self._give_back(answer)

    def _keep(self, answer: IdempotentAnswer) -> None:
        caller = answer.name.tenant
        self._complete[answer] = None
        self._complete_of_callers.setdefault(caller, OrderedDict())[answer] = None
        self.num_bytes += answer.num_bytes
        self._num_bytes_of_callers.add(caller, answer.num_bytes)
        answer.timer = GraceTimer(self._config.idempotency_seconds, lambda: self._forget(answer))
        answer.timer.start()
        max_bytes = self._config.max_kept_answer_bytes
        while caller and self._num_bytes_of_callers[caller] > max_bytes * CALLER_SHARE:
            self._forget(next(iter(self._complete_of_callers[caller])))
        while self.num_bytes > max_bytes:
            self._forget(next(iter(self._complete)))

    def _forget(self, answer: IdempotentAnswer) -> None:
        """No client can find it any more. Those that read it have its body."""
        name = answer.name
        self._stop_timer(answer)
        if self._answers.get(name.id) is answer:
            del self._answers[name.id]
        if self._by_key.get((name.tenant, name.idempotency_key)) is answer:
            del self._by_key[name.tenant, name.idempotency_key]
        if answer in self._complete:
            del self._complete[answer]
            of_caller = self._complete_of_callers[name.tenant]
            del of_caller[answer]
            if not of_caller:
                del self._complete_of_callers[name.tenant]
            self.num_bytes -= answer.num_bytes
            self._num_bytes_of_callers.remove(name.tenant, answer.num_bytes)

    def _give_back(self, answer: IdempotentAnswer) -> None:
        if answer.lease is not None:
            answer.lease.release()
            answer.lease = None

    def _stop_timer(self, answer: IdempotentAnswer) -> None:
        if answer.timer is not None:
            answer.timer.close()
            answer.timer = None
