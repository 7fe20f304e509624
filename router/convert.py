"""Conversions between protobuf messages and the core's own types.

Repeated fields are copied as whole slices, and messages are built by keyword. A frame thus takes one call per field,
whatever the number of its sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar, cast

from kvloom.adapters import MAX_ADAPTERS
from kvloom.errors import KvloomError
from kvloom.limits_state import fill_limits_state, limits_state_to_proto
from kvloom.text.token_ids import prompt_fields
from kvloom.v1 import generation_pb2, kv_event_pb2, router_service_pb2, safety_service_pb2, shard_service_pb2
from router.core.actions import FleetChanged, SubmitAttempt
from router.core.events import (
    AdaptersReported,
    AnswerHalt,
    AnswersScreened,
    ChoiceSpec,
    KvChange,
    KvEventsArrived,
    LoadReported,
    PromptVerdict,
    Request,
    ShardAdapter,
    ShardDescription,
    ShardLoad,
    TierRank,
    class_of,
)
from router.core.fleet.fleet import ModelState
from router.core.frames import Finish, Start, Step
from router.core.objectives import Objectives, ObjectivesOutcome
from router.core.request_end import NO_MOVES, RelocationCounts

M = TypeVar("M")
PLAUSIBLE: Final = (1e-6, 1e9)
"""The range of plausible speeds and times that shards measure. Values outside it would make sums infinite and costs
NaN."""

MAX_SINGLES: Final = 8
"""The most single blocks of different sequences that are joined into one change: as many as the index keeps together
although they are not neighbours."""

# -- steps ------------------------------------------------------------------------------------------------------------


def step_from_frame(frame: generation_pb2.StepFrame) -> Step:
    step = Step(frame.slots[:], frame.num_tokens[:], frame.token_ids[:], frame.deltas[:])
    if frame.logprobs:
        step.logprobs = [(entry.slot, entry) for entry in frame.logprobs]
    if frame.starts:
        step.starts = [
            Start(start.slot, start.num_cached_tokens, start.queue_time_seconds, "", start.prompt_logprobs[:])
            for start in frame.starts
        ]
    if frame.finishes:
        step.finishes = [_finish_from_proto(finish) for finish in frame.finishes]
    return step


def fill_frame(frame: generation_pb2.StepFrame, step: Step) -> None:
    """Writes a step into an empty frame. It works in place because setting a finished frame in its response would copy
    it."""
    frame.slots.extend(step.slots)
    if step.num_tokens:
        frame.num_tokens.extend(step.num_tokens)
    frame.token_ids.extend(step.token_ids)
    frame.deltas.extend(step.deltas)
    if step.logprobs:
        frame.logprobs.extend(logprobs_to_proto(slot, entry) for slot, entry in step.logprobs)
    if step.starts:
        frame.starts.extend(map(start_to_proto, step.starts))
    if step.finishes:
        frame.finishes.extend(map(finish_to_proto, step.finishes))


def logprobs_to_proto(slot: int, entry: object) -> generation_pb2.TokenLogprobs:
    """Sets the client's slot in an entry of `step_from_frame`, which is the shard's message itself, and returns it."""
    assert isinstance(entry, generation_pb2.TokenLogprobs)
    entry.slot = slot
    return entry


def start_to_proto(start: Start) -> generation_pb2.SequenceStart:
    found = generation_pb2.SequenceStart(
        slot=start.slot,
        num_cached_tokens=start.num_cached_tokens,
        shard_id=start.shard_id,
        queue_time_seconds=start.queue_time_seconds,
        prompt_logprobs=cast(Sequence[generation_pb2.TokenLogprobs], start.prompt_logprobs),
        result_cache=start.result_cache,  # pyrefly: ignore[bad-argument-type]  (as below)
        brownout=start.brownout,
        priority_class=start.priority_class,
    )
    if start.limits is not None:
        fill_limits_state(found.limits, start.limits)
    if start.safety_rules:
        found.safety_rules = start.safety_rules
    if start.continuation_ticket:
        found.continuation_ticket = start.continuation_ticket
    return found


def finish_to_proto(finish: Finish) -> generation_pb2.SequenceFinish:
    message = generation_pb2.SequenceFinish(  # Python calls with more than 15 keywords are slow.
        slot=finish.slot,
        reason=finish.reason,  # pyrefly: ignore[bad-argument-type]  (The stubs want the enum's type; ints are fine.)
        num_prompt_tokens=finish.num_prompt_tokens,
        num_cached_tokens=finish.num_cached_tokens,
        num_output_tokens=finish.num_output_tokens,
        stop_string=finish.stop_string,
        error=None if finish.error is None else finish.error.to_proto(),
        num_predicted_tokens=finish.num_predicted_tokens,
        num_accepted_predicted_tokens=finish.num_accepted_predicted_tokens,
        embedding=finish.embedding,
        limited_by=finish.limited_by,
        limits=None if finish.limits is None else limits_state_to_proto(finish.limits),
        num_reasoning_tokens=finish.num_reasoning_tokens,
        result_cache=finish.result_cache,  # pyrefly: ignore[bad-argument-type]
        receipt=finish.receipt,
    )
    if finish.num_retracted_chars:
        message.num_retracted_chars = finish.num_retracted_chars
    if finish.moves is not NO_MOVES:
        message.moves.CopyFrom(_moves_to_proto(finish.moves))
    return message


def _moves_to_proto(moves: RelocationCounts) -> generation_pb2.RequestMoves:
    return generation_pb2.RequestMoves(
        num_preemptions=moves.num_preemptions,
        num_migrations=moves.num_migrations,
        num_failovers=moves.num_failovers,
        continuation=generation_pb2.CONTINUATION_EXACT if moves.is_exact else generation_pb2.CONTINUATION_RESAMPLED,
    )


def _finish_from_proto(finish: generation_pb2.SequenceFinish) -> Finish:
    return Finish(
        finish.slot,
        finish.reason,
        finish.num_prompt_tokens,
        finish.num_cached_tokens,
        finish.num_output_tokens,
        finish.stop_string,
        KvloomError.from_proto(finish.error) if finish.HasField("error") else None,
        finish.num_predicted_tokens,
        finish.num_accepted_predicted_tokens,
        finish.embedding,
        finish.handoff,
    )


# -- shards -----------------------------------------------------------------------------------------------------------


def submit_to_proto(attempt: SubmitAttempt, *, packs_token_ids: bool) -> shard_service_pb2.ShardSubmit:
    """`packs_token_ids` is for a shard that reads packed token ids."""
    request = attempt.request
    submit = shard_service_pb2.ShardSubmit(
        request_id=request.request_id,
        attempt_id=attempt.attempt_id,
        sampling=_message(request.sampling, generation_pb2.SamplingParams),
        stop=_message(request.stop, generation_pb2.StopConditions),
        choices=[_choice_to_proto(choice) for choice in attempt.choices],
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        traceparent=request.traceparent,
        client_request_id=request.client_request_id,
        num_expected_cached_tokens=attempt.num_expected_cached_tokens,
        images=request.images,  # pyrefly: ignore[bad-argument-type]  (opaque to the core: each is a PromptImage)
        pooling=request.pooling,  # pyrefly: ignore[bad-argument-type]  (opaque to the core: a Pooling or None)
        **prompt_fields(request.prompt_token_ids, packed=packs_token_ids),
    )
    submit.stop.max_tokens = attempt.max_tokens
    if attempt.prefill_only:
        submit.prefill_only = True
        submit.stop.min_tokens = min(submit.stop.min_tokens, 1)
    elif attempt.handoff:
        submit.handoff = attempt.handoff
    if request.discards_blocks:
        submit.discards_blocks = True
    if request.kv_share is not None:
        submit.kv_share.owner, submit.kv_share.percent = request.kv_share.owner, request.kv_share.percent
    if request.degradation is not None:
        submit.no_speculation = request.degradation.no_speculation
        # A cap below the least that was asked for is no mistake of the client.
        submit.stop.min_tokens = min(submit.stop.min_tokens, attempt.max_tokens)
    if request.tier is not TierRank.INTERACTIVE or request.priority_class is not None:
        submit.class_rank = class_of(request).rank
    adapter = request.adapter
    if adapter is not None:
        submit.adapter.name, submit.adapter.checksum = adapter
    return submit


def choices_from_proto(choices: list[generation_pb2.Choice]) -> tuple[ChoiceSpec, ...]:
    return tuple(
        [
            ChoiceSpec(choice.slot, choice.index, choice.output_token_ids[:], choice.num_delivered_chars)
            for choice in choices
        ]
    )


def num_image_bytes(request: Request) -> int:
    """The size of a request's images in a frame."""
    images: Sequence[Any] = request.images  # opaque to the core
    return sum(image.ByteSize() for image in images)


def shard_from_proto(info: shard_service_pb2.ShardInfo) -> ShardDescription:
    return ShardDescription(
        shard_id=info.shard_id,
        incarnation_id=info.incarnation_id,
        model=info.model,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_batch=info.max_batch,
        max_model_len=info.max_model_len,
        capabilities=frozenset(info.capabilities),
        variant=info.variant,
        model_version=info.model_version,
        model_checksum=info.model_checksum,
        card_checksum=info.card_checksum,
        embedding_size=info.embedding_size,
        image_tokens=_image_tokens(info),
        engine=info.engine,
        role=info.role,
        yield_tokens=info.yield_tokens,
        reserves_output=info.reserves_output,
    )


def _image_tokens(info: shard_service_pb2.ShardInfo) -> tuple[int, int] | None:
    rule = info.image_tokens
    return (rule.patch_pixels, rule.max_tokens) if rule.patch_pixels and rule.max_tokens else None


def load_from_proto(load: shard_service_pb2.LoadReport) -> ShardLoad:
    return ShardLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_queued_prefill_tokens=load.num_queued_prefill_tokens,
        num_decode_context_tokens=load.num_decode_context_tokens,
        num_available_blocks=load.num_available_blocks,
        prefill_tokens_per_second=_plausible(load.prefill_tokens_per_second),
        decode_step_seconds=_plausible(load.decode_step_seconds),
        draining=load.draining,
        hand_over=load.hand_over,
        withdrawn=load.withdrawn,
        asleep=load.asleep,
        empty_within_seconds=(_plausible(load.empty_within_seconds) or None) if load.draining else None,
        num_own_running=load.num_own_running,
        num_own_waiting=load.num_own_waiting,
        num_own_queued_prefill_tokens=load.num_own_queued_prefill_tokens,
        num_own_decode_context_tokens=load.num_own_decode_context_tokens,
        num_prompt_tokens=load.num_prompt_tokens,
        num_cached_tokens=load.num_cached_tokens,
        num_output_tokens=load.num_output_tokens,
    )


def adapters_from_proto(shard_id: str, reported: shard_service_pb2.AdapterList) -> AdaptersReported:
    adapters = [ShardAdapter(one.name, one.checksum, one.loaded, one.rank) for one in reported.adapters[:MAX_ADAPTERS]]
    return AdaptersReported(shard_id, adapters, _plausible(reported.load_seconds))


def kv_events_and_load_from_frame(
    shard_id: str, frame: shard_service_pb2.ShardServiceConnectResponse
) -> list[KvEventsArrived | LoadReported]:
    """Returns the events for the frame's KV events and its load report. A cache snapshot is not included."""
    events: list[KvEventsArrived | LoadReported] = []
    if frame.HasField("kv_events"):
        events.append(kv_events_from_proto(shard_id, frame.kv_events))
    if frame.more_kv_events:
        events += [kv_events_from_proto(shard_id, batch) for batch in frame.more_kv_events]
    if frame.HasField("load"):
        events.append(LoadReported(shard_id, load_from_proto(frame.load)))
    return events


def _plausible(measured: float) -> float:
    """Returns the measured speed or time if it is plausible, else 0, which means "not known"."""
    return measured if PLAUSIBLE[0] <= measured <= PLAUSIBLE[1] else 0.0


def kv_events_from_proto(shard_id: str, batch: kv_event_pb2.KvEventBatch) -> KvEventsArrived:
    """Joins events of single stored blocks, as decoding sequences produce them, into few changes."""
    changes: list[KvChange] = []
    singles: list[int] | None = None
    for event in batch.events:
        kind = event.WhichOneof("event")
        if kind == "block_stored":
            stored = event.block_stored.block_hashes[:]
            if len(stored) != 1:
                singles = None
            elif singles is not None and len(singles) < MAX_SINGLES:
                singles += stored
                continue
            else:
                singles = stored
            changes.append(KvChange(stored))
            continue
        singles = None
        if kind == "block_removed":
            changes.append(KvChange(removed=event.block_removed.block_hashes[:]))
        elif kind == "all_blocks_cleared":
            changes.append(KvChange(cleared=True))
        # Anything else is an event of a later version, which is ignored.
    return KvEventsArrived(shard_id, batch.number, changes)


def _choice_to_proto(choice: ChoiceSpec) -> generation_pb2.Choice:
    return generation_pb2.Choice(
        slot=choice.slot,
        index=choice.index,
        output_token_ids=choice.output_token_ids,
        num_delivered_chars=choice.num_delivered_chars,
    )


# -- safety -----------------------------------------------------------------------------------------------------------


def verdict_from_proto(verdict: safety_service_pb2.PromptVerdict) -> PromptVerdict:
    """Everything but an explicit ALLOW blocks the prompt."""
    allowed = verdict.decision == safety_service_pb2.DECISION_ALLOW
    found, rules = verdict.finding, tuple(verdict.rules)
    return PromptVerdict(
        verdict.check_id,
        allowed,
        found.message,
        found.rule_failed,
        found.fails_closed,
        rules,
        verdict.unknown_guardrail,
    )


def screened_from_proto(response: safety_service_pb2.ScreenResponse) -> AnswersScreened:
    return AnswersScreened(
        slots=response.slots[:],
        num_clear_chars=response.num_clear_chars[:],
        halts=[
            AnswerHalt(halt.slot, halt.num_clear_chars, found.message, found.rule_failed, found.fails_closed)
            for halt in response.halts
            for found in (halt.finding,)
        ],
        closed_slots=response.closed_slots[:],
        flagged_slots=response.flagged_slots[:],
    )


# -- the fleet --------------------------------------------------------------------------------------------------------


def fleet_to_proto(fleet: FleetChanged) -> router_service_pb2.FleetState:
    return router_service_pb2.FleetState(
        models=[_model_to_proto(model) for model in fleet.models],
        draining=fleet.draining,
        reads_packed_token_ids=True,
        reads_submit_request=True,
    )


def _model_to_proto(model: ModelState) -> router_service_pb2.ModelInfo:
    rule = model.image_tokens
    return router_service_pb2.ModelInfo(
        image_tokens=None if rule is None else generation_pb2.ImageTokens(patch_pixels=rule[0], max_tokens=rule[1]),
        name=model.name,
        num_ready_shards=model.num_ready_shards,
        max_model_len=model.max_model_len,
        capabilities=sorted(model.capabilities),
        variants=sorted(model.variants),
        version=model.identity.version,
        checksum=model.identity.checksum,
        card_checksum=model.identity.card_checksum,
        embedding_size=model.embedding_size,
        adapters=[
            router_service_pb2.AdapterInfo(
                name=adapter.name,
                checksum=adapter.checksum,
                num_ready_shards=adapter.num_ready_shards,
                rank=adapter.rank,
            )
            for adapter in model.adapters
        ],
        withdrawn=model.is_withdrawn,
        brownout_step=model.brownout_step,
    )


def objectives_from_proto(wanted: router_service_pb2.Objectives) -> Objectives:
    return Objectives(
        deadline_seconds=wanted.deadline_ms / 1e3 if wanted.HasField("deadline_ms") else None,
        ttft_seconds=wanted.ttft_ms / 1e3 if wanted.HasField("ttft_ms") else None,
        tpot_seconds=wanted.tpot_ms / 1e3 if wanted.HasField("tpot_ms") else None,
        elapsed_seconds=wanted.elapsed_ms / 1e3,
        is_admitted=wanted.admitted,
    )


def objectives_outcome_to_proto(outcome: ObjectivesOutcome) -> router_service_pb2.ObjectivesOutcome:
    wanted = outcome.wanted
    return router_service_pb2.ObjectivesOutcome(
        wanted=router_service_pb2.Objectives(
            deadline_ms=_milliseconds(wanted.deadline_seconds),
            ttft_ms=_milliseconds(wanted.ttft_seconds),
            tpot_ms=_milliseconds(wanted.tpot_seconds),
            elapsed_ms=wanted.elapsed_seconds * 1e3,
            admitted=wanted.is_admitted,
        ),
        predicted_ttft_seconds=outcome.predicted_ttft_seconds,
        deadline_met=outcome.deadline_met,
        ttft_met=outcome.ttft_met,
        tpot_met=outcome.tpot_met,
        refused="" if outcome.refused is None else outcome.refused.value,
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _message(value: object, kind: type[M]) -> M | None:
    """Returns a message that the core has carried as an opaque object."""
    assert value is None or isinstance(value, kind)
    return value
