"""Prefill on one engine and decode on another: the state that is passed between them, and how TensorRT-LLM takes it.

    prefill:  generate_async(..., disaggregated_params=context_only(library))
              state = handoff_of(output)          # None: no hand-off, the whole request is computed elsewhere
    decode:   generate_async(..., disaggregated_params=generation_only(library, state))

The engine that prefilled keeps the KV until it is fetched, at most for
`shard.tensorrt_llm.cache_transceiver.timeout_ms`; the same time bounds how long the decoding engine waits for it.
Fields that only newer versions have are passed where the installed version has them. Without `first_gen_log_probs`,
which the decoding engine puts before its own, an answer with log-probabilities would lack those of its first token:
see Capability.HANDOFF_LOGPROBS.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from shard_server.engines.tensorrt_llm.api import Logprob, RequestOutput, TensorRtLlm

_PATH: Final = "llmapi.DisaggregatedParams"
_OPTION: Final = "disaggregation"
_MIN_GLOBAL_ID: Final = 1 << 42
"""Smaller ids may be those that an executor counts itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Handoff:
    """The prefill engine's description of KV that waits to be fetched."""

    ctx_request_id: int | None
    opaque_state: bytes
    """Where the KV lies and how to fetch it; only TensorRT-LLM can interpret it."""
    first_token_ids: Sequence[int]
    """Prefill computes the first token; decoding emits it again as its first."""
    draft_token_ids: Sequence[int] | None = None
    disagg_request_id: int | None = None
    """The name of the request on both engines, which newer versions prefer to `ctx_request_id`."""
    ctx_dp_rank: int | None = None
    """The rank that has the KV, with attention data parallelism."""
    ctx_info_endpoint: Any = None
    """Where the decoding engine asks for the layout of the KV."""
    schedule_style: int | None = None
    """The value of the library's enumeration: whether context or generation is scheduled first."""
    first_log_probs: Sequence[Mapping[int, tuple[float, int | None]]] | None = None
    """For each of `first_token_ids`: (log-probability, rank) of the likeliest tokens and of the chosen one, by token.
    None: the request did not ask for them."""

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Handoff:
        """Raises ValueError."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"not a hand-off: {error}") from error


def hands_over_logprobs(library: TensorRtLlm) -> bool:
    """True when this version's hand-offs have the log-probabilities of the first token."""
    return library.knows(_PATH, "first_gen_log_probs")


def context_only(library: TensorRtLlm) -> Any:
    """The params of the prefill request. TensorRT-LLM sets max_tokens of its SamplingParams to 1: never share them."""
    optional: dict[str, Any] = {}
    if library.knows(_PATH, "disagg_request_id"):
        optional["disagg_request_id"] = _MIN_GLOBAL_ID + secrets.randbits(61)
    return library.build(_PATH, _OPTION, request_type="context_only", **optional)


def handoff_of(output: RequestOutput) -> Handoff | None:
    """The hand-off of a finished prefill request. A request that was answered completely (its first token ended it, or
    the engine does not hand over) or aborted has params, too, which are those it was given: only the id of the context
    request, or the first token, proves a hand-off."""
    params = output.outputs[0].disaggregated_params
    if params is None or (params.ctx_request_id is None and not params.first_gen_tokens):
        return None
    style = getattr(params, "schedule_style", None)
    return Handoff(
        ctx_request_id=params.ctx_request_id,
        opaque_state=params.opaque_state or b"",
        first_token_ids=list(params.first_gen_tokens or ()),
        draft_token_ids=None if params.draft_tokens is None else list(params.draft_tokens),
        disagg_request_id=getattr(params, "disagg_request_id", None),
        ctx_dp_rank=getattr(params, "ctx_dp_rank", None),
        ctx_info_endpoint=getattr(params, "ctx_info_endpoint", None),
        schedule_style=None if style is None else int(style),
        first_log_probs=_plain(getattr(params, "first_gen_log_probs", None)),
    )


def generation_only(library: TensorRtLlm, handoff: Handoff) -> Any:
    """The params of the decode request, which has the same prompt. Raises EngineError if this version lacks a field
    that the other engine's version has set."""
    optional: dict[str, Any] = {
        name: value
        for name in ("disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint", "schedule_style")
        if (value := getattr(handoff, name)) is not None
    }
    if handoff.first_log_probs is not None:
        make = library.symbol("executor.result.Logprob")
        optional["first_gen_log_probs"] = [
            {token_id: make(logprob=logprob, rank=rank) for token_id, (logprob, rank) in entry.items()}
            for entry in handoff.first_log_probs
        ]
    return library.build(
        _PATH,
        _OPTION,
        request_type="generation_only",
        ctx_request_id=handoff.ctx_request_id,
        opaque_state=handoff.opaque_state,
        first_gen_tokens=list(handoff.first_token_ids),
        draft_tokens=None if handoff.draft_token_ids is None else list(handoff.draft_token_ids),
        **optional,
    )


def _plain(entries: Sequence[Mapping[int, Logprob]] | None) -> Sequence[Mapping[int, tuple[float, int | None]]] | None:
    if entries is None:
        return None
    return [{token_id: (one.logprob, one.rank) for token_id, one in entry.items()} for entry in entries]
