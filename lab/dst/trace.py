"""The history of a simulation as text: the events that each router handled, and the actions that followed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.finish_reasons import FINISH_REASON_NAMES
from lab.dst.environment import TraceEntry
from lab.dst.scenario import Scenario
from router.core.actions import (
    Action,
    AnswerResampled,
    CancelOnShard,
    CheckPrompt,
    PrefillLegCounted,
    RequestEnded,
    RequestsMoved,
    ScreenAnswers,
    SendStep,
    SequencesPreempted,
    ShardHealthChanged,
    SubmitAttempt,
    WantKvSnapshot,
)
from router.core.events import (
    AnswersScreened,
    ClientGone,
    Event,
    KvEventsArrived,
    KvSnapshotArrived,
    LoadReported,
    PromptVerdict,
    Request,
    RequestArrived,
    RequestCancelled,
    SafetyUp,
    ShardDown,
    ShardUp,
    SlotsCancelled,
    StepArrived,
)
from router.core.frames import Finish, Step


def scenario_lines(scenario: Scenario) -> list[str]:
    """The sizes, settings and kinds of faults that the seed determines."""
    shards = ", ".join(
        f"{s.model} batch {s.max_batch} window {s.max_model_len} blocks {s.num_blocks}x{s.block_size}"
        for s in scenario.shards
    )
    return [
        f"routers {scenario.num_routers}, tenants {len(scenario.tenants)}, shards: {shards}",
        f"{scenario.config}",
        f"faults: {', '.join(sorted(scenario.rates)) or 'none'}",
    ]


def history_lines(trace: Sequence[TraceEntry], num_lines: int) -> list[str]:
    """The newest `num_lines` entries, oldest first."""
    newest = itertools.islice(trace, max(0, len(trace) - num_lines), None)
    return [
        f"{time - 100.0:9.4f} {router} {_event(event)}{' -> ' if actions else ''}{'; '.join(map(_action, actions))}"
        for time, router, event, actions in newest
    ]


def _event(event: Event | str) -> str:
    match event:
        case str():
            return event
        case StepArrived():
            return f"step from {event.shard_id}: {_step(event.step)}"
        case RequestArrived():
            return f"request {_request(event.request)}"
        case SlotsCancelled():
            return f"cancel {event.client_id} slots {list(event.slots)}"
        case RequestCancelled():
            return f"cancel {event.request_id}"
        case ClientGone():
            return f"gone {event.client_id}"
        case ShardUp():
            return f"up {event.shard.incarnation_id}"
        case ShardDown():
            return f"down {event.shard_id}"
        case KvEventsArrived():
            num_stored = sum(len(change.stored) for change in event.changes)
            num_removed = sum(len(change.removed) for change in event.changes)
            return f"kv {event.shard_id} #{event.number} +{num_stored} -{num_removed}"
        case KvSnapshotArrived():
            return f"kv {event.shard_id} snapshot #{event.number}, {len(event.block_hashes)} blocks"
        case LoadReported():
            load = event.load
            draining = " draining" if load.draining else ""
            draining += ", hands over" if load.hand_over else ""
            return f"load {event.shard_id} running {load.num_running} waiting {load.num_waiting}{draining}"
        case PromptVerdict():
            return f"verdict on check {event.check_id}: {'allowed' if event.allowed else 'blocked'}"
        case AnswersScreened():
            clear = dict(zip(event.slots, event.num_clear_chars, strict=True))
            halts = {halt.slot: halt.num_clear_chars for halt in event.halts}
            return f"screened: clear {clear}, halted {halts}, closed {list(event.closed_slots)}"
        case SafetyUp():
            return f"safety up, prompts {event.screens_prompts}, answers {event.screens_answers}"
        case _:
            return type(event).__name__


def _action(action: Action) -> str:
    match action:
        case SendStep():
            return f"send {action.client_id} {_step(action.step)}"
        case SubmitAttempt():
            slots = {spec.slot: len(spec.output_token_ids) for spec in action.choices}
            return f"submit {action.request.request_id} #{action.attempt_id} to {action.shard_id} slots {slots}"
        case CancelOnShard():
            return f"cancel slots {list(action.slots)} on {action.shard_id}"
        case WantKvSnapshot():
            return f"want snapshot of {action.shard_id}"
        case CheckPrompt():
            return f"check {action.check_id}"
        case ScreenAnswers():
            texts = dict(zip(action.slots, action.deltas, strict=True))
            return f"screen {texts}, close {list(action.close_slots)}"
        case ShardHealthChanged():
            return f"{action.shard_id} is {action.state.value} {action.symptom}".rstrip()
        case RequestsMoved():
            return f"moved {action.num_requests} requests off {action.shard_id}"
        case SequencesPreempted():
            return f"preempted slots {list(action.slots)} of {action.tenant} on {action.shard_id}"
        case PrefillLegCounted():
            return f"prefill leg on {action.shard_id}: {action.outcome or 'begun'}"
        case AnswerResampled():
            return (
                f"{action.request_id} continues on {action.shard_id}, {action.variant} instead of {action.from_variant}"
            )
        case RequestEnded():
            return f"ended {action.request_id} {FINISH_REASON_NAMES[action.reason]} {action.num_output_tokens} tokens"
        case _:
            return type(action).__name__


def _request(request: Request) -> str:
    choices = {choice.slot: len(choice.output_token_ids) for choice in request.choices}
    return (
        f"{request.request_id} of {request.client_id} {request.tenant}, {len(request.prompt_token_ids)} prompt tokens, "
        f"{request.tier.name.lower()}, "
        f"max {request.max_tokens}, timeout {request.timeout_seconds:g}, slots {choices}, {request.prompt_text}"
    )


def _step(step: Step) -> str:
    parts: list[str] = []
    if step.starts:
        parts.append(f"starts {[start.slot for start in step.starts]}")
    if step.slots:
        counts = step.num_tokens or [1] * len(step.slots)
        ends = list(itertools.accumulate(counts))
        tokens = {
            slot: step.token_ids[end - count : end] for slot, count, end in zip(step.slots, counts, ends, strict=True)
        }
        parts.append(f"tokens {tokens}")
    parts += [f"end {finish.slot} {_finish(finish)}" for finish in step.finishes]
    return ", ".join(parts)


def _finish(finish: Finish) -> str:
    if finish.error is None:
        return FINISH_REASON_NAMES[finish.reason]
    return ErrorReason.Name(finish.error.reason).removeprefix("ERROR_REASON_").lower()


def join_lines(lines: Iterable[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
