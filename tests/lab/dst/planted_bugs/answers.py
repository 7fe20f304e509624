"""Planted bugs in what clients receive and in what is metered."""

from __future__ import annotations

from typing import Any

import msgspec

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason
from lab.dst.checkers import (
    AnswersComplete,
    EndsJustified,
    EndsOnce,
    FramesWellFormed,
    MeteredIsDelivered,
    TextIntact,
    TokensExact,
)
from router.core.action_buffer import ActionBuffer
from router.core.actions import RequestEnded
from router.core.admission.arrivals import Arrivals
from router.core.fleet.fleet import Shard
from router.core.frames import Step
from router.core.live import Choice
from router.core.relay import lifecycle
from router.core.relay.lifecycle import Lifecycle
from router.core.uncleared_output import UnclearedOutput
from tests.lab.dst.planted_bugs.change_steps import change_steps
from tests.lab.dst.planted_bugs.registry import Patch, caught_by


@caught_by(TokensExact)
def drops_the_seventh_token(patch: Patch) -> None:
    """The relay drops the seventh token of every answer together with its text."""

    def change(shard: Shard, step: Step) -> None:
        if step.num_tokens or step.logprobs:
            return
        for i in reversed(range(len(step.slots))):
            choice = shard.choices.get(step.slots[i])
            if choice is not None and len(choice.output_token_ids) == 6:
                del step.slots[i], step.token_ids[i], step.deltas[i]

    change_steps(patch, change)


@caught_by(TokensExact)
def sends_withheld_tokens_twice(patch: Patch) -> None:
    """Withheld output that is cleared in two parts sends the last entry of the first part again."""
    original = UnclearedOutput.take_clear

    def take_clear(self: UnclearedOutput) -> Any:
        last = self.entries[0] if len(self.entries) > 1 else None
        taken = original(self)
        if taken is not None and last is not None and self.entries:
            self.entries.appendleft(last)
            self.num_tokens += len(last[0])
        return taken

    patch.setattr(UnclearedOutput, "take_clear", take_clear)


@caught_by(TextIntact, first_seed=100)
def loses_text_without_tokens(patch: Patch) -> None:
    """An entry that has only text (which a detokenizer had kept back) is treated as empty and dropped."""

    def change(_shard: Shard, step: Step) -> None:
        for i in reversed(range(len(step.num_tokens))):
            if not step.num_tokens[i]:
                del step.slots[i], step.num_tokens[i], step.deltas[i]

    change_steps(patch, change)


@caught_by(FramesWellFormed)
def forgets_the_counts_of_tokens(patch: Patch) -> None:
    """A frame with entries of several tokens is sent without their counts."""
    original = ActionBuffer.take

    def take(self: ActionBuffer) -> Any:
        actions = original(self)
        for action in actions:
            if hasattr(action, "step"):
                action.step.num_tokens = []
        return actions

    patch.setattr(ActionBuffer, "take", take)


@caught_by(AnswersComplete)
def stops_at_the_first_stalled_step(patch: Patch) -> None:
    """A failed attempt that has produced output is reported as a complete answer."""
    original = Lifecycle.retry

    def retry(self: Lifecycle, choice: Choice, error: KvloomError, shard_id: str, now: float, **more: Any) -> None:
        if choice.output_token_ids:
            self.finish(choice, lifecycle.Finish(choice.client_slot, FinishReason.FINISH_REASON_STOP), now)
        else:
            original(self, choice, error, shard_id, now, **more)

    patch.setattr(Lifecycle, "retry", retry)


@caught_by(EndsOnce)
def reports_the_end_of_every_choice(patch: Patch) -> None:
    """A request with several choices is reported as ended at the end of each choice."""
    original = Lifecycle._end

    def end(self: Lifecycle, choice: Choice, finish: Any, now: float) -> None:
        original(self, choice, finish, now)
        if choice.request.num_open_choices:
            self._action_buffer.add(lifecycle.request_ended(choice.request, now))

    patch.setattr(Lifecycle, "_end", end)


@caught_by(EndsOnce)
def refuses_in_silence(patch: Patch) -> None:
    """A request that finds the queue full is reported as ended, but its client is not notified."""
    original = Arrivals._refuse

    def refuse(self: Arrivals, request: Any, client: Any, error: KvloomError, now: float) -> None:
        original(self, request, client, error, now)
        if error.reason == ErrorReason.ERROR_REASON_QUEUE_FULL:
            client.step.finishes.clear()

    patch.setattr(Arrivals, "_refuse", refuse)


@caught_by(MeteredIsDelivered)
def meters_withheld_tokens(patch: Patch) -> None:
    """Withheld tokens that are dropped are metered all the same."""
    patch.setattr(Lifecycle, "_forget_tokens", lambda _self, _choice, _count: None)


@caught_by(MeteredIsDelivered)
def meters_resumed_tokens_again(patch: Patch) -> None:
    """A resumed answer is metered with the tokens that the client already had."""
    original = lifecycle.request_ended

    def request_ended(live: Any, now: float) -> RequestEnded:
        given = sum(choice.num_resumed_tokens for choice in live.choices)
        end = original(live, now)
        return msgspec.structs.replace(end, num_output_tokens=end.num_output_tokens + given)

    patch.setattr(lifecycle, "request_ended", request_ended)


@caught_by(EndsJustified)
def has_no_patience_in_the_queue(patch: Patch) -> None:
    """A request waits half as long as it may."""
    original = Arrivals.on_request

    def on_request(self: Arrivals, event: Any, now: float) -> None:
        self._overload._max_queue_seconds = 0.02
        original(self, event, now)

    patch.setattr(Arrivals, "on_request", on_request)


@caught_by(EndsJustified)
def gives_up_at_the_first_failure(patch: Patch) -> None:
    """Nothing is tried a second time."""
    original = Lifecycle.__init__

    def init(self: Lifecycle, *args: Any, **others: Any) -> None:
        original(self, *args[:-1], 1, **others)

    patch.setattr(Lifecycle, "__init__", init)
