"""A safety service that takes its time, and remembers what it has cleared."""

from __future__ import annotations

import random

from router.core.actions import CheckPrompt, ScreenAnswers
from router.core.events import AnswerHalt, AnswersScreened, Event, PromptVerdict
from tests.simulation.router_core_script import BLOCKED_WORD, HALTED_TOKEN

HOLD_BACK_CHARS = 3


class SimSafety:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.is_up = False
        self.reset()

    def reset(self) -> None:
        self._checks: list[CheckPrompt] = []
        self._texts: dict[int, str] = {}
        self._news: set[int] = set()
        self._closing: list[int] = []
        self._halted: set[int] = set()

    @property
    def is_idle(self) -> bool:
        return not self._checks and not self._texts

    def check(self, action: CheckPrompt) -> None:
        assert self.is_up
        assert action.check_id not in {check.check_id for check in self._checks}
        self._checks.append(action)

    def screen(self, action: ScreenAnswers) -> None:
        assert self.is_up
        assert len(set(action.slots)) == len(action.slots), "one entry per answer and frame"
        for slot, delta in zip(action.slots, action.deltas, strict=True):
            assert slot not in self._closing, "text for a slot that was closed"
            self._texts[slot] = self._texts.get(slot, "") + delta
            self._news.add(slot)
        for slot in action.close_slots:
            assert slot in self._texts
            assert slot not in self._closing
            self._closing.append(slot)

    def answer(self, *, all_now: bool) -> list[Event]:
        """Verdicts on some or all of what was asked, in any order between answers."""
        events: list[Event] = []
        for check in list(self._checks):
            if all_now or self._rng.random() < 0.3:
                self._checks.remove(check)
                events.append(PromptVerdict(check.check_id, BLOCKED_WORD not in check.text, "blocked prompt"))
        slots, clear, halts, closed = [], [], [], []
        for slot in sorted(self._news | set(self._closing)):
            if not all_now and self._rng.random() < 0.5:
                continue
            self._news.discard(slot)
            text = self._texts[slot]
            halt_at = f" {text}".find(f" {HALTED_TOKEN} ")
            if halt_at >= 0 and slot not in self._halted:
                self._halted.add(slot)
                halts.append(AnswerHalt(slot, halt_at, "halted answer"))
            elif slot not in self._halted and slot not in self._closing:
                slots.append(slot)
                clear.append(max(0, len(text) - HOLD_BACK_CHARS))
            if slot in self._closing:
                self._closing.remove(slot)
                self._halted.discard(slot)
                del self._texts[slot]
                closed.append(slot)
        if slots or halts or closed:
            events.append(AnswersScreened(slots, clear, halts, closed))
        return events
