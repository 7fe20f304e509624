"""Acts on the safety service's verdicts, and on their absence."""

from __future__ import annotations

import math

from kvloom.errors import invalid_argument, protocol_violation
from kvloom.v1.generation_pb2 import FINISH_REASON_CONTENT_FILTER, FINISH_REASON_ERROR
from router.core.core_config import CoreConfig
from router.core.dispatch.refusals import SERVICE_AWAY, content_filtered, safety_unavailable
from router.core.events import JUDGE_TIER, SHADOW_TIER, AnswersScreened, PromptVerdict
from router.core.held_calls import HeldCalls
from router.core.live import Choice, LiveRequest
from router.core.relay.lifecycle import Lifecycle
from router.core.relay.screening import Screening
from router.core.uncleared_output import UnclearedOutput

RULE_FAILED = "A rule of the safety policy cannot be applied to this request"


class Verdicts:
    """Acts on the verdicts of the safety service: releases, halts, and what follows when it is absent."""

    def __init__(self, lifecycle: Lifecycle, screening: Screening, config: CoreConfig) -> None:
        answer_mode = config.answer_mode
        if answer_mode not in ("gate", "async", "off"):
            raise ValueError(f"unknown answer_mode {answer_mode!r}; there are: gate, async, off")
        self._lifecycle = lifecycle
        self._screening = screening
        self._answer_mode = answer_mode
        self._patience_seconds = config.safety_patience_seconds
        self._safety_required = config.safety_required
        self._waits_until: float | None = None
        """The service was connected and has disconnected: everything is withheld until this time. None: it is
        connected, never was, or has been away for too long."""

    @property
    def can_admit(self) -> bool:
        """True when new requests can be served under the policy."""
        return self._screening.is_up or self._waits_until is not None or not self._safety_required

    @property
    def applies_guardrails(self) -> bool:
        """True when rules that a request names can be applied to it."""
        return (self._screening.is_up or self._waits_until is not None) and self._answer_mode != "off"

    def begin(self, live: LiveRequest) -> None:
        """Have the prompt checked, and arrange for the answers to be screened."""
        screening = self._screening
        if live.request.tier is SHADOW_TIER or live.request.tier is JUDGE_TIER:
            return
        if self._waits_until is not None:
            self._begin_waiting(live)
            return
        if not screening.is_up:
            return
        if screening.must_check(live):
            screening.check_prompt(live)
        is_screened = screening.screens_answers and self._answer_mode != "off"
        is_gated = is_screened and self._answer_mode == "gate"
        if is_screened and not is_gated:
            live.is_screened = False  # its end may come before the verdict
        for choice in live.choices:
            choice.is_screened = is_screened
            if is_gated or live.prompt_verdict_open:
                choice.withheld = _uncleared(choice, is_gated=is_gated)

    def on_prompt(self, verdict: PromptVerdict, now: float) -> None:
        live = self._screening.take_check(verdict.check_id)
        if live is None or not live.num_open_choices or not live.prompt_verdict_open:
            return
        if verdict.allowed:
            live.prompt_verdict_open = False
            if verdict.rules:
                live.safety_rules = ", ".join(verdict.rules)
            for choice in live.choices:
                if choice.withheld is not None and choice.withheld.start is not None:
                    choice.withheld.start.safety_rules = live.safety_rules
                self._lifecycle.settle(choice, now)
            return
        if verdict.unknown_guardrail:
            message = f"guardrails: there is no {verdict.unknown_guardrail[:128]!r} that this caller may name."
            self._lifecycle.end_request(live, FINISH_REASON_ERROR, invalid_argument(message, "guardrails"), now)
            return
        if verdict.rule_failed:
            self._give_up(live, now, RULE_FAILED, fails_closed=verdict.fails_closed)
            return
        error = content_filtered(verdict.message)
        self._lifecycle.end_request(live, FINISH_REASON_CONTENT_FILTER, error, now)

    def on_answers(self, answers: AnswersScreened, now: float) -> None:
        """Halts are handled first: text that they forbid must not be sent with text that the same frame clears."""
        if len(answers.slots) != len(answers.num_clear_chars):
            raise protocol_violation("A screening frame's arrays do not fit together.")
        screening, settle = self._screening, self._lifecycle.settle
        verdicts = [(halt.slot, halt.num_clear_chars) for halt in answers.halts]
        for slot, num_clear_chars in (*verdicts, *zip(answers.slots, answers.num_clear_chars, strict=True)):
            choice = screening.choice(slot)
            if choice is not None and num_clear_chars > _num_screened_chars(choice):
                raise protocol_violation("A screening frame clears text that does not exist.")
        self._lifecycle.leave_fast_paths()
        for slot in answers.flagged_slots:
            choice = screening.choice(slot)
            if choice is not None:
                choice.request.is_flagged = True
        for halt in answers.halts:
            choice = screening.choice(halt.slot)
            if choice is not None and halt.rule_failed:
                self._give_up(choice.request, now, RULE_FAILED, fails_closed=halt.fails_closed)
            elif choice is not None:
                choice.request.is_flagged = True
                self._lifecycle.halt(choice, halt.num_clear_chars, content_filtered(halt.message), now)
        for slot in answers.closed_slots:
            choice = screening.take_closed(slot)
            if choice is not None and choice.withheld is not None:
                choice.withheld.clear_all()
                settle(choice, now)
        for slot, num_clear_chars in zip(answers.slots, answers.num_clear_chars, strict=True):
            choice = screening.choice(slot)
            if choice is None or choice.withheld is None:
                continue
            clear = choice.withheld.num_clear_chars
            if clear is not None and num_clear_chars > clear:
                choice.withheld.num_clear_chars = num_clear_chars
                settle(choice, now)

    # -- without it -----------------------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """The time at which `expire` has to be called; infinity: not in the present state."""
        return math.inf if self._waits_until is None else self._waits_until

    def on_down(self, now: float) -> None:
        """No verdict will come over this stream. Output that waits for one, or would need one later, is withheld until
        there is another stream; what cannot be withheld ends or continues unscreened."""
        self._lifecycle.leave_fast_paths()
        screening = self._screening
        if screening.is_up and self._patience_seconds > 0:
            self._waits_until = now + self._patience_seconds
        is_waiting = self._waits_until is not None
        screening.reset(keeps_prefilter=is_waiting)
        for live in list(self._lifecycle.requests.values()):
            if self._needs_verdict(live) and not (is_waiting and self._hold_back(live)):
                self._give_up(live, now)

    def on_up(self, now: float) -> None:
        """There is a stream again, after `Screening.set_up`: withheld output is submitted for screening."""
        self._lifecycle.leave_fast_paths()
        if self._waits_until is None:
            return
        self._waits_until = None
        for live in list(self._lifecycle.requests.values()):
            if live.prompt_verdict_open:
                self._screening.check_prompt(live)
            for choice in live.choices:
                withheld = choice.withheld
                if choice.is_done or withheld is None:
                    continue
                if choice.is_screened and withheld.num_clear_chars is not None:
                    self._screening.resend(choice, withheld)
                self._lifecycle.settle(choice, now)

    def expire(self, now: float) -> None:
        """Stop waiting, if the time has come."""
        if self._waits_until is None or now < self._waits_until:
            return
        self._waits_until = None
        self._lifecycle.leave_fast_paths()
        self._screening.reset(keeps_prefilter=False)
        for live in list(self._lifecycle.requests.values()):
            if self._needs_verdict(live):
                self._give_up(live, now)

    def _begin_waiting(self, live: LiveRequest) -> None:
        """Whatever the policy will be: no output is shown before it is known."""
        live.prompt_verdict_open = True
        for choice in live.choices:
            choice.is_screened = self._answer_mode != "off"
            choice.withheld = _uncleared(choice, is_gated=choice.is_screened)

    def _needs_verdict(self, live: LiveRequest) -> bool:
        return live.prompt_verdict_open or any(map(_is_being_screened, live.choices))

    def _hold_back(self, live: LiveRequest) -> bool:
        """Withholds all output that is not clear, so that it can be screened later; returns True when that is
        possible."""
        for choice in live.choices:
            if not _is_being_screened(choice):
                continue
            withheld = choice.withheld
            if withheld is None:
                return False  # it is shown as it comes, and output without a verdict is not kept
            if withheld.num_clear_chars is None and live.prompt_verdict_open:
                withheld.withhold_all()
            if withheld.num_clear_chars is not None:
                self._screening.restart(choice, withheld)
        return True

    def _give_up(self, live: LiveRequest, now: float, cause: str = SERVICE_AWAY, *, fails_closed: bool = False) -> None:
        """There will be no verdict."""
        if self._safety_required or fails_closed or live.request.guardrails:
            error = safety_unavailable(live.request.request_id, cause)
            self._lifecycle.end_request(live, FINISH_REASON_ERROR, error, now)
        else:
            self._lifecycle.stop_screening(live, now)


def _uncleared(choice: Choice, *, is_gated: bool) -> UnclearedOutput:
    if not is_gated:
        return UnclearedOutput(None)
    call_reader = choice.request.request.call_reader
    return UnclearedOutput(0, None if call_reader is None else HeldCalls(call_reader(choice.spec)))


def _is_being_screened(choice: Choice) -> bool:
    return choice.is_screened and not choice.is_done


def _num_screened_chars(choice: Choice) -> int:
    """All that the service can have judged: the answer's text, and the stop string that has ended it."""
    finish = None if choice.withheld is None else choice.withheld.finish
    return choice.num_chars + (0 if finish is None else len(finish.stop_string))
