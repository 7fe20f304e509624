"""Which requests are refused at once, and with what words."""

from __future__ import annotations

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from router.core.events import Request
from router.core.fleet import Fleet

RETRY_AFTER_SECONDS = 1.0


def check_servable(request: Request, fleet: Fleet) -> KvloomError | None:
    """Why the fleet as it is cannot serve `request`; None when it can."""
    if fleet.is_draining:
        return KvloomError(
            ErrorReason.ERROR_REASON_DRAINING,
            "The router is shutting down; send the request again.",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )
    if not fleet.knows(request.model):
        return KvloomError(
            ErrorReason.ERROR_REASON_MODEL_NOT_FOUND, f"The model {request.model!r} does not exist.", field="model"
        )
    shards = fleet.ready(request.model)
    if not shards:
        return no_shard_ready(request.model)
    if not request.prompt_token_ids:
        return invalid_argument("The prompt is empty.", "prompt")
    if request.max_tokens is not None and request.max_tokens < 1:
        return invalid_argument(f"max_tokens must be at least 1, got {request.max_tokens}.", "max_tokens")
    return _check_window(request, max(shard.description.max_model_len for shard in shards))


def no_shard_ready(model: str) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_NO_SHARD_READY,
        f"No shard that serves {model!r} is ready now.",
        retry_after_seconds=RETRY_AFTER_SECONDS,
    )


def queue_full() -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_QUEUE_FULL,
        "Too many requests are waiting; try again later.",
        retry_after_seconds=RETRY_AFTER_SECONDS,
    )


def safety_unavailable() -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_SAFETY_UNAVAILABLE,
        "The safety service cannot be reached, and this deployment serves nothing unscreened.",
        retry_after_seconds=RETRY_AFTER_SECONDS,
    )


def _check_window(request: Request, window: int) -> KvloomError | None:
    num_prompt_tokens = len(request.prompt_token_ids)
    num_given_tokens = max((len(choice.output_token_ids) for choice in request.choices), default=0)
    if request.max_tokens is None:
        if num_prompt_tokens + num_given_tokens < window:
            return None
        detail = f"your prompt has {num_prompt_tokens} tokens, which leaves no room for an answer"
    else:
        num_tokens = num_prompt_tokens + request.max_tokens
        if num_tokens <= window:
            return None
        detail = (
            f"you requested {num_tokens} tokens ({num_prompt_tokens} in the prompt, {request.max_tokens} in the answer)"
        )
    return KvloomError(
        ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED,
        f"The model's context window is {window} tokens; {detail}. Shorten the prompt or the answer.",
        field="prompt",
    )
