"""A request to a router, and the progress of its answer."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

from kvloom.v1 import generation_pb2, router_service_pb2


class ChoiceProgress:
    """Records what the sink has received of one choice. Another router continues after it."""

    __slots__ = ("index", "is_done", "num_cached_tokens", "num_chars", "token_ids")

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: array[int] = array("I")
        """Four bytes per token, because thousands of long answers are kept."""
        self.num_chars = 0
        """How many Unicode code points of their text were delivered."""
        self.num_cached_tokens: int | None = None
        """The number of cached tokens reported when the choice first started; None: it has not started."""
        self.is_done = False


@dataclasses.dataclass(slots=True)
class LinkRequest:
    """A request as the caller describes it. The link adds the slots."""

    request_id: str
    model: str
    prompt_token_ids: Sequence[int]
    prompt_text: str
    sampling: generation_pb2.SamplingParams
    stop: generation_pb2.StopConditions
    n: int = 1
    timeout_seconds: float = 0.0
    tenant: str = ""
    key_id: str = ""
    """See Submit in router_service.proto."""
    traceparent: str = ""
    session_key: str = ""
    """See GenerateRequest in router_service.proto."""
    tier: router_service_pb2.Tier = router_service_pb2.TIER_UNSPECIFIED
    """How urgent it is."""
    partial_choices: Sequence[ChoiceProgress] = ()
    """The output that other routers have delivered of the choices that are still wanted; `n` is not used then. Empty:
    generate all n choices from their beginning."""
    is_new: bool = False
    """True when another model has generated the `partial_choices`, and no router has lost this request. So it is sent
    at once, and a rejection is final, as for any other new request."""
    client_request_id: str = ""
    """The id that the caller gave the request, for log lines and `Explain`."""
    pooling: generation_pb2.Pooling | None = None
    """Asks for the prompt's embedding, which is in the finish, instead of an answer."""
    adapter_checksum: str = ""
    """If `model` is an adapter: which one of this name."""
    num_ended_tokens: int = 0
    """With `partial_choices`: the output tokens of the other choices, which have ended."""
    num_foreign_tokens: int = 0
    """The number of tokens in `partial_choices` that another request has generated (see Submit)."""
    num_ended_reasoning_tokens: int = 0
    """The part of `num_ended_tokens` that is reasoning."""
    no_result_cache: bool = False
    """See GenerateRequest in router_service.proto, as for the next one."""
    receipt: bool = False
    seed_is_drawn: bool = False
    priority_class: str = ""
    fairness_id: str = ""
    objectives: router_service_pb2.Objectives | None = None
    """None: it has none."""
    continuation_ticket: bytes = b""
    """With `partial_choices`: that of the answer's first start, if it had one."""
    has_fallback_model: bool = False
    """See Submit in router_service.proto."""
