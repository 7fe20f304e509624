"""Prefill on one engine and decode on another: the state that is passed between them, and how TensorRT-LLM takes it.

    prefill:  generate_async(..., disaggregated_params=context_only(library))
              state = handoff_of(output)          # None: no hand-off, decode where it was prefilled
    decode:   generate_async(..., disaggregated_params=generation_only(library, state))

The shard protocol does not carry a `Handoff` yet. Some released versions leak blocks when a hand-off is aborted, and
an unreachable prefill engine blocks the decoding one unless
`shard.tensorrt_llm.cache_transceiver.timeout_ms` is set, which it is by default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from shard_server.engines.tensorrt_llm.api import RequestOutput, TensorRtLlm

_PATH = "llmapi.DisaggregatedParams"
_OPTION = "disaggregation"


@dataclasses.dataclass(frozen=True, slots=True)
class Handoff:
    """The prefill engine's description of KV that waits to be fetched."""

    ctx_request_id: int
    opaque_state: bytes
    """Where the KV lies and how to fetch it; only TensorRT-LLM can interpret it."""
    first_token_ids: Sequence[int]
    """Prefill computes the first token; decoding emits it again as its first."""
    draft_token_ids: Sequence[int] | None = None

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Handoff:
        """Raises ValueError."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"not a hand-off: {error}") from error


def context_only(library: TensorRtLlm) -> Any:
    """The params of the prefill request. TensorRT-LLM sets max_tokens of its SamplingParams to 1: never share them."""
    return library.build(_PATH, _OPTION, request_type="context_only")


def handoff_of(output: RequestOutput) -> Handoff | None:
    """The hand-off of a finished prefill request. A request that was answered completely (its first token ended it, or
    the engine does not hand over) has params too: only the id of the context request proves a hand-off."""
    params = output.outputs[0].disaggregated_params
    if params is None or params.ctx_request_id is None:
        return None
    return Handoff(
        ctx_request_id=params.ctx_request_id,
        opaque_state=params.opaque_state or b"",
        first_token_ids=list(params.first_gen_tokens or ()),
        draft_token_ids=None if params.draft_tokens is None else list(params.draft_tokens),
    )


def generation_only(library: TensorRtLlm, handoff: Handoff) -> Any:
    """The params of the decode request, which has the same prompt."""
    return library.build(
        _PATH,
        _OPTION,
        request_type="generation_only",
        ctx_request_id=handoff.ctx_request_id,
        opaque_state=handoff.opaque_state,
        first_gen_tokens=list(handoff.first_token_ids),
        draft_tokens=None if handoff.draft_token_ids is None else list(handoff.draft_token_ids),
    )
