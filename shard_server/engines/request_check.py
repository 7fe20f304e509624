"""Refuses requests that no engine can run, for engines whose `submit` has no stricter check of its own."""

from __future__ import annotations

from kvloom_common.text.prompt_images import words_of
from shard_server.engines.base import Capability, EngineError, EngineInfo, EngineRequest


def check_request(request: EngineRequest, info: EngineInfo) -> None:
    """Raise EngineError for a request that can never run."""
    num_prompt = len(request.prompt_token_ids)
    if not num_prompt:
        raise EngineError("the prompt is empty")
    if num_prompt + request.max_tokens > info.max_model_len:
        raise EngineError(
            f"{num_prompt} prompt tokens + {request.max_tokens} output tokens exceed the window of {info.max_model_len}"
        )
    if request.pooling is not None:
        if Capability.EMBED not in info.capabilities or request.max_tokens or request.output_token_ids:
            raise EngineError("an embedding needs an engine with that capability, and has no output tokens")
    elif len(request.output_token_ids) >= request.max_tokens:
        raise EngineError(f"all {request.max_tokens} output tokens have been emitted already")
    prompt = request.prompt_token_ids
    if request.images:
        if Capability.VISION not in info.capabilities:
            raise EngineError("images need an engine with that capability")
        prompt = words_of(prompt, request.images, is_trusted=True)
    for token_ids in (prompt, request.output_token_ids):
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < info.vocab_size:
            raise EngineError(f"a token id lies outside the vocabulary of {info.vocab_size}")
