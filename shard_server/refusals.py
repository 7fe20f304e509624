"""The errors that a shard answers with, each worded once."""

from __future__ import annotations

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, SequenceFinish


def refusal(slot: int, error: KvloomError) -> SequenceFinish:
    """The end of a sequence that never began."""
    return SequenceFinish(slot=slot, reason=FINISH_REASON_ERROR, error=error.to_proto())


def engine_failed() -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_ENGINE_FAILED, "The engine failed while it served this request.")


def draining() -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_DRAINING, "This shard takes no new requests: it is draining.")


def stopping() -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_DRAINING, "The shard that served this request has stopped.", retry_after_seconds=1.0
    )


def queue_full(num_sequences: int) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_QUEUE_FULL,
        f"This shard has {num_sequences} sequences running or waiting and takes no more.",
        retry_after_seconds=1.0,
    )
