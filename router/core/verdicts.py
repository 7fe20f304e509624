"""What the safety service says, and what its silence means."""

from __future__ import annotations

from kvloom.errors import KvloomError, protocol_violation
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason
from router.core.admission import safety_unavailable
from router.core.events import AnswersScreened, PromptVerdict
from router.core.lifecycle import Lifecycle
from router.core.live import Hold, LiveRequest
from router.core.screening import Screening

DEFAULT_MESSAGE = "The safety policy does not allow this content."


class Verdicts:
    def __init__(self, lifecycle: Lifecycle, screening: Screening, answer_mode: str, *, safety_required: bool) -> None:
        if answer_mode not in ("gate", "async", "off"):
            raise ValueError(f"unknown answer_mode {answer_mode!r}; there are: gate, async, off")
        self._lifecycle = lifecycle
        self._screening = screening
        self._answer_mode = answer_mode
        self._safety_required = safety_required

    @property
    def can_admit(self) -> bool:
        """Whether new requests can be served under the policy."""
        return self._screening.is_up or not self._safety_required

    def begin(self, live: LiveRequest) -> None:
        """Have the prompt checked, and arrange for the answers to be screened."""
        screening = self._screening
        if not screening.is_up:
            return
        if screening.screens_prompts:
            screening.check_prompt(live)
        is_screened = screening.screens_answers and self._answer_mode != "off"
        is_gated = is_screened and self._answer_mode == "gate"
        for choice in live.choices:
            choice.is_screened = is_screened
            if is_gated or live.prompt_verdict_open:
                choice.hold = Hold(0 if is_gated else None)

    def on_prompt(self, verdict: PromptVerdict, now: float) -> None:
        live = self._screening.take_check(verdict.check_id)
        if live is None or not live.num_open_choices or not live.prompt_verdict_open:
            return
        if verdict.allowed:
            live.prompt_verdict_open = False
            for choice in live.choices:
                self._lifecycle.settle(choice, now)
            return
        error = _content_filtered(verdict.message)
        self._lifecycle.end_request(live, FinishReason.FINISH_REASON_CONTENT_FILTER, error, now)

    def on_answers(self, answers: AnswersScreened, now: float) -> None:
        """Halts come first: what they forbid must not slip out with what the same frame clears."""
        if len(answers.slots) != len(answers.num_clear_chars):
            raise protocol_violation("A screening frame's arrays do not fit together.")
        screening, settle = self._screening, self._lifecycle.settle
        for halt in answers.halts:
            choice = screening.choice(halt.slot)
            if choice is not None:
                self._lifecycle.halt(choice, halt.num_clear_chars, _content_filtered(halt.message), now)
        for slot in answers.closed_slots:
            choice = screening.take_closed(slot)
            if choice is not None and choice.hold is not None:
                choice.hold.num_clear_chars = None
                settle(choice, now)
        for slot, num_clear_chars in zip(answers.slots, answers.num_clear_chars, strict=True):
            choice = screening.choice(slot)
            if choice is None or choice.hold is None:
                continue
            clear = choice.hold.num_clear_chars
            if clear is not None and num_clear_chars > clear:
                choice.hold.num_clear_chars = num_clear_chars
                settle(choice, now)

    def on_down(self, now: float) -> None:
        """No verdict will come: what waits for one, or would need one later, ends or goes on unscreened."""
        self._screening.reset()
        for live in list(self._lifecycle.requests.values()):
            if not live.prompt_verdict_open and not any(c.is_screened and not c.is_done for c in live.choices):
                continue
            if self._safety_required:
                error = safety_unavailable(live.request.request_id)
                self._lifecycle.end_request(live, FinishReason.FINISH_REASON_ERROR, error, now)
            else:
                self._lifecycle.stop_screening(live, now)


def _content_filtered(message: str) -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_CONTENT_FILTERED, message or DEFAULT_MESSAGE)
