"""What TensorRT-LLM needs of an EngineRequest beside its sampling: its namespace in the cache, and its guide."""

from __future__ import annotations

import json
import re
from typing import Any

from shard_server.engines.base import Capability, EngineError, EngineInfo, EngineRequest, GuideKind

_REGEX_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()/]")


def cache_salt_of(request: EngineRequest) -> str:
    """TensorRT-LLM reuses blocks only among requests of one salt. The root hash names model, adapter and tenant, so
    that blocks are shared exactly where kvloom's own hashes are equal."""
    return f"{request.root_hash:016x}"


def guide_arguments(request: EngineRequest, backend: str) -> dict[str, Any]:
    """The request's guide as arguments of GuidedDecodingParams; empty without one. Raises EngineError for what the
    backend would ignore or get wrong."""
    guide = request.guide
    if guide is None:
        return {}
    if backend == "off":
        # TensorRT-LLM would generate unguided text and say nothing.
        raise EngineError("guided decoding needs shard.tensorrt_llm.guided_decoding_backend")
    if request.output_token_ids:
        # Its matcher starts with the first generated token: what an earlier attempt emitted is prompt to it.
        raise EngineError("TensorRT-LLM cannot go on with a guided answer that was begun elsewhere")
    match guide.kind:
        case GuideKind.JSON_SCHEMA:
            return {"json": guide.text}
        case GuideKind.REGEX:
            return {"regex": guide.text}
        case GuideKind.CHOICE:
            return {"regex": "(" + "|".join(_escape(choice) for choice in json.loads(guide.text)) + ")"}
        case GuideKind.GRAMMAR:
            if backend != "llguidance":
                raise EngineError("grammars are in Lark's syntax, which only the backend llguidance takes")
            return {"grammar": guide.text}


def _escape(text: str) -> str:
    return _REGEX_SPECIAL.sub(lambda match: "\\" + match.group(), text)


def adapter_of(request: EngineRequest) -> str:
    """The adapter's name; "" for the model itself, and in a protocol that has no adapters."""
    return getattr(request, "adapter", "") or ""


def check_request(request: EngineRequest, info: EngineInfo) -> None:
    """Raise EngineError for what can never run. TensorRT-LLM finds such things late, or kills the engine with them."""
    num_prompt_tokens = len(request.prompt_token_ids)
    if not num_prompt_tokens:
        raise EngineError("the prompt is empty")
    if request.max_tokens < 1:
        raise EngineError(f"max_tokens must be at least 1, got {request.max_tokens}")
    if num_prompt_tokens + request.max_tokens > info.max_model_len:
        raise EngineError(
            f"prompt ({num_prompt_tokens}) + max_tokens ({request.max_tokens}) exceed the window of "
            f"{info.max_model_len} tokens"
        )
    if len(request.output_token_ids) >= request.max_tokens:
        raise EngineError(f"{len(request.output_token_ids)} output tokens given, max_tokens is {request.max_tokens}")
    for token_ids in (request.prompt_token_ids, request.output_token_ids):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < info.vocab_size):
            raise EngineError(f"a token id lies outside the vocabulary of {info.vocab_size}")
    has_penalties = request.sampling.presence_penalty or request.sampling.frequency_penalty
    if has_penalties and Capability.PENALTIES not in info.capabilities:
        raise EngineError("the sampler here ignores penalties (shard.tensorrt_llm.penalties)")
