"""Turns a router's submits into engine requests: checks them and fills in every default. Pure functions."""

from __future__ import annotations

import json
import secrets
from typing import Final

from kvloom.errors import KvloomError, invalid_argument, unsupported
from kvloom.guide import GUIDE_FIELD
from kvloom.sampling import DEFAULT_TEMPERATURE, DEFAULT_TOP_P, check_sampling, check_stop
from kvloom.text.block_hash import root_hash
from kvloom.text.token_ids import unpack_token_ids
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import Choice, SamplingParams
from kvloom.v1.shard_service_pb2 import ShardSubmit
from shard_server.engines.base import Capability, EngineInfo, EngineRequest, Guide, GuideKind, Sampling

_MASK_64: Final = 2**64 - 1


def choice_seed(seed: int, index: int) -> int:
    """The 64-bit seed of choice `index`; index 0 keeps the request's seed. (The finaliser of splitmix64 over a Weyl
    sequence.)"""
    if index == 0:
        return seed
    x = (seed + index * 0x9E3779B97F4A7C15) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


def resolve_submit(submit: ShardSubmit, info: EngineInfo, serial: int, origin: int = 0) -> list[EngineRequest]:
    """One request per choice, in the order of the choices. Raises KvloomError.

    `serial` makes the engine's request ids unique: routers may use the same request_id, and the engine keeps an id
    until it has released the sequence. `origin` identifies the router's stream.
    """
    prompt = _prompt_of(submit)
    if not prompt:
        raise invalid_argument("The prompt is empty.", "prompt_token_ids")
    _check_token_ids(prompt, info, "prompt_token_ids")
    check_sampling(submit.sampling, "sampling.")
    check_stop(submit.stop, "stop.")
    _check_capabilities(submit.sampling, info)
    max_tokens = _max_tokens(submit, len(prompt), info)
    stop_token_ids = frozenset(submit.stop.stop_token_ids)
    if not submit.stop.ignore_eos:
        stop_token_ids |= info.eos_token_ids
    root = root_hash(info.model, cache_salt=submit.cache_salt)
    guide = guide_of(submit.sampling) if submit.sampling.HasField("guide") else None
    seed = submit.sampling.seed if submit.sampling.HasField("seed") else secrets.randbits(64)
    return [
        EngineRequest(
            request_id=f"{submit.request_id}#{submit.attempt_id}.{choice.index}/{serial}",
            prompt_token_ids=prompt,
            sampling=_sampling(submit.sampling, choice_seed(seed, choice.index)),
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            output_token_ids=_output_token_ids(choice, max_tokens, info),
            num_expected_cached_tokens=submit.num_expected_cached_tokens,
            root_hash=root,
            guide=guide,
            origin=origin,
        )
        for choice in submit.choices
    ]


def _sampling(sampling: SamplingParams, seed: int) -> Sampling:
    return Sampling(
        temperature=sampling.temperature if sampling.HasField("temperature") else DEFAULT_TEMPERATURE,
        top_p=sampling.top_p if sampling.HasField("top_p") else DEFAULT_TOP_P,
        top_k=sampling.top_k,
        seed=seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        num_logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
    )


def guide_of(sampling: SamplingParams) -> Guide:
    """The guide in the form that engines accept; `sampling` has been checked."""
    guide = sampling.guide
    match guide.WhichOneof("form"):
        case "json_schema":
            return Guide(GuideKind.JSON_SCHEMA, guide.json_schema)
        case "regex":
            return Guide(GuideKind.REGEX, guide.regex)
        case "choice":
            return Guide(GuideKind.CHOICE, json.dumps(list(guide.choice.texts), ensure_ascii=False))
        case "grammar":
            return Guide(GuideKind.GRAMMAR, guide.grammar)
        case _:
            return Guide(GuideKind.JSON_SCHEMA, '{"type": "object"}')


def _max_tokens(submit: ShardSubmit, num_prompt_tokens: int, info: EngineInfo) -> int:
    left = info.max_model_len - num_prompt_tokens
    max_tokens = submit.stop.max_tokens if submit.stop.HasField("max_tokens") else left
    if left < 1 or max_tokens > left:
        wanted = f" and {max_tokens} output tokens" if submit.stop.HasField("max_tokens") else ""
        raise KvloomError(
            ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED,
            f"The model's window is {info.max_model_len} tokens; the request has {num_prompt_tokens} prompt tokens"
            f"{wanted}.",
            field="prompt_token_ids" if left < 1 else "stop.max_tokens",
        )
    return max_tokens


def _output_token_ids(choice: Choice, max_tokens: int, info: EngineInfo) -> list[int]:
    token_ids = choice.output_token_ids[:]
    if token_ids:
        _check_token_ids(token_ids, info, "choices.output_token_ids")
        if len(token_ids) > max_tokens:
            raise invalid_argument(
                f"{len(token_ids)} output tokens were given, but at most {max_tokens} are allowed.",
                "choices.output_token_ids",
            )
    return token_ids


def _prompt_of(submit: ShardSubmit) -> list[int]:
    if not submit.packed_prompt_token_ids:
        return submit.prompt_token_ids[:]
    try:
        return unpack_token_ids(submit.packed_prompt_token_ids).tolist()
    except ValueError as error:
        raise invalid_argument("packed_prompt_token_ids is torn.", "packed_prompt_token_ids") from error


def _check_token_ids(token_ids: list[int], info: EngineInfo, field: str) -> None:
    largest = max(token_ids)
    if largest >= info.vocab_size:
        raise invalid_argument(f"Token id {largest} is not in the vocabulary of {info.vocab_size} tokens.", field)


def _check_capabilities(sampling: SamplingParams, info: EngineInfo) -> None:
    has = info.capabilities
    if sampling.HasField("logprobs") and Capability.LOGPROBS not in has:
        raise unsupported(f"{info.model} gives no logprobs here.", "sampling.logprobs")
    if sampling.HasField("guide") and Capability.GUIDED not in has:
        raise unsupported(f"{info.model} has no guided decoding here.", GUIDE_FIELD)
    if sampling.top_k and Capability.TOP_K not in has:
        raise unsupported(f"{info.model} has no top_k here.", "sampling.top_k")
    if Capability.PENALTIES not in has:
        if sampling.presence_penalty:
            raise unsupported(f"{info.model} has no penalties here.", "sampling.presence_penalty")
        if sampling.frequency_penalty:
            raise unsupported(f"{info.model} has no penalties here.", "sampling.frequency_penalty")
