"""The hot path: one engine step's output, from a shard's slots to the clients' slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, FINISH_REASON_LENGTH, FINISH_REASON_STOP
from router.core.action_buffer import ActionBuffer
from router.core.actions import Action, SendStep
from router.core.dispatch.attempt_sender import AttemptSender
from router.core.dispatch.refusals import content_filtered, safety_unavailable
from router.core.events import TextFilter
from router.core.fleet.fleet import Shard
from router.core.frames import Finish, Step
from router.core.held_calls import MAX_CALL_SHARE
from router.core.live import Choice, StreamClient
from router.core.load.load_ledger import LoadLedger
from router.core.relay.lifecycle import RETRYABLE_REASONS, Lifecycle
from router.core.relay.screening import Screening
from router.core.uncleared_output import UnclearedOutput

_NONE: Final = ()


class Relay:
    """Costs per token one look-up on the fast path, otherwise a few list appends. No object is made unless the token
    must be withheld."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        attempt_sender: AttemptSender,
        ledger: LoadLedger,
        screening: Screening,
        action_buffer: ActionBuffer,
        *,
        safety_required: bool,
    ) -> None:
        self._lifecycle = lifecycle
        self._attempt_sender = attempt_sender
        self._ledger = ledger
        self._screening = screening
        self._action_buffer = action_buffer
        self._safety_required = safety_required

    def on_step(self, shard: Shard, step: Step, now: float) -> None:
        """Output of slots that are not in use, or were cancelled, is dropped."""
        self.note_pace(shard, step, now)
        if step.starts:
            started = [
                (attempt.key, start.queue_time_seconds)
                for start in step.starts
                if (attempt := shard.attempts.get(start.slot)) is not None
            ]
            self._ledger.note_starts(shard.shard_id, started, now)
            shard.ramp_up(len(started))
            self._attempt_sender.queue.mark_dirty(shard.shard_id)
        for start in step.starts:
            choice = shard.choices.get(start.slot)
            if choice is not None:
                self._lifecycle.start(choice, start, now)
            elif (attempt := shard.attempts.get(start.slot)) is not None:
                self._attempt_sender.note_prefill_chunk_start(attempt, start.num_cached_tokens)
        if step.num_tokens or step.logprobs:
            overfull = self._relay_ragged(shard, step, now)
        else:
            overfull = self._relay_singles(shard, step, now)
        for choice in overfull:
            self._on_overfull(choice, now)
        for finish in step.finishes:
            self._on_finish(shard, finish, now)

    def note_pace(self, shard: Shard, step: Step, now: float) -> None:
        """Record how fast the shard decodes."""
        if shard.health is not None and step.slots and step.slots[0] in shard.attempts:
            view = self._ledger.view(shard.shard_id)
            is_prefilling = bool(view.queued or view.foreign_queued_tokens)
            shard.health.note_step(len(step.token_ids), view.own_running, now, is_prefilling=is_prefilling)

    def forward_fast(self, shard: Shard, step: Step) -> list[Action] | None:
        """Forward a step of one token per entry if all its sequences are on the fast path; when they all belong to one
        client, the arrays are passed on unchanged. Returns None, with nothing done, when a sequence is not on the fast
        path."""
        fast_path = shard.fast_path
        try:
            client_slots = list(map(fast_path.client_slots.__getitem__, step.slots))
        except KeyError:
            return None
        if not len(client_slots) == len(step.token_ids) == len(step.deltas):
            return None
        if fast_path.cleared_by is not None and self._screening.clears_all(step.deltas) is not fast_path.cleared_by:
            return None
        fast_path.note(step.slots[:], step.token_ids, step.deltas)
        client = fast_path.only_client
        if client is None:
            return _by_client(map(fast_path.clients.__getitem__, step.slots), client_slots, step)
        return [SendStep(client.client_id, Step(client_slots, [], step.token_ids, step.deltas))]

    def _relay_singles(self, shard: Shard, step: Step, now: float) -> list[Choice]:
        """Relay one token per entry, without logprobs. Returns the choices that withhold too many tokens."""
        cleared_by = self._screening.clears_all(step.deltas)
        choices, fast_path = shard.choices, shard.fast_path
        on_fast_path, clients = fast_path.client_slots, fast_path.clients
        path_filter = None if fast_path.cleared_by is cleared_by else fast_path.cleared_by
        noted_slots: list[int] = []
        noted_ids: list[int] = []
        noted_deltas: list[str] = []
        fast_path.note(noted_slots, noted_ids, noted_deltas)
        overfull: list[Choice] = []
        for slot, token_id, delta in zip(step.slots, step.token_ids, step.deltas, strict=True):
            client_slot = on_fast_path.get(slot)
            if client_slot is not None and path_filter is not None and delta and path_filter.is_suspicious(delta):
                fast_path.leave(slot)
                client_slot = None
            if client_slot is not None:
                client = clients[slot]
                noted_slots.append(slot)
                noted_ids.append(token_id)
                noted_deltas.append(delta)
            else:
                choice = choices.get(slot)
                if choice is None or not self._forwards(shard, choice, token_id, delta, cleared_by, overfull, now):
                    continue
                client, client_slot = choice.client, choice.client_slot
            out = client.step
            if out is None:
                out = self._action_buffer.step(client)
            out.slots.append(client_slot)
            out.token_ids.append(token_id)
            out.deltas.append(delta)
        return overfull

    def _forwards(
        self,
        shard: Shard,
        choice: Choice,
        token_id: int,
        delta: str,
        cleared_by: TextFilter | None,
        overfull: list[Choice],
        now: float,
    ) -> bool:
        """Return whether a token goes straight to the client. A choice may join the fast path from its second token
        on."""
        choice.output_token_ids.append(token_id)
        num_chars = choice.num_chars
        choice.num_chars = end = num_chars + len(delta)
        withheld = choice.withheld
        if withheld is None:
            if not choice.is_screened:
                if num_chars:
                    shard.fast_path.join(choice, None)
            elif delta:
                self._screening.send(choice, delta)
            return True
        calls = withheld.calls
        if calls is not None and delta:
            calls.read(delta, end)
        if (
            cleared_by is not None
            and delta
            and calls is None
            and withheld.num_clear_chars == num_chars
            and not withheld.entries
            and choice.is_screened
            and (choice.screening_slot is None or choice.prefilter is cleared_by)
            and not choice.request.prompt_verdict_open
        ):
            # The common case, with the result of `_passes_screening`: all text is clear, by this filter.
            if withheld.start is not None:
                self._lifecycle.release_start(choice, withheld, now)
            else:
                shard.fast_path.join(choice, cleared_by)
            withheld.num_clear_chars = end
            withheld.last_shown_char = choice.last_skipped_char = delta[-1]
            choice.num_skipped_chars += end - num_chars
            return True
        if self._passes_screening(choice, withheld, delta, is_plain=cleared_by is not None):
            return True
        withheld.entries.append(((token_id,), delta, choice.num_chars, _NONE))
        withheld.num_tokens += 1
        if withheld.num_tokens > choice.request.max_uncleared_tokens:
            overfull.append(choice)
        elif withheld.num_clear_chars == choice.num_chars:
            self._lifecycle.settle(choice, now)
        return False

    def _passes_screening(self, choice: Choice, withheld: UnclearedOutput, delta: str, *, is_plain: bool) -> bool:
        """Have new text screened, unless the prefilter clears it. Returns whether it can go straight to the client."""
        if choice.is_screened and delta and not self._screening.clear(choice, withheld, delta, is_plain=is_plain):
            self._screening.send(choice, delta)
            return False
        return (
            not withheld.entries
            and withheld.start is None
            and withheld.num_clear_chars == choice.num_chars
            and not choice.request.prompt_verdict_open
            and (withheld.calls is None or not withheld.calls.is_inside)
        )

    def _relay_ragged(self, shard: Shard, step: Step, now: float) -> list[Choice]:
        """Relay any number of tokens per entry, with logprobs. Returns the choices that withhold too many tokens."""
        counts: Sequence[int] = step.num_tokens or [1] * len(step.slots)
        logprobs: dict[int, list[object]] = {}
        for slot, entry in step.logprobs:
            logprobs.setdefault(slot, []).append(entry)
        overfull: list[Choice] = []
        shard.fast_path.end()
        is_plain = self._screening.clears_all(step.deltas) is not None
        position = 0
        for slot, count, delta in zip(step.slots, counts, step.deltas, strict=True):
            token_ids = step.token_ids[position : position + count]
            position += count
            choice = shard.choices.get(slot)
            if choice is None:
                continue
            choice.output_token_ids.extend(token_ids)
            choice.num_chars += len(delta)
            withheld = choice.withheld
            if withheld is None and choice.is_screened and delta:
                self._screening.send(choice, delta)
            elif withheld is not None and withheld.calls is not None and delta:
                withheld.calls.read(delta, choice.num_chars)
            if withheld is None or self._passes_screening(choice, withheld, delta, is_plain=is_plain):
                self._action_buffer.add_tokens(choice, token_ids, delta, logprobs.get(slot, _NONE))
                continue
            withheld.entries.append((token_ids, delta, choice.num_chars, logprobs.get(slot, _NONE)))
            withheld.num_tokens += count
            if withheld.num_tokens > choice.request.max_uncleared_tokens:
                overfull.append(choice)
            elif withheld.num_clear_chars == choice.num_chars:
                self._lifecycle.settle(choice, now)
        return overfull

    def _on_overfull(self, choice: Choice, now: float) -> None:
        """The safety service is so slow that it counts as unavailable for this request, or a tool call is too long."""
        live, withheld = choice.request, choice.withheld
        if not live.num_open_choices or withheld is None:
            return
        if withheld.calls is not None and withheld.calls.has_any:
            self._lifecycle.settle(choice, now)
            max_tokens = MAX_CALL_SHARE * live.max_uncleared_tokens
            if withheld.num_tokens > max_tokens:
                message = (
                    f"A tool call has at most {max_tokens} tokens here: it is sent when all of it has been screened."
                )
                self._lifecycle.halt(choice, withheld.num_clear_chars or 0, content_filtered(message), now)
        elif self._safety_required:
            error = safety_unavailable(live.request.request_id)
            self._lifecycle.end_request(live, FINISH_REASON_ERROR, error, now)
        else:
            self._lifecycle.stop_screening(live, now)

    def _on_finish(self, shard: Shard, finish: Finish, now: float) -> None:
        choice = shard.choices.get(finish.slot)
        attempt = shard.attempts.get(finish.slot) if choice is None else None
        if choice is not None:
            shard.detach(choice)
        is_known = self._attempt_sender.end_slot(shard, finish.slot)
        if shard.health is not None and is_known:
            is_failure = finish.reason == FINISH_REASON_ERROR and (
                finish.error is None or finish.error.reason == ErrorReason.ERROR_REASON_ENGINE_FAILED
            )
            is_good = finish.reason in (FINISH_REASON_STOP, FINISH_REASON_LENGTH)
            shard.health.note_end(finish.slot, now, is_good=is_good, is_failure=is_failure)
        if choice is None:
            if attempt is not None and attempt.prepares is not None:
                self._attempt_sender.legs.on_end(attempt, finish, now)
            return
        error = finish.error
        if finish.reason == FINISH_REASON_ERROR:
            error = error or KvloomError(ErrorReason.ERROR_REASON_ENGINE_FAILED, "The engine failed.")
            if error.reason in RETRYABLE_REASONS:
                if finish.handoff and choice.request.split is not None:
                    choice.request.split.take_back(finish.handoff)
                is_noticed = shard.departure is not None
                self._lifecycle.retry(choice, error, shard.shard_id, now, is_noticed=is_noticed)
                return
        if choice.num_cached_tokens is None:
            choice.num_cached_tokens = max(0, finish.num_cached_tokens - choice.request.num_prepared_tokens)
        client_finish = Finish(choice.client_slot, finish.reason, stop_string=finish.stop_string, error=error)
        client_finish.num_predicted_tokens = finish.num_predicted_tokens
        client_finish.num_accepted_predicted_tokens = finish.num_accepted_predicted_tokens
        client_finish.embedding = finish.embedding
        self._lifecycle.finish(choice, client_finish, now)


def _by_client(clients: Iterable[StreamClient], client_slots: Sequence[int], step: Step) -> list[Action]:
    """One step per client; `clients` has the client of each entry."""
    own_steps: dict[StreamClient, Step] = {}
    for client, slot, token_id, delta in zip(clients, client_slots, step.token_ids, step.deltas, strict=True):
        own = own_steps.get(client)
        if own is None:
            own = own_steps[client] = Step()
        own.slots.append(slot)
        own.token_ids.append(token_id)
        own.deltas.append(delta)
    return [SendStep(client.client_id, own) for client, own in own_steps.items()]
