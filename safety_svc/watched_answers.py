"""Whole answers, for guardrails and models that only watch: they are judged once they have ended, and what is found is
noted. Nothing is withheld for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvloom_common.process.access_log import FailureLog
from safety_svc.guardrails import AskModel, Guardrails
from safety_svc.policy import SafetyPolicy
from safety_svc.rule_modes import WATCHING, Judge, Mode, Scope

MAX_ANSWER_CHARS: Final = 262_144
MAX_CHARS: Final = 32 * 2**20
"""The limit for all answers of one router together. An answer beyond it is not judged, which the log says."""
MAX_JUDGED: Final = 256
"""So many answers of one router are judged at a time. Further ones are not."""

OnFlag = Callable[[str, Mode], None]


class _Answer:
    __slots__ = ("num_chars", "pieces", "policy", "scope", "tenant")

    def __init__(self, policy: SafetyPolicy, scope: Scope, tenant: str) -> None:
        self.policy = policy
        self.scope = scope
        self.tenant = tenant
        self.pieces: list[str] = []
        self.num_chars = 0


class WatchedAnswers:
    """The answers of one router that are to be judged, by slot."""

    def __init__(self, guardrails: Guardrails, ask_model: AskModel) -> None:
        self._guardrails = guardrails
        self._ask_model = ask_model
        self._answers: dict[int, _Answer] = {}
        self._num_chars = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures = FailureLog("answer_not_judged")

    def begin(self, slot: int, policy: SafetyPolicy, scope: Scope, tenant: str) -> None:
        """An answer has begun."""
        if any(each.rule.name in scope.modes for each in policy.answer_guardrails):
            self._answers[slot] = _Answer(policy, scope, tenant)

    def push(self, slot: int, delta: str) -> None:
        """The next characters."""
        answer = self._answers.get(slot)
        if answer is None:
            return
        answer.pieces.append(delta)
        answer.num_chars += len(delta)
        self._num_chars += len(delta)
        if answer.num_chars > MAX_ANSWER_CHARS or self._num_chars > MAX_CHARS:
            self.drop(slot)
            self._failures.note("too long")

    def drop(self, slot: int) -> None:
        """The answer is not to be judged: it was halted, or a part of it is not known here."""
        answer = self._answers.pop(slot, None)
        if answer is not None:
            self._num_chars -= answer.num_chars

    def end(self, slot: int, on_flag: OnFlag) -> None:
        """Judge an answer that has ended. `on_flag` gets the names and modes of the rules that note something."""
        answer = self._answers.pop(slot, None)
        if answer is None:
            return
        if len(self._tasks) >= MAX_JUDGED or not answer.num_chars:
            self._num_chars -= answer.num_chars
            if answer.num_chars:
                self._failures.note("too many")
            return
        task = asyncio.create_task(self._judge(answer, on_flag), name="watched answer")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _judge(self, answer: _Answer, on_flag: OnFlag) -> None:
        try:
            judge = Judge(answer.scope, WATCHING, {})
            text, names = "".join(answer.pieces), {"tenant": answer.tenant}
            await self._guardrails.judge_answer(answer.policy, text, judge, names, self._ask_model)
            for name, mode in judge.flagged.items():
                on_flag(name, mode)
        finally:
            self._num_chars -= answer.num_chars
