"""How choices and requests progress and end: release of withheld output, failover, cancellation, and the single end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import (
    FINISH_REASON_CONTENT_FILTER,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    RESULT_CACHE_USE_HIT,
    FinishReason,
)
from router.core.action_buffer import ActionBuffer
from router.core.actions import (
    AnswerCompleted,
    AnswerFlagged,
    CancelOnShard,
    CompletedChoice,
    RequestEnded,
    SequencesPreempted,
)
from router.core.dispatch.attempt_sender import AttemptSender
from router.core.dispatch.fair_shares import MAX_MOVES, Preemption
from router.core.dispatch.refusals import adapter_not_found, no_shard_ready, request_quarantined
from router.core.events import CachedChoice, Request
from router.core.fleet.fleet import Fleet
from router.core.frames import Finish, Start
from router.core.live import Choice, LiveRequest, StreamClient
from router.core.objectives import LiveObjectives, ObjectivesOutcome
from router.core.relay.screening import Screening
from router.core.request_end import end_of
from router.core.request_hook import RequestHook
from router.core.request_usage import RequestUsage, UsageMeter
from router.core.tenancy.limiter import Limiter
from router.core.tenancy.request_charge import RequestCharge
from router.core.uncleared_output import UnclearedOutput

RETRYABLE_REASONS: Final = frozenset(
    {
        ErrorReason.ERROR_REASON_ENGINE_FAILED,
        ErrorReason.ERROR_REASON_SHARD_LOST,
        ErrorReason.ERROR_REASON_DRAINING,
        ErrorReason.ERROR_REASON_QUEUE_FULL,
        ErrorReason.ERROR_REASON_NO_SHARD_READY,
        ErrorReason.ERROR_REASON_ADAPTER_NOT_FOUND,
    }
)
"""Errors of a shard that may not occur on another shard."""
MAX_STRIKES: Final = 2
"""How often shards may be lost or fail with a choice before it has any output. One that is killed by the first thing it
computes has none, and would end shard after shard; one with output has shown that it can be computed."""
_STRIKES: Final = (ErrorReason.ERROR_REASON_SHARD_LOST, ErrorReason.ERROR_REASON_ENGINE_FAILED)

_COMPLETE: Final = (FINISH_REASON_STOP, FINISH_REASON_LENGTH)


class Lifecycle:
    """Live requests by name, and clients by name."""

    def __init__(
        self,
        fleet: Fleet,
        attempt_sender: AttemptSender,
        screening: Screening,
        action_buffer: ActionBuffer,
        max_attempts: int,
        limiter: Limiter | None = None,
        hook: RequestHook | None = None,
    ) -> None:
        self.requests: dict[str, LiveRequest] = {}
        self.clients: dict[str, StreamClient] = {}
        self._fleet = fleet
        self._attempt_sender = attempt_sender
        self._service = attempt_sender.service
        self._screening = screening
        self._action_buffer = action_buffer
        self._max_attempts = max_attempts
        self._limiter = limiter
        self._hook = hook

    def client(self, client_id: str) -> StreamClient:
        client = self.clients.get(client_id)
        if client is None:
            client = self.clients[client_id] = StreamClient(client_id)
        return client

    def add(self, live: LiveRequest, client: StreamClient) -> None:
        self.requests[live.request.request_id] = live
        for choice in live.choices:
            client.choices[choice.client_slot] = choice

    def drop_idle_clients(self, clients: Iterable[StreamClient]) -> None:
        """Clients are kept only while they have live choices."""
        for client in clients:
            if not client.choices:
                self.clients.pop(client.client_id, None)

    def leave_fast_paths(self) -> None:
        """Take every choice off the fast path: a verdict of the safety service, or its connection or loss, may concern
        any choice."""
        for shard in self._fleet.shards.values():
            shard.fast_path.end()

    # -- progress ------------------------------------------------------------------------------------------------

    def start(self, choice: Choice, start: Start, now: float) -> None:
        """A shard has produced the choice's first token. Only the first attempt's start is sent to the client."""
        if choice.num_cached_tokens is not None:
            return
        live = choice.request
        request, num_cached_tokens = live.request, max(0, start.num_cached_tokens - live.num_prepared_tokens)
        if live.split is not None and live.split.is_used:
            num_cached_tokens = live.split.num_cached_tokens
        if request.most_cached_tokens is not None:
            num_cached_tokens = min(num_cached_tokens, request.most_cached_tokens)
        choice.num_cached_tokens = num_cached_tokens = min(num_cached_tokens, len(request.prompt_token_ids))
        if choice is live.choices[0]:
            live.num_cached_tokens = num_cached_tokens
            prediction = live.prediction
            if prediction is not None and live.num_attempts == 1:
                prediction.started_after_seconds = now - live.arrived_at
                if not live.num_prefill_chunks:
                    prediction.engine_queue_seconds = start.queue_time_seconds
        client_start = Start(choice.client_slot, num_cached_tokens, start.queue_time_seconds, choice.shard_id)
        client_start.prompt_logprobs = start.prompt_logprobs
        client_start.result_cache = live.result_cache
        if request.degradation is not None:
            client_start.brownout = str(request.degradation)
        if request.priority_class is not None:
            client_start.priority_class = request.priority_class.name
        if request.guardrails or request.tells_safety_rules:
            client_start.safety_rules = live.safety_rules
        if choice.withheld is not None:
            choice.withheld.start = client_start
        else:
            self._send_start(choice, client_start, now)

    def settle(self, choice: Choice, now: float) -> None:
        """Send the withheld output that may be shown, and end the choice if that was all of it."""
        withheld = choice.withheld
        if withheld is None or choice.request.prompt_verdict_open:
            return
        clear = withheld.take_clear()
        all_clear = not withheld.entries and withheld.num_clear_chars is None
        if clear is not None or all_clear:
            self.release_start(choice, withheld, now)
        if clear is not None:
            self._action_buffer.add_tokens(choice, *clear)
        if all_clear:
            choice.withheld = None
            if withheld.finish is not None:
                self._end(choice, withheld.finish, now)

    def release_start(self, choice: Choice, withheld: UnclearedOutput, now: float) -> None:
        """Send the start, because text that may be shown follows it."""
        if withheld.start is not None:
            self._send_start(choice, withheld.start, now)
            withheld.start = None

    def finish(self, choice: Choice, finish: Finish, now: float) -> None:
        """The shard will send nothing more for the choice. Withheld output is sent first, then the finish."""
        withheld = choice.withheld
        if withheld is None:
            self._end(choice, finish, now)
            return
        withheld.finish = finish
        if finish.stop_string and choice.is_screened:
            self._screening.send_stop_string(choice, withheld, finish.stop_string)
        elif choice.screening_slot is None and withheld.num_clear_chars == choice.num_chars:
            withheld.clear_all()
        self._screening.close(choice)
        self.settle(choice, now)

    def halt(self, choice: Choice, num_clear_chars: int, error: KvloomError, now: float) -> None:
        """The safety service stops an answer: nothing after `num_clear_chars` may be shown. What was shown before its
        verdict cannot be taken back here; the client is told how much that is."""
        self._leave_shard(choice, now)
        self._screening.forget(choice)
        finish = Finish(choice.client_slot, FINISH_REASON_CONTENT_FILTER, error=error)
        withheld = choice.withheld
        num_shown = choice.num_chars - (0 if withheld is None else withheld.num_chars)
        finish.num_retracted_chars = max(0, num_shown - num_clear_chars)
        if withheld is None:
            self._end(choice, finish, now)
            return
        self._forget_tokens(choice, withheld.cut(num_clear_chars))
        withheld.finish = finish
        self.settle(choice, now)

    def stop_screening(self, live: LiveRequest, now: float) -> None:
        """Show everything, because verdicts are no longer awaited."""
        live.is_screened = False
        live.prompt_verdict_open = False
        for choice in live.choices:
            if choice.shard_id:
                self._fleet.shards[choice.shard_id].fast_path.leave(choice.shard_slot)
            choice.is_screened = False
            self._screening.forget(choice)
            choice.screening_slot = None
            if choice.withheld is not None:
                choice.withheld.clear_all()
            self.settle(choice, now)

    def retry(self, choice: Choice, error: KvloomError, shard_id: str, now: float, *, is_noticed: bool = False) -> None:
        """A shard failed the choice, which now runs nowhere: it waits to continue on another shard, after the tokens it
        has. `is_noticed`: the shard had notice that it ends."""
        live = choice.request
        is_drained = error.reason == ErrorReason.ERROR_REASON_DRAINING
        if is_drained and (is_noticed or choice.num_moves < MAX_MOVES):
            choice.num_moves += 1  # a shard that stops is no failed attempt
        # A hand-off may be what the engine could not use: then nothing is said of the request.
        is_fruitless = len(choice.output_token_ids) == choice.num_resumed_tokens and live.split is None
        if error.reason in _STRIKES and is_fruitless:
            choice.num_strikes += 1
        if choice.is_at_limit:
            self.finish(choice, Finish(choice.client_slot, FINISH_REASON_LENGTH), now)
        elif choice.num_strikes >= MAX_STRIKES:
            self.end(choice, FINISH_REASON_ERROR, request_quarantined(), now)
        elif choice.num_attempts - choice.num_moves >= self._max_attempts:
            self.end(choice, FINISH_REASON_ERROR, error, now)
        else:
            live.avoid_shard_id = shard_id
            live.failure = error
            moves = live.moves
            live.moves = moves.with_migration(is_noticed=is_noticed) if is_drained else moves.with_failover()
            live.pending.append(choice)
            if live.left_at is None:
                live.left_at = now
            if live.usage is not None:
                live.usage.release(now)
            self._attempt_sender.queue.check_unschedulable = True
            if not live.is_queued:
                self._attempt_sender.queue.wait_for_any(live, now)

    def preempt(self, preemption: Preemption, now: float) -> None:
        """Stop sequences on their shard; they wait to continue after the tokens they have, like those of a shard that
        failed."""
        shard, tenant, choices, is_for_class = preemption
        slots = [choice.shard_slot for choice in choices]
        self._action_buffer.add(CancelOnShard(shard.shard_id, slots))
        self._action_buffer.add(SequencesPreempted(shard.shard_id, tenant, slots))
        self._attempt_sender.queue.check_unschedulable = True
        for choice in choices:
            shard.detach(choice)
            choice.num_moves += 1
            live = choice.request
            live.moves = live.moves.with_preemption()
            live.is_displaced = is_for_class
            live.pending.append(choice)
            if live.left_at is None:
                live.left_at = now
            if live.usage is not None:
                live.usage.release(now)
            if not live.is_queued:
                self._attempt_sender.queue.wait_for_any(live, now)

    def give_up(self, live: LiveRequest, now: float) -> None:
        """End the choices of the request that wait for a shard that does not exist."""
        request = live.request
        error = live.failure or no_shard_ready(request.model, request.request_id)
        has_adapter = request.adapter is None or self._fleet.has_adapter(request.model, request.adapter)
        if live.failure is None and not has_adapter:
            error = adapter_not_found(request)
        for choice in list(live.pending):
            self.end(choice, FINISH_REASON_ERROR, error, now)

    def replay(self, live: LiveRequest, cached: Sequence[CachedChoice], now: float) -> None:
        """Send a whole answer from the result cache, in the pieces in which it was generated, and end it. `cached` has
        an entry for each choice."""
        parts = list(zip(live.choices, cached, strict=True))
        for choice, stored in parts:
            choice.num_cached_tokens = num_cached_tokens = stored.finish.num_cached_tokens
            if stored.token_ids:
                start = Start(choice.client_slot, num_cached_tokens, result_cache=live.result_cache)
                if live.request.priority_class is not None:
                    start.priority_class = live.request.priority_class.name
                self._send_start(choice, start, now)
            choice.output_token_ids.extend(stored.token_ids)
            choice.num_chars = sum(map(len, stored.deltas))
        step = self._action_buffer.step(live.choices[0].client)
        for position in range(max(len(stored.token_ids) for stored in cached)):  # the choices together, as in a batch
            for choice, stored in parts:
                if position < len(stored.token_ids):
                    step.slots.append(choice.client_slot)
                    step.token_ids.append(stored.token_ids[position])
                    step.deltas.append(stored.deltas[position])
        # Never as a plain step, whose slots are all different.
        step.num_tokens += [1] * (len(step.slots) - len(step.num_tokens))
        step.has_replay = True
        for choice, stored in parts:
            finish = stored.finish
            ended = Finish(choice.client_slot, finish.reason, stop_string=finish.stop_string)
            ended.num_predicted_tokens = finish.num_predicted_tokens
            ended.num_accepted_predicted_tokens = finish.num_accepted_predicted_tokens
            ended.embedding = finish.embedding
            self._end(choice, ended, now)

    # -- ends -----------------------------------------------------------------------------------------------------

    def end(self, choice: Choice, reason: FinishReason.ValueType, error: KvloomError | None, now: float) -> None:
        """End the choice now, whatever its state; withheld output is dropped."""
        self._leave_shard(choice, now)
        if choice.withheld is not None:
            self._forget_tokens(choice, choice.withheld.num_tokens)
            choice.withheld = None
        self._end(choice, Finish(choice.client_slot, reason, error=error), now)

    def end_request(
        self, live: LiveRequest, reason: FinishReason.ValueType, error: KvloomError | None, now: float
    ) -> None:
        for choice in live.choices:
            if not choice.is_done:
                self.end(choice, reason, error, now)

    def _leave_shard(self, choice: Choice, now: float) -> None:
        """Cancel the choice where it runs, or remove it from the queue, and cancel what prepares its request. Its slot
        stays in use until the shard has ended it."""
        live = choice.request
        if choice.shard_id:
            shard = self._fleet.shards[choice.shard_id]
            shard.fast_path.leave(choice.shard_slot)
            self._action_buffer.cancel(choice)
            shard.detach(choice)
        elif choice in live.pending:
            live.pending.remove(choice)
            if live.is_queued and not live.pending:
                self._attempt_sender.queue.leave(live)
        if live.split is not None:
            self._attempt_sender.legs.cancel(live, live.split, now)

    def _forget_tokens(self, choice: Choice, count: int) -> None:
        """Forget withheld tokens that no client will get: they are not output."""
        if count:
            del choice.output_token_ids[-count:]

    def _send_start(self, choice: Choice, start: Start, now: float) -> None:
        if choice.request.first_sent_at is None:
            choice.request.first_sent_at = now
            if self._hook is not None and not choice.request.cached:
                self._hook.note_first_token(choice.request, now)
            issue_ticket = choice.request.request.issue_ticket
            if issue_ticket is not None:
                start.continuation_ticket = issue_ticket(start.num_cached_tokens)
        if self._limiter is not None and choice.request.charge is not None:
            start.limits = self._limiter.state(choice.request.charge, now)
        self._action_buffer.step(choice.client).starts.append(start)

    def _end(self, choice: Choice, finish: Finish, now: float) -> None:
        assert not choice.is_done
        choice.is_done = True
        self._screening.forget(choice)
        if self._service.is_counting:
            self._service.settle(choice)
        live, client, num_output_tokens = choice.request, choice.client, len(choice.output_token_ids)
        request = live.request
        if finish.error is not None:
            end = end_of(finish.reason, is_admitted=live.is_admitted, was_sent=live.num_attempts > 0)
            finish.error = finish.error.ended(end.value)
        finish.num_prompt_tokens = len(request.prompt_token_ids)
        finish.num_cached_tokens = choice.num_cached_tokens or 0
        finish.num_output_tokens = num_output_tokens
        finish.moves = live.moves
        del client.choices[choice.client_slot]
        self._action_buffer.step(client).finishes.append(finish)
        live.num_output_tokens += num_output_tokens - choice.num_resumed_tokens
        if live.usage is not None and request.count_reasoning is not None:
            live.usage.num_reasoning_tokens += self._count_reasoning(request, choice, finish)
        live.note_end(finish.reason, finish.error)
        live.num_open_choices -= 1
        if live.charge is not None:
            self._end_charged(live, live.charge, finish, now)
        kept = live.kept_ends
        if kept is not None:
            finish.result_cache = live.result_cache
            kept.append((choice, finish))
        if not live.num_open_choices:
            del self.requests[request.request_id]
            if kept is not None and live.ended_with[0] in _COMPLETE:
                self._action_buffer.add(_answer_completed(live, kept))
            live.kept_ends = None
            if live.num_output_tokens and request.max_tokens != 0:
                self._attempt_sender.note_answer(live)
            if self._hook is not None and live.first_sent_at is None:
                self._hook.note_end_without_token(live, now)
            self._action_buffer.add(request_ended(live, now))
            if live.is_flagged:
                output = [(one.index, one.output_token_ids) for one in live.choices]
                self._action_buffer.add(AnswerFlagged(request, output, live.last_shard_id, live.is_exact))
            # Request and choices refer to each other: without this they would stay until the garbage collector runs.
            live.choices = []

    def _count_reasoning(self, request: Request, choice: Choice, finish: Finish) -> int:
        """The client is told all of the choice's. Returned are those that the record's `num_output_tokens` counts."""
        assert request.count_reasoning is not None
        token_ids = choice.output_token_ids
        finish.num_reasoning_tokens = num_reasoning = request.count_reasoning(token_ids)
        num_others = choice.num_resumed_tokens if request.num_claimed_tokens else request.num_foreign_tokens
        if num_others:  # A request with foreign tokens has one choice.
            num_reasoning -= request.count_reasoning(token_ids[:num_others])
        return num_reasoning

    def _end_charged(self, live: LiveRequest, charge: RequestCharge, finish: Finish, now: float) -> None:
        """A choice of a request with limits ends. With its last one, it is settled what the request has used."""
        is_cut_short = charge.max_tokens is not None and finish.num_output_tokens >= charge.max_tokens
        if is_cut_short and finish.reason == FINISH_REASON_LENGTH:
            finish.limited_by = charge.capped_by
        if live.num_open_choices or self._limiter is None:
            return
        reason = live.ended_with[0]
        self._limiter.settle(
            charge,
            live.num_cached_tokens,
            live.num_output_tokens + charge.num_resumed_tokens,
            _num_reasoning(live),
            was_dispatched=live.num_attempts > 0 or charge.is_result_cache_hit,
            has_answer=_has_answer(live, live.num_output_tokens),
            failed=reason == FINISH_REASON_ERROR,
        )
        if live.first_sent_at is None:
            finish.limits = self._limiter.state(charge, now)


def _answer_completed(live: LiveRequest, ends: Iterable[tuple[Choice, Finish]]) -> AnswerCompleted:
    return AnswerCompleted(
        live.ticket,
        live.request,
        [CompletedChoice(one.index, one.output_token_ids, one.num_chars, finish) for one, finish in ends],
        live.last_shard_id,
        live.result_cache == RESULT_CACHE_USE_HIT,
        live.is_exact,
        live.is_screened,
    )


def request_ended(live: LiveRequest, now: float) -> RequestEnded:
    """The record of a request's end, from the figures kept while it was live."""
    request = live.request
    reason, error = live.ended_with
    dispatched_at = now if live.first_dispatched_at is None else live.first_dispatched_at
    return RequestEnded(
        request.request_id,
        request.tenant,
        request.model,
        live.last_shard_id,
        live.num_attempts,
        reason,
        error.reason if error is not None else 0,
        request.num_prompt_tokens,  # Python calls with more than 15 keywords are slow.
        live.num_cached_tokens,
        num_output_tokens=live.num_output_tokens,
        queue_time_seconds=dispatched_at - live.arrived_at,
        ttft_seconds=None if live.first_sent_at is None else live.first_sent_at - live.arrived_at,
        e2e_latency_seconds=now - live.arrived_at,
        max_tokens=request.max_tokens,
        num_choices=len(live.choices),
        client_id=request.client_id,
        client_request_id=request.client_request_id,
        traceparent=request.traceparent,
        usage=None if live.usage is None else _usage(live, live.usage, live.num_output_tokens, now),
        is_result_cache_hit=live.result_cache == RESULT_CACHE_USE_HIT,
        is_admitted=live.is_admitted,
        moves=live.moves,
        priority_class=live.priority_class,
        objectives=None if live.objectives is None else _objectives_outcome(live, live.objectives, now),
        prediction=live.prediction,
    )


def _objectives_outcome(live: LiveRequest, objectives: LiveObjectives, now: float) -> ObjectivesOutcome:
    tokens_per_choice = live.num_output_tokens / len(live.choices)
    name, reason = live.priority_class.name, live.ended_with[0]
    return objectives.outcome(name, reason, live.first_sent_at, tokens_per_choice, now)


def request_progress(live: LiveRequest, now: float) -> RequestEnded:
    """The record that there would be if the request ended now. Tokens on the fast path are not in it."""
    num_open_tokens = 0
    for choice in live.choices:
        if not choice.is_done:
            num_withheld = 0 if choice.withheld is None else choice.withheld.num_tokens
            num_open_tokens += len(choice.output_token_ids) - num_withheld - choice.num_resumed_tokens
    ended = request_ended(live, now)
    num_output_tokens = live.num_output_tokens + num_open_tokens
    usage = None if live.usage is None else _usage(live, live.usage, num_output_tokens, now)
    return msgspec.structs.replace(ended, num_output_tokens=num_output_tokens, usage=usage)


def _usage(live: LiveRequest, meter: UsageMeter, num_output_tokens: int, now: float) -> RequestUsage:
    """`num_output_tokens` without those that it had already."""
    charge = live.charge
    num_reasoning = _num_reasoning(live)
    if charge is None:
        return meter.usage(live.request, num_output_tokens, num_reasoning, now)
    has_answer = _has_answer(live, num_output_tokens)
    num_whole = num_output_tokens + charge.num_resumed_tokens
    charges = charge.charges(live.num_cached_tokens, num_whole, num_reasoning, has_answer=has_answer)
    return meter.usage(live.request, num_output_tokens, num_reasoning, now, charges, charge.describe())


def _num_reasoning(live: LiveRequest) -> int:
    """Tokens of reasoning that its usage record has: those of the choices that have ended."""
    request = live.request
    num_here = 0 if live.usage is None else live.usage.num_reasoning_tokens
    return num_here + request.num_ended_reasoning_tokens


def _has_answer(live: LiveRequest, num_output_tokens: int) -> bool:
    """True when the request's answer costs anything, as in its usage record."""
    num_resumed = 0 if live.charge is None else live.charge.num_resumed_tokens
    if num_output_tokens + num_resumed > 0:
        return True
    if not live.num_attempts and live.result_cache != RESULT_CACHE_USE_HIT:
        return False
    return not live.num_open_choices and live.ended_with[0] in (FINISH_REASON_STOP, FINISH_REASON_LENGTH)
