"""Checks what may be dispatched to shards, and frames of attempts that are no longer current."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvloom.v1.error_reason_pb2 import ErrorReason
from lab.dst import script
from lab.dst.checker import Checker
from lab.dst.observed import ObservedChoice, ObservedRequest, eligible
from lab.dst.views import ShardStreamView, ShardView, SimulatedRouterView
from router.core.actions import (
    Action,
    AnswerResampled,
    CancelOnShard,
    LeasesWanted,
    LimitsCounted,
    PlacementDecided,
    PrefillLegCounted,
    RequestEnded,
    ShardHealthChanged,
    SubmitAttempt,
)
from router.core.events import ChoiceSpec, Event, StepArrived
from router.core.relay.lifecycle import MAX_MOVES, MAX_STRIKES

_OVERDUE: Final = (ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, ErrorReason.ERROR_REASON_QUEUE_TIMEOUT)


class Fence(Checker):
    """Frames of cancelled, failed-over and unknown attempts change nothing: clients receive only what the current
    attempt of a choice emitted. At most, the end of a cancelled one makes room for a queued request, or shows that its
    shard is healthy."""

    invariant = "fence"

    def __init__(self) -> None:
        self._is_late = False
        self._hopeless: set[str] = set()
        """Ids of the requests for which there was no shard when a late frame arrived."""

    def before_event(self, node: SimulatedRouterView, event: Event) -> None:
        self._is_late = False
        if isinstance(event, StepArrived):
            shard = node.witness.shards.get(event.shard_id)
            step = event.step
            slots = {*step.slots, *(start.slot for start in step.starts), *(finish.slot for finish in step.finishes)}
            is_current = shard is not None and any(shard.current(slot) for slot in slots)
            legs = [observed.leg for observed in node.witness.live.values() if observed.leg is not None]
            is_of_leg = any(leg.shard.shard_id == event.shard_id and leg.slot in slots for leg in legs)
            self._is_late = not (is_current or is_of_leg)
        if self._is_late:
            waiting = node.witness.waiting()
            self._hopeless = {
                observed.request.request_id for observed in waiting if not eligible(node.witness.shards, observed)
            }

    def on_sent(self, node: SimulatedRouterView, choice: ObservedChoice, token_ids: Sequence[int], delta: str) -> None:
        begin = choice.num_sent_tokens
        if choice.emitted[begin : begin + len(token_ids)] != list(token_ids):
            self.fail(f"{choice.request.request.request_id} got {list(token_ids)}, which its attempts did not emit")

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        if self._is_late:
            # A shard's work is also moved when it becomes suspected, and time passes with every event.
            has_other_cause = any(
                isinstance(action, ShardHealthChanged) or self._is_overdue(action) for action in actions
            )
            others = [action for action in actions if not self._is_allowed(node, action)]
            if others and not has_other_cause:
                self.fail(f"a late frame led to {others}")

    @staticmethod
    def _is_allowed(node: SimulatedRouterView, action: Action) -> bool:
        if isinstance(action, CancelOnShard):
            shard = node.witness.shards.get(action.shard_id)
            return shard is not None and not any(
                shard.open.get(slot) for slot in action.slots
            )  # a probe that is cancelled
        # Leases are asked for as time passes.
        return isinstance(
            action,
            SubmitAttempt | PlacementDecided | PrefillLegCounted | AnswerResampled | LeasesWanted | LimitsCounted,
        )

    def _is_overdue(self, action: Action) -> bool:
        """True when a request ended because of its deadline or of a long outage (see OutagePatience)."""
        return isinstance(action, RequestEnded) and (
            action.error_reason in _OVERDUE or action.request_id in self._hopeless
        )


class SlotsExclusive(Checker):
    """A slot is not reused before its shard has finished the sequence in it."""

    invariant = "slots_exclusive"

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        self.on_probe(node, attempt)

    def on_prefill_chunk(
        self, node: SimulatedRouterView, observed: ObservedRequest | None, prefill_chunk: SubmitAttempt
    ) -> None:
        self.on_probe(node, prefill_chunk)

    def on_prefill_leg(self, node: SimulatedRouterView, observed: ObservedRequest | None, leg: SubmitAttempt) -> None:
        self.on_probe(node, leg)

    def on_collection(self, node: SimulatedRouterView, collection: SubmitAttempt) -> None:
        self.on_probe(node, collection)

    def on_probe(self, node: SimulatedRouterView, attempt: SubmitAttempt) -> None:
        shard = node.witness.shards.get(attempt.shard_id)
        taken = [spec.slot for spec in attempt.choices if shard is not None and spec.slot in shard.open]
        if taken or len({spec.slot for spec in attempt.choices}) < len(attempt.choices):
            self.fail(f"slots {taken} of {attempt.shard_id} were reused while they were in use")

    def on_submit(self, shard: ShardView, stream: ShardStreamView, attempt: SubmitAttempt, spec: ChoiceSpec) -> None:
        if (stream, spec.slot) in shard.engine.sequences:
            self.fail(f"slot {spec.slot} arrived at {shard.shard_id} while it was in use there")


class PrefillChunksFit(Checker):
    """A prefill chunk is the beginning of the prompt of a queued request, in whole blocks, on a shard that may run the
    request. A request has at most one at a time, and it is cancelled when the request is no longer queued."""

    invariant = "prefill_chunks_fit"

    def on_prefill_chunk(
        self, node: SimulatedRouterView, observed: ObservedRequest | None, prefill_chunk: SubmitAttempt
    ) -> None:
        name, prompt = prefill_chunk.request.request_id, prefill_chunk.request.prompt_token_ids
        shard = node.witness.shards.get(prefill_chunk.shard_id)
        if observed is None or not observed.is_waiting or observed.num_attempts:
            self.fail(f"{name} is computed for a request that does not wait for its first attempt")
        if observed.prefill_chunk is not None:
            self.fail(f"{name} is computed while {observed.prefill_chunk} is")
        if shard is None or not shard.can_take(observed) or not shard.has_room:
            self.fail(f"{name} was dispatched to {prefill_chunk.shard_id}, which cannot take it now")
        whole = observed.request.prompt_token_ids
        if len(prompt) % shard.description.block_size or not 0 < len(prompt) < len(whole):
            self.fail(f"{name} has {len(prompt)} of {len(whole)} tokens")
        if list(prompt) != list(whole[: len(prompt)]) or prefill_chunk.request.tenant != observed.request.tenant:
            self.fail(f"{name} is not the beginning of its request's prompt")

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        for observed in node.witness.live.values():
            if observed.prefill_chunk is not None and not observed.is_waiting:
                self.fail(f"{observed.request.request_id} does not wait, and a prefill chunk of its prompt is computed")

    def on_ended(self, node: SimulatedRouterView, observed: ObservedRequest | None, end: RequestEnded) -> None:
        if observed is not None and observed.prefill_chunk is not None:
            self.fail(f"{end.request_id} has ended, and a prefill chunk of its prompt is computed")


class MovesCounted(Checker):
    """The record of a request says how often its choices continued on another shard: once for each attempt after a
    choice's first one, and at most once more for each choice, which then waited until its end."""

    invariant = "moves_counted"

    def on_ended(self, node: SimulatedRouterView, observed: ObservedRequest | None, end: RequestEnded) -> None:
        if observed is None or observed.is_duplicate:
            return
        num_again = sum(max(0, choice.num_attempts - 1) for choice in observed.choices)
        num_moves = end.moves.num_preemptions + end.moves.num_migrations + end.moves.num_failovers
        if not num_again <= num_moves <= num_again + len(observed.choices):
            self.fail(f"{end.request_id} was moved {num_moves} times, and dispatched again {num_again} times")


class AttemptsContinue(Checker):
    """Attempts are numbered and limited, each choice runs on one shard at a time, and a later attempt continues exactly
    after the tokens and the text that earlier ones emitted."""

    invariant = "attempts_continue"

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        if observed is None:
            self.fail(f"{attempt.request.request_id} was dispatched although it is not live")
        if attempt.attempt_id != observed.num_attempts + 1:
            self.fail(f"attempt {attempt.attempt_id} of {attempt.request.request_id} follows {observed.num_attempts}")
        for spec in attempt.choices:
            choice = observed.choice(spec.index)
            if choice.place is not None:
                self.fail(f"{attempt.request.request_id} runs twice")
            moves_too_often = choice.num_moves > MAX_MOVES and not observed.had_notice
            if choice.num_failures >= node.config.max_attempts or moves_too_often:
                self.fail(f"{attempt.request.request_id} has more than {node.config.max_attempts} attempts")
            if choice.num_strikes >= MAX_STRIKES:
                self.fail(f"{attempt.request.request_id} was sent to a third shard after two have died with it")
            if [*choice.spec.output_token_ids, *choice.emitted] != list(spec.output_token_ids):
                self.fail(f"{attempt.request.request_id} does not continue after what was emitted")

    def on_submit(self, shard: ShardView, stream: ShardStreamView, attempt: SubmitAttempt, spec: ChoiceSpec) -> None:
        assert isinstance(attempt.request.sampling, script.ScriptedSampling)
        tokens = script.answer(attempt.request.sampling.script_key, spec.index)
        given = tuple(spec.output_token_ids)
        if given != tokens[: len(given)]:
            self.fail(f"{attempt.request.request_id} continues after {list(given)}, not {list(tokens)}")
        texts = (script.text_shown(given, len(given)), script.text_of(given))
        if spec.num_delivered_chars not in map(len, texts):
            self.fail(f"{attempt.request.request_id} continues after {spec.num_delivered_chars} characters of {texts}")


class PlacementsFit(Checker):
    """A request is dispatched to a shard that serves its model, accepts work, has room, and has a large enough window.
    A suspected shard is used only if there is no other."""

    invariant = "placements_fit"

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        shard = node.witness.shards.get(attempt.shard_id)
        if shard is None or observed is None:
            self.fail(f"{attempt.request.request_id} was dispatched to {attempt.shard_id}, which is not there")
        if not shard.can_take(observed) or not shard.has_room:
            self.fail(f"{attempt.request.request_id} was dispatched to {attempt.shard_id}, which cannot take it now")
        if shard not in eligible(node.witness.shards, observed):
            self.fail(f"{attempt.request.request_id} was dispatched to {attempt.shard_id}, where it should not go")
        window = shard.description.max_model_len
        if len(attempt.request.prompt_token_ids) + attempt.max_tokens > window:
            self.fail(f"{attempt.request.request_id} may grow beyond the {window} tokens of {attempt.shard_id}")
        longest = max(len(spec.output_token_ids) for spec in attempt.choices)
        if longest >= attempt.max_tokens:
            self.fail(f"{attempt.request.request_id} was dispatched with no tokens left to generate")


class VariantsKept(Checker):
    """An answer continues on a shard of the same variant if one could take it; if none could, the router reports it."""

    invariant = "variants_kept"

    def __init__(self) -> None:
        self._variants: dict[tuple[SimulatedRouterView, str], str] = {}
        """That of the shard on which each request ran last."""
        self._changed: list[str] = []
        """Requests that the event at hand has moved to another variant with tokens of the earlier one."""

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        shard = node.witness.shards.get(attempt.shard_id)
        if shard is None or observed is None:
            return
        name, variant = attempt.request.request_id, shard.description.variant
        earlier = self._variants.get((node, name), variant)
        self._variants[node, name] = variant
        if earlier == variant or not any(spec.output_token_ids for spec in attempt.choices):
            return
        self._changed.append(name)
        for other in eligible(node.witness.shards, observed):
            if node.witness.has_room(other, observed) and other.description.variant == earlier:
                self.fail(f"{name} left variant {earlier} for {variant}, which {other.description.shard_id} has")

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        reported = [action.request_id for action in actions if isinstance(action, AnswerResampled)]
        if sorted(reported) != sorted(self._changed):
            self.fail(f"changes of variant are reported for {reported}, and happened to {self._changed}")
        self._changed = []

    def on_ended(self, node: SimulatedRouterView, observed: ObservedRequest | None, end: RequestEnded) -> None:
        if observed is None or not observed.is_duplicate:  # the request whose id a rejected one has is still running
            self._variants.pop((node, end.request_id), None)
