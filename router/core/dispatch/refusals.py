"""The errors of requests and shards that are refused at once."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from kvloom.adapters import unknown_name
from kvloom.errors import KvloomError, context_length_exceeded, invalid_argument, protocol_violation, unsupported
from kvloom.v1.error_reason_pb2 import ErrorReason
from router.core.dispatch.overload import retry_after_seconds
from router.core.events import JUDGE_TIER, Request, ShardDescription
from router.core.fleet.fleet import Fleet
from router.core.live import LiveRequest, StreamClient

MAX_BLOCKS: Final = 2**24
"""KV blocks of one shard: some 200 times as many as eight GPUs hold in blocks of 16 tokens."""
MAX_BATCH: Final = 2**16
"""Sequences in a step, and tokens in a block."""


def check_servable(request: Request, fleet: Fleet, *, may_wait: bool = False) -> KvloomError | None:
    """The reason why the present fleet cannot serve `request`; None when it can. `may_wait`: it can also wait for the
    first shard of its model."""
    if fleet.is_draining and request.tier is not JUDGE_TIER:  # a request that runs may wait for it
        return draining(request.request_id)
    if not fleet.knows(request.model):
        return _model_not_found(unknown_name(request.model, fleet.adapters()))
    shards = fleet.ready(request.model)
    if (not shards or shards[0].is_withdrawn) and fleet.is_withdrawn(request.model) and not request.has_output:
        return _model_not_found(f"The model {request.model!r} is being withdrawn.")
    if (not shards or shards[0].is_asleep) and fleet.is_asleep(request.model) and not request.has_output:
        return model_asleep(request.model, request.request_id)
    if not shards:
        return _check_input(request) if may_wait else no_shard_ready(request.model, request.request_id)
    if request.adapter is not None:
        if not fleet.has_adapter(request.model, request.adapter):
            return adapter_not_found(request)
        shards = [shard for shard in shards if shard.adapters.has(request.adapter)]
        if not shards:
            return no_shard_ready(request.full_name, request.request_id)
        if request.pooling is not None:
            return unsupported(f"The adapter {request.adapter.name!r} gives no embeddings: its model may.", "model")
    error = _check_input(request)
    if error is not None:
        return error
    if request.pooling is not None:
        if not any(shard.can_embed for shard in shards):
            return unsupported(f"The model {request.model!r} gives no embeddings.", "model")
    elif not shards[0].can_generate and not any(shard.can_generate for shard in shards):
        return unsupported(f"The model {request.model!r} generates no text: it gives embeddings only.", "model")
    # Nearly always the first shard's window is wide enough, or as wide as all others.
    if _exceeds_window(request, shards[0].description.max_model_len):
        window = max(shard.description.max_model_len for shard in shards)
        if _exceeds_window(request, window):
            return _context_length_exceeded(request, window)
    return None


def _check_input(request: Request) -> KvloomError | None:
    if not request.prompt_token_ids:
        return invalid_argument("The prompt is empty.", "prompt")
    if request.pooling is None and request.max_tokens is not None and request.max_tokens < 1:
        return invalid_argument(f"max_tokens must be at least 1, got {request.max_tokens}.", "max_tokens")
    return None


def _model_not_found(message: str) -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_MODEL_NOT_FOUND, message, field="model")


def adapter_not_found(request: Request) -> KvloomError:
    """No shard of the model has the request's adapter, or none has the one of this name with which it began."""
    assert request.adapter is not None
    name, is_other = request.full_name, request.has_output
    message = f"The adapter {name!r} does not exist" + (" any more as it was." if is_other else ".")
    return _model_not_found(message)


def draining(request_id: str) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_DRAINING,
        "The router is shutting down; send the request again.",
        retry_after_seconds=retry_after_seconds(request_id),
    )


def shard_lost() -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_SHARD_LOST, "The shard that served this request was lost.", retry_after_seconds=1.0
    )


def request_quarantined() -> KvloomError:
    """The error of a request that may be what has ended two shards."""
    return KvloomError(
        ErrorReason.ERROR_REASON_REQUEST_QUARANTINED,
        "Twice a shard was lost or failed with this request before it had any output; no other one is tried.",
    )


def shard_departed() -> KvloomError:
    """The error of a request whose shard had notice that it ends."""
    return KvloomError(
        ErrorReason.ERROR_REASON_DRAINING, "The shard that served this request has stopped.", retry_after_seconds=1.0
    )


def check_shard(shard: ShardDescription) -> None:
    """Raises KvloomError (PROTOCOL_VIOLATION) for sizes that no engine has, since they bound tables here."""
    if min(shard.block_size, shard.max_batch, shard.max_model_len) < 1:
        raise protocol_violation(f"Shard {shard.shard_id!r} names no block size, batch or window.")
    if shard.num_blocks > MAX_BLOCKS or max(shard.block_size, shard.max_batch) > MAX_BATCH:
        raise protocol_violation(f"Shard {shard.shard_id!r} names sizes that no engine has.")


def check_names(request: Request, client: StreamClient, live: Container[str]) -> KvloomError | None:
    """Checks that the request's id and slots are free. `live` has the ids that are not."""
    if request.request_id in live:
        return KvloomError(
            ErrorReason.ERROR_REASON_DUPLICATE_REQUEST_ID,
            f"A request named {request.request_id!r} is still running.",
            field="request_id",
        )
    slots = [choice.slot for choice in request.choices]
    if not slots or len(set(slots)) != len(slots) or not client.choices.keys().isdisjoint(slots):
        return protocol_violation("Each choice needs a slot that is not in use.")
    return None


def no_shard_ready(model: str, request_id: str) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_NO_SHARD_READY,
        f"No shard that serves {model!r} is ready now.",
        retry_after_seconds=retry_after_seconds(request_id),
    )


def model_asleep(model: str, request_id: str) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_NO_SHARD_READY,
        f"The model {model!r} sleeps now: its memory was freed until an operator wakes it.",
        retry_after_seconds=retry_after_seconds(request_id),
    )


def queue_timeout(request_id: str, waited_seconds: float) -> KvloomError:
    """The request has waited so long that it could not be answered in time any more, or as long as any request may."""
    return KvloomError(
        ErrorReason.ERROR_REASON_QUEUE_TIMEOUT,
        f"No shard had room for this request within {waited_seconds:.3g} seconds.",
        retry_after_seconds=retry_after_seconds(request_id, waited_seconds),
    )


def deadline_exceeded(live: LiveRequest) -> KvloomError:
    """The request has not finished in time, or cannot any more."""
    objectives = live.objectives
    is_own = objectives is not None and objectives.deadline <= live.deadline
    limit = "its deadline allows" if is_own else "its timeout"
    return KvloomError(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, f"The request took longer than {limit}.")


SERVICE_AWAY = "The safety service cannot be reached"


def content_filtered(message: str) -> KvloomError:
    """The safety policy does not allow a text; "": it does not say why."""
    return KvloomError(
        ErrorReason.ERROR_REASON_CONTENT_FILTERED, message or "The safety policy does not allow this content."
    )


def safety_unavailable(request_id: str, cause: str = SERVICE_AWAY) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_SAFETY_UNAVAILABLE,
        f"{cause}, and this deployment serves nothing unscreened.",
        retry_after_seconds=retry_after_seconds(request_id),
    )


def _exceeds_window(request: Request, window: int) -> bool:
    num_prompt_tokens = len(request.prompt_token_ids)
    if request.max_tokens is not None:
        return num_prompt_tokens + request.max_tokens > window
    num_resumed_tokens = max((len(choice.output_token_ids) for choice in request.choices), default=0)
    return num_prompt_tokens + num_resumed_tokens >= window


def _context_length_exceeded(request: Request, window: int) -> KvloomError:
    return context_length_exceeded(
        window, len(request.prompt_token_ids), request.max_tokens, "prompt_token_ids", "stop.max_tokens"
    )
