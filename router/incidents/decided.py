"""The decisions among a core's actions, small enough to be logged with every event."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from typing import Any

from router.core.actions import (
    Action,
    CancelOnShard,
    CheckPrompt,
    RequestEnded,
    SendStep,
    ShardHealthChanged,
    SubmitAttempt,
)

Decision = list[Any]
"""Says what was decided, and about what. Equal decisions have equal lists, also when they were read from JSON."""


def raised(error: Exception) -> Decision:
    """The core has refused the event, or failed."""
    return ["raised", type(error).__name__]


def decisions(actions: Iterable[Action]) -> list[Decision]:
    found: list[Decision] = []
    for action in actions:
        match action:
            case SendStep():
                step = action.step
                sent = array("q", [*step.slots, *step.num_tokens])
                ends = [[finish.slot, finish.reason] for finish in step.finishes]
                found.append(["send", action.client_id, len(step.token_ids), zlib.crc32(sent), ends])
            case SubmitAttempt():
                slots = [choice.slot for choice in action.choices]
                given = [len(choice.output_token_ids) for choice in action.choices]
                name = action.request.request_id or action.prepares
                found.append(["submit", name, action.attempt_id, action.shard_id, slots, given, action.max_tokens])
            case CancelOnShard():
                found.append(["cancel", action.shard_id, list(action.slots)])
            case RequestEnded():
                found.append(["end", action.request_id, action.reason, action.error_reason, action.num_output_tokens])
            case ShardHealthChanged():
                found.append(["health", action.shard_id, action.state.value, action.symptom])
            case CheckPrompt():
                found.append(["check", action.request_id])
            case _:
                pass
    return found
