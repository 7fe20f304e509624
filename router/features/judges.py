"""Asks models of the fabric for judgements on texts, in the name of the safety service.

Such a request goes before those of clients, and is not judged itself: it must never wait for what waits for it. No
client gets its answer, so it has no limits, no bill, and no part in what is told of requests.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
import structlog

from kvloom.errors import KvloomError, reason_name
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, SamplingParams
from kvloom.v1.router_service_pb2 import GenerateRequest, Message
from kvloom.v1.safety_service_pb2 import JudgeAnswer, JudgeQuestion
from router.answers.generate import deltas_of
from router.core.actions import FleetChanged
from router.core.events import JUDGE_CLIENT_ID, JUDGE_TIER, ChoiceSpec, RequestArrived, SlotsCancelled
from router.core.fleet.slot_pool import SlotPool
from router.core.frames import Finish, Step
from router.core.priority_classes import PriorityClass
from router.core_driver import CoreDriver
from router.links.safety_stream import SafetyStream
from router.parsed_output import ParsedOutput
from router.request_validator import PreparedRequest, RequestValidator

log = structlog.get_logger()

MAX_QUESTIONS: Final = 1024
"""So many questions are under way at a time. Further ones fail."""
_MAX_ID_CHARS: Final = 256
_GOOD_ENDS: Final = (FINISH_REASON_STOP, FINISH_REASON_LENGTH)


class _Asked:
    """A question under way."""

    __slots__ = ("asker", "number", "output", "text")

    def __init__(self, number: int, asker: SafetyStream, output: ParsedOutput | None) -> None:
        self.number = number
        self.asker = asker
        self.output = output
        self.text = ""


class JudgeDesk:
    """The questions of one router. To the core it is a client (ClientSink) while there are any."""

    def __init__(self, driver: CoreDriver, intake: RequestValidator, priority_class: PriorityClass | None) -> None:
        """`priority_class`: the declared one for judges; None: none is declared."""
        self._driver = driver
        self._intake = intake
        self._priority_class = priority_class
        self._slots = SlotPool()
        self._asked: dict[int, _Asked] = {}
        """By slot."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_asked = 0

    def ask(self, question: JudgeQuestion, asker: SafetyStream) -> None:
        """Answer the question, or say why there is no answer."""
        if len(self._asked) + len(self._tasks) >= MAX_QUESTIONS:
            asker.answer_question(_no_answer(question.question_id, ErrorReason.ERROR_REASON_QUEUE_FULL))
            return
        task = asyncio.create_task(self._ask(question, asker), name="judge question")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, asker: SafetyStream) -> None:
        """The asker is closed."""
        slots = [slot for slot, asked in self._asked.items() if asked.asker is asker]
        if slots:
            self._driver.dispatch(SlotsCancelled(JUDGE_CLIENT_ID, slots))

    async def _ask(self, question: JudgeQuestion, asker: SafetyStream) -> None:
        number = question.question_id
        try:
            prepared = await self._prepared(question)
            if not asker.is_closed:
                self._submit(prepared, number, asker)
        except KvloomError as error:
            asker.answer_question(_no_answer(number, error.reason))
        except Exception:
            log.exception("judge_question_failed", model=question.model)
            asker.answer_question(_no_answer(number, ErrorReason.ERROR_REASON_INTERNAL))

    async def _prepared(self, question: JudgeQuestion) -> PreparedRequest:
        """Raises KvloomError."""
        self._num_asked += 1
        wanted = GenerateRequest(
            request_id=f"{JUDGE_CLIENT_ID}-{self._num_asked}-{question.request_id}"[:_MAX_ID_CHARS],
            model=question.model,
            sampling=SamplingParams(temperature=0.0, seed=0),
            timeout_seconds=question.timeout_seconds,
        )
        if question.wants_embedding:
            wanted.text = question.messages[-1].content if question.messages else ""
            wanted.pooling.SetInParent()
        else:
            messages = [Message(role=each.role, content=each.content) for each in question.messages]
            wanted.conversation.messages.extend(messages)
            wanted.template_options = question.template_options
            wanted.stop.max_tokens = question.max_tokens
        return await self._intake.accept_generate(wanted, JUDGE_CLIENT_ID, tenant=question.tenant)

    def _submit(self, prepared: PreparedRequest, number: int, asker: SafetyStream) -> None:
        if not self._asked:
            self._driver.add_client(JUDGE_CLIENT_ID, self)
        slot = self._slots.allocate()
        self._asked[slot] = _Asked(number, asker, prepared.output)
        request = msgspec.structs.replace(
            prepared.request,
            choices=(ChoiceSpec(slot, 0),),
            prompt_text="",
            guardrails=(),
            tier=JUDGE_TIER,
            priority_class=self._priority_class,
            is_cacheable=False,
            wants_receipt=False,
        )
        try:
            self._driver.dispatch(RequestArrived(request))
        except Exception:
            self._take(slot)
            raise

    # -- ClientSink ---------------------------------------------------------------------------------------------------

    def send_step(self, step: Step) -> None:
        for delta in deltas_of(step):
            asked = self._asked.get(delta.index)
            if asked is not None:
                if asked.output is not None:
                    asked.output.parse([delta])
                asked.text += delta.text
        for finish in step.finishes:
            asked = self._take(finish.slot)
            if asked is not None and not asked.asker.is_closed:
                asked.asker.answer_question(_answer(asked, finish))

    def send_fleet(self, fleet: FleetChanged) -> None:
        """Does nothing: a question does not depend on the fleet's state."""

    def _take(self, slot: int) -> _Asked | None:
        asked = self._asked.pop(slot, None)
        if asked is not None:
            self._slots.free(slot)
            if not self._asked:
                self._driver.remove_client(JUDGE_CLIENT_ID)
        return asked


def _answer(asked: _Asked, finish: Finish) -> JudgeAnswer:
    if finish.reason in _GOOD_ENDS:
        return JudgeAnswer(question_id=asked.number, text=asked.text, embedding=finish.embedding)
    reason = ErrorReason.ERROR_REASON_CANCELLED if finish.error is None else finish.error.reason
    return _no_answer(asked.number, reason)


def _no_answer(number: int, reason: ErrorReason.ValueType) -> JudgeAnswer:
    return JudgeAnswer(question_id=number, error=reason_name(reason))
