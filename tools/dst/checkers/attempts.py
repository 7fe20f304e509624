"""What goes to shards, and what comes back from attempts that nobody waits for any more."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvloom.v1.error_reason_pb2 import ErrorReason
from router.core.actions import Action, CancelOnShard, PlacementDecided, RequestEnded, ShardHealthChanged, SubmitAttempt
from router.core.events import ChoiceSpec, Event, StepArrived
from router.core.relay.lifecycle import MAX_MOVES
from tools.dst import script
from tools.dst.checkers.base import Checker
from tools.dst.witness.seen import eligible

if TYPE_CHECKING:
    from tools.dst.nodes.router_node import RouterNode
    from tools.dst.nodes.shard import SimShard
    from tools.dst.nodes.shard_stream import ShardStream
    from tools.dst.witness.seen import SeenChoice, SeenRequest


_OVERDUE: Final = (ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, ErrorReason.ERROR_REASON_QUEUE_TIMEOUT)


class Fence(Checker):
    """Frames of cancelled, failed-over and unknown attempts change nothing: clients get only what the current attempt
    of a choice emitted. At most, the end of a cancelled one makes room for what waits, or tells of its shard's health.
    """

    invariant = "fence"

    def __init__(self) -> None:
        self._is_late = False
        self._hopeless: set[str] = set()
        """Names of those who wait for a shard that does not exist, when a late frame comes."""

    def before_event(self, node: RouterNode, event: Event) -> None:
        self._is_late = False
        if isinstance(event, StepArrived):
            shard = node.witness.shards.get(event.shard_id)
            step = event.step
            slots = {*step.slots, *(start.slot for start in step.starts), *(finish.slot for finish in step.finishes)}
            self._is_late = shard is None or not any(shard.current(slot) for slot in slots)
        if self._is_late:
            waiting = node.witness.waiting()
            self._hopeless = {seen.request.request_id for seen in waiting if not eligible(node.witness.shards, seen)}

    def on_sent(self, node: RouterNode, choice: SeenChoice, token_ids: Sequence[int], delta: str) -> None:
        begin = choice.num_sent_tokens
        if choice.emitted[begin : begin + len(token_ids)] != list(token_ids):
            self.fail(f"{choice.request.request.request_id} got {list(token_ids)}, which its attempts did not emit")

    def after_event(self, node: RouterNode, event: Event, actions: Sequence[Action]) -> None:
        if self._is_late:
            # Suspicion has a shard's work moved, whatever it was that led to it; and whatever comes, time has gone on.
            has_other_cause = any(
                isinstance(action, ShardHealthChanged) or self._is_overdue(action) for action in actions
            )
            others = [action for action in actions if not self._is_allowed(node, action)]
            if others and not has_other_cause:
                self.fail(f"a late frame led to {others}")

    @staticmethod
    def _is_allowed(node: RouterNode, action: Action) -> bool:
        if isinstance(action, CancelOnShard):
            shard = node.witness.shards.get(action.shard_id)
            return shard is not None and not any(shard.open.get(slot) for slot in action.slots)  # a probe, given up
        return isinstance(action, SubmitAttempt | PlacementDecided)

    def _is_overdue(self, action: Action) -> bool:
        """Its time was up, or the patience with an outage: see OutagePatience for when that is."""
        return isinstance(action, RequestEnded) and (
            action.error_reason in _OVERDUE or action.request_id in self._hopeless
        )


class SlotsRest(Checker):
    """A slot is not used again before its shard has ended what runs there."""

    invariant = "slots_rest"

    def on_dispatch(self, node: RouterNode, seen: SeenRequest | None, attempt: SubmitAttempt) -> None:
        self.on_probe(node, attempt)

    def on_prefill_chunk(self, node: RouterNode, seen: SeenRequest | None, prefill_chunk: SubmitAttempt) -> None:
        self.on_probe(node, prefill_chunk)

    def on_probe(self, node: RouterNode, attempt: SubmitAttempt) -> None:
        shard = node.witness.shards.get(attempt.shard_id)
        taken = [spec.slot for spec in attempt.choices if shard is not None and spec.slot in shard.open]
        if taken or len({spec.slot for spec in attempt.choices}) < len(attempt.choices):
            self.fail(f"slots {taken} of {attempt.shard_id} were used while they were in use")

    def on_submit(self, shard: SimShard, stream: ShardStream, attempt: SubmitAttempt, spec: ChoiceSpec) -> None:
        if (stream, spec.slot) in shard.engine.sequences:
            self.fail(f"slot {spec.slot} arrived at {shard.shard_id} while it was in use there")


class PrefillChunksFit(Checker):
    """A prefill chunk is the beginning of a prompt whose request waits, on a shard that may take it: whole blocks, one
    at a time, and given up when the request does not wait for it any more."""

    invariant = "portions_fit"

    def on_prefill_chunk(self, node: RouterNode, seen: SeenRequest | None, prefill_chunk: SubmitAttempt) -> None:
        name, prompt = prefill_chunk.request.request_id, prefill_chunk.request.prompt_token_ids
        shard = node.witness.shards.get(prefill_chunk.shard_id)
        if seen is None or not seen.is_waiting or seen.num_attempts:
            self.fail(f"{name} is computed for a request that does not wait for its first attempt")
        if seen.prefill_chunk is not None:
            self.fail(f"{name} is computed while {seen.prefill_chunk} is")
        if shard is None or not shard.can_take(seen) or not shard.has_room:
            self.fail(f"{name} was dispatched to {prefill_chunk.shard_id}, which cannot take it now")
        whole = seen.request.prompt_token_ids
        if len(prompt) % shard.description.block_size or not 0 < len(prompt) < len(whole):
            self.fail(f"{name} has {len(prompt)} of {len(whole)} tokens")
        if list(prompt) != list(whole[: len(prompt)]) or prefill_chunk.request.tenant != seen.request.tenant:
            self.fail(f"{name} is not the beginning of its request's prompt")

    def after_event(self, node: RouterNode, event: Event, actions: Sequence[Action]) -> None:
        for seen in node.witness.live.values():
            if seen.prefill_chunk is not None and not seen.is_waiting:
                self.fail(f"{seen.request.request_id} does not wait, and a prefill chunk of its prompt is computed")

    def on_ended(self, node: RouterNode, seen: SeenRequest | None, end: RequestEnded) -> None:
        if seen is not None and seen.prefill_chunk is not None:
            self.fail(f"{end.request_id} has ended, and a prefill chunk of its prompt is computed")


class AttemptsContinue(Checker):
    """Attempts are numbered and limited, each choice runs in one place, and a later attempt goes on exactly behind the
    tokens and the text that are there."""

    invariant = "attempts_continue"

    def on_dispatch(self, node: RouterNode, seen: SeenRequest | None, attempt: SubmitAttempt) -> None:
        if seen is None:
            self.fail(f"{attempt.request.request_id} was dispatched although it is not live")
        if attempt.attempt_id != seen.num_attempts + 1:
            self.fail(f"attempt {attempt.attempt_id} of {attempt.request.request_id} follows {seen.num_attempts}")
        for spec in attempt.choices:
            choice = seen.choice(spec.index)
            if choice.place is not None:
                self.fail(f"{attempt.request.request_id} runs twice")
            if choice.num_failures >= node.config.max_attempts or choice.num_moves > MAX_MOVES:
                self.fail(f"{attempt.request.request_id} has more than {node.config.max_attempts} attempts")
            if [*choice.spec.output_token_ids, *choice.emitted] != list(spec.output_token_ids):
                self.fail(f"{attempt.request.request_id} does not go on behind what was emitted")

    def on_submit(self, shard: SimShard, stream: ShardStream, attempt: SubmitAttempt, spec: ChoiceSpec) -> None:
        assert isinstance(attempt.request.sampling, script.Sampling)
        tokens = script.answer(attempt.request.sampling.script_key, spec.index)
        given = tuple(spec.output_token_ids)
        if given != tokens[: len(given)]:
            self.fail(f"{attempt.request.request_id} goes on behind {list(given)}, not {list(tokens)}")
        texts = (script.text_shown(given, len(given)), script.text_of(given))
        if spec.num_delivered_chars not in map(len, texts):
            self.fail(f"{attempt.request.request_id} goes on behind {spec.num_delivered_chars} characters of {texts}")


class PlacementsFit(Checker):
    """A request goes to a shard of its model that takes work, has room, and whose window holds it; to one that is
    suspected only when there is no other."""

    invariant = "placements_fit"

    def on_dispatch(self, node: RouterNode, seen: SeenRequest | None, attempt: SubmitAttempt) -> None:
        shard = node.witness.shards.get(attempt.shard_id)
        if shard is None or seen is None:
            self.fail(f"{attempt.request.request_id} was dispatched to {attempt.shard_id}, which is not there")
        if not shard.can_take(seen) or not shard.has_room:
            self.fail(f"{attempt.request.request_id} was dispatched to {attempt.shard_id}, which cannot take it now")
        if shard not in eligible(node.witness.shards, seen):
            self.fail(f"{attempt.request.request_id} was dispatched to {attempt.shard_id}, where it should not go")
        window = shard.description.max_model_len
        if len(attempt.request.prompt_token_ids) + attempt.max_tokens > window:
            self.fail(f"{attempt.request.request_id} may grow beyond the {window} tokens of {attempt.shard_id}")
        longest = max(len(spec.output_token_ids) for spec in attempt.choices)
        if longest >= attempt.max_tokens:
            self.fail(f"{attempt.request.request_id} was dispatched with nothing left to say")
