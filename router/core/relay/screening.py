"""The stream to the safety service: open prompt checks, open screenings of answers, and their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from router.core.action_buffer import ActionBuffer
from router.core.actions import AnswerScope, CheckPrompt
from router.core.events import TextFilter
from router.core.fleet.slot_pool import SlotPool
from router.core.live import Choice, LiveRequest
from router.core.uncleared_output import UnclearedOutput

_SEPARATOR: Final = "\0"


class Screening:
    """Questions to the service that are not answered yet. It decides nothing: `lifecycle` acts on verdicts."""

    def __init__(self, action_buffer: ActionBuffer) -> None:
        self._action_buffer = action_buffer
        self.is_up = False
        self.screens_prompts = False
        self.screens_answers = False
        self._prefilter: TextFilter | None = None
        self._prompt_filter: TextFilter | None = None
        self._checks: dict[int, LiveRequest] = {}
        self._check_ids = SlotPool()
        self._answers: dict[int, Choice | None] = {}
        """By screening slot; None: the choice has ended, and the slot waits to be closed."""
        self._slots = SlotPool()
        self._closing: set[int] = set()

    def set_up(
        self,
        *,
        screens_prompts: bool,
        screens_answers: bool,
        prefilter: TextFilter | None = None,
        prompt_filter: TextFilter | None = None,
    ) -> None:
        self.is_up = True
        self.screens_prompts = screens_prompts
        self.screens_answers = screens_answers
        self._prefilter = prefilter
        self._prompt_filter = prompt_filter

    def reset(self, *, keeps_prefilter: bool) -> None:
        """The stream broke: its open questions will not be answered. The prefilter may continue to clear text until
        there is another stream."""
        self.is_up = False
        if not keeps_prefilter or not self.screens_answers:
            self._prefilter = None
        for choice in self._answers.values():
            if choice is not None:
                choice.screening_slot = None
        self._checks.clear()
        self._check_ids = SlotPool()
        self._answers.clear()
        self._slots = SlotPool()
        self._closing.clear()

    def must_check(self, live: LiveRequest) -> bool:
        """True when the service might refuse the request's prompt."""
        if live.request.guardrails or live.request.tells_safety_rules:
            return True  # the service knows them
        if not self.screens_prompts:
            return False
        prompt_filter = self._prompt_filter
        return prompt_filter is None or prompt_filter.is_suspicious(live.request.prompt_text)

    def check_prompt(self, live: LiveRequest) -> None:
        live.check_id = self._check_ids.allocate()
        live.prompt_verdict_open = True
        self._checks[live.check_id] = live
        request = live.request
        self._action_buffer.add(
            CheckPrompt(
                live.check_id,
                request.prompt_text,
                request.tenant,
                request.request_id,
                request.client_request_id,
                request.traceparent,
                request.guardrails,
                request.safety_identifier,
                request.tells_safety_rules,
            )
        )

    def take_check(self, check_id: int) -> LiveRequest | None:
        """The request that a verdict is for; None for a verdict that was not asked for."""
        live = self._checks.pop(check_id, None)
        if live is not None:
            self._check_ids.free(check_id)
        return live

    def clears_all(self, deltas: Sequence[str]) -> TextFilter | None:
        """The prefilter, if one search over all deltas finds nothing."""
        prefilter = self._prefilter
        if prefilter is None or not self.screens_answers or prefilter.is_suspicious(_SEPARATOR.join(deltas)):
            return None
        return prefilter

    def clear(self, choice: Choice, withheld: UnclearedOutput, delta: str, *, is_plain: bool) -> bool:
        """Clear a gated answer's newest text (counted in `choice.num_chars`) without the service, if all text before it
        is clear and the prefilter finds nothing in it. `is_plain`: the prefilter has already cleared the whole step."""
        prefilter = self._prefilter
        if prefilter is None or withheld.num_clear_chars != choice.num_chars - len(delta):
            return False
        if choice.screening_slot is not None and choice.prefilter is not prefilter:
            return False  # it is screened by an earlier policy
        if not is_plain and prefilter.is_suspicious(delta):
            return False
        withheld.num_clear_chars = choice.num_chars
        withheld.last_shown_char = delta[-1]
        choice.num_skipped_chars += len(delta)
        choice.last_skipped_char = delta[-1]
        return True

    def send(self, choice: Choice, delta: str) -> None:
        """Have text screened; the first text opens the slot. The service is notified of the amount of skipped text.
        While it is away nothing is sent: withheld text goes to its successor (`resend`)."""
        if not self.is_up:
            return
        slot = choice.screening_slot
        if slot is None:
            slot = choice.screening_slot = self._slots.allocate()
            choice.prefilter = self._prefilter
            self._answers[slot] = choice
            request = choice.request.request
            scope = AnswerScope(slot, request.tenant, request.guardrails, request.safety_identifier, request.request_id)
            self._action_buffer.screen_scopes.append(scope)
        if choice.num_skipped_chars:
            self._action_buffer.screen_skips.append((slot, choice.num_skipped_chars, choice.last_skipped_char))
            choice.num_skipped_chars = 0
        self._action_buffer.screen_slots.append(slot)
        self._action_buffer.screen_deltas.append(delta)

    def send_stop_string(self, choice: Choice, withheld: UnclearedOutput, stop_string: str) -> None:
        """Have the stop string screened that has ended the answer. The client learns that it followed the text, and
        may put the two together."""
        if withheld.num_clear_chars is None:
            return
        prefilter = self._prefilter if choice.screening_slot is None else choice.prefilter
        is_clear = withheld.num_clear_chars == choice.num_chars
        if not is_clear or prefilter is None or prefilter.is_suspicious(stop_string):
            self.send(choice, stop_string)
        elif choice.screening_slot is None:
            withheld.clear_all()

    def restart(self, choice: Choice, withheld: UnclearedOutput) -> None:
        """The stream that screened the choice has broken. The next stream screens it as a new answer whose cleared text
        is skipped."""
        choice.screening_slot = None
        choice.num_skipped_chars = min(withheld.num_clear_chars or 0, choice.num_chars)
        choice.last_skipped_char, _ = withheld.unclear()

    def resend(self, choice: Choice, withheld: UnclearedOutput) -> None:
        """Send everything that is withheld and not clear over a new stream."""
        _, text = withheld.unclear()
        if withheld.finish is not None:
            text += withheld.finish.stop_string
        if text:
            self.send(choice, text)
            if withheld.finish is not None:
                self.close(choice)
        elif withheld.finish is not None:
            withheld.clear_all()

    def choice(self, slot: int) -> Choice | None:
        return self._answers.get(slot)

    def close(self, choice: Choice) -> None:
        """No more text will come. Repeatable."""
        slot = choice.screening_slot
        if slot is not None and slot in self._answers and slot not in self._closing:
            self._closing.add(slot)
            self._action_buffer.close_slots.append(slot)

    def forget(self, choice: Choice) -> None:
        """The choice has ended: its slot is closed, and verdicts on it change nothing."""
        self.close(choice)
        if choice.screening_slot is not None and choice.screening_slot in self._answers:
            self._answers[choice.screening_slot] = None

    def take_closed(self, slot: int) -> Choice | None:
        """The service has screened a slot to its end, and the slot is free. Returns the choice, if it still waits for
        that."""
        if slot not in self._closing:
            return None
        self._closing.remove(slot)
        self._slots.free(slot)
        return self._answers.pop(slot)

    @property
    def num_open(self) -> int:
        """Checks and screenings without a verdict."""
        return len(self._checks) + len(self._answers)

    def check_integrity(self) -> None:
        """Assert that every assigned number is in use."""
        assert self._check_ids.num_allocated == len(self._checks)
        assert self._slots.num_allocated == len(self._answers)
        assert self._closing <= self._answers.keys()
        for slot, choice in self._answers.items():
            assert choice is None or (choice.screening_slot == slot and not choice.is_done)
            assert choice is not None or slot in self._closing
