"""What a router is asked for, and how far its answer has come."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

from kvloom.v1 import generation_pb2, router_service_pb2


class ChoiceProgress:
    """What the sink has heard of one choice: another attempt goes on behind it."""

    __slots__ = ("index", "is_done", "num_cached_tokens", "num_chars", "token_ids")

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: array[int] = array("I")
        """Four bytes a token: thousands of long answers are kept."""
        self.num_chars = 0
        """Unicode code points of their text that were delivered."""
        self.num_cached_tokens: int | None = None
        """Of the first attempt that started; None: it has not."""
        self.is_done = False


@dataclasses.dataclass(slots=True)
class LinkRequest:
    """A request as the caller describes it; slots are the link's own business."""

    request_id: str
    model: str
    prompt_token_ids: Sequence[int]
    prompt_text: str
    sampling: generation_pb2.SamplingParams
    stop: generation_pb2.StopConditions
    n: int = 1
    timeout_seconds: float = 0.0
    tenant: str = ""
    traceparent: str = ""
    session_key: str = ""
    """See GenerateRequest in router_service.proto."""
    tier: router_service_pb2.Tier = router_service_pb2.TIER_UNSPECIFIED
    """How urgent it is."""
    partial_choices: Sequence[ChoiceProgress] = ()
    """What earlier attempts have delivered of the choices that are still wanted; `n` says nothing then. Empty: all n
    choices, from their beginning."""
