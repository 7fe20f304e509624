"""Turns a router's submits into engine requests: checks them and fills in every default. Pure functions."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from kvloom.errors import KvloomError, context_length_exceeded, invalid_argument, unsupported
from kvloom.guide import GUIDE_FIELD
from kvloom.sampling import DEFAULT_TEMPERATURE, DEFAULT_TOP_P, check_prompt_logprobs, check_sampling, check_stop
from kvloom.text.token_ids import unpack_token_ids
from kvloom.v1 import generation_pb2
from kvloom.v1.generation_pb2 import Choice, SamplingParams, StructuralTags
from kvloom.v1.shard_service_pb2 import ShardSubmit
from kvloom_common.class_rank import INTERACTIVE_RANK
from kvloom_common.kv_share import KvShare
from kvloom_common.text.block_hash import root_hash
from kvloom_common.text.prompt_images import words_of
from shard_server.engines.base import (
    Capability,
    EngineImage,
    EngineInfo,
    EngineRequest,
    Guide,
    GuideKind,
    Pooling,
    PoolingKind,
    Sampling,
)

_MASK_64: Final = 2**64 - 1
_POOLING_KINDS: Final[Mapping[int, PoolingKind | None]] = {
    generation_pb2.POOLING_KIND_UNSPECIFIED: None,
    generation_pb2.POOLING_KIND_MEAN: PoolingKind.MEAN,
    generation_pb2.POOLING_KIND_LAST: PoolingKind.LAST,
    generation_pb2.POOLING_KIND_CLS: PoolingKind.CLS,
}


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
    if submit.images and Capability.VISION not in info.capabilities:
        raise unsupported(f"{info.model} sees no images here.", "images")
    words = words_of(prompt, submit.images, is_trusted=True) if submit.images else prompt
    if words:
        _check_token_ids(words, info, "prompt_token_ids")
    root = root_hash(info.model, submit.adapter.checksum, submit.cache_salt)
    if submit.HasField("pooling"):
        return [_pooled_request(submit, prompt, info, serial, origin, root)]
    if Capability.EMBED in info.capabilities and Capability.GENERATE not in info.capabilities:
        raise unsupported(f"{info.model} generates no text: it gives embeddings only.", "model")
    sampling, stop = submit.sampling, submit.stop
    check_sampling(sampling, "sampling.")
    check_stop(stop, "stop.")
    check_prompt_logprobs(sampling, len(prompt), len(submit.choices))
    _check_capabilities(submit, info)
    logit_bias = tuple(sorted(sampling.logit_bias.items()))
    if logit_bias and logit_bias[-1][0] >= info.vocab_size:
        raise _unknown_token(logit_bias[-1][0], info, "sampling.logit_bias")
    predicted = sampling.predicted_token_ids[:]
    if predicted:
        _check_token_ids(predicted, info, "sampling.predicted_token_ids")
    max_tokens = _max_tokens(submit, len(prompt), info)
    if stop.min_tokens > max_tokens:
        message = f"min_tokens is {stop.min_tokens}, but the answer may have at most {max_tokens} tokens."
        raise invalid_argument(message, "stop.min_tokens")
    stop_token_ids = frozenset(stop.stop_token_ids)
    if not stop.ignore_eos:
        stop_token_ids |= info.eos_token_ids
    guide = guide_of(sampling, info.capabilities) if sampling.HasField("guide") else None
    kv_share = KvShare(submit.kv_share.owner, submit.kv_share.percent) if submit.HasField("kv_share") else None
    class_rank = submit.class_rank if submit.HasField("class_rank") else INTERACTIVE_RANK
    images = [EngineImage(one.position, one.num_tokens, one.media_type, one.data) for one in submit.images]
    seed = sampling.seed if sampling.HasField("seed") else secrets.randbits(64)
    return [
        EngineRequest(
            request_id=f"{submit.request_id}#{submit.attempt_id}.{choice.index}/{serial}",
            prompt_token_ids=prompt,
            images=images,
            sampling=_sampling(sampling, choice_seed(seed, choice.index), logit_bias, choice),
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            min_tokens=stop.min_tokens,
            predicted_token_ids=predicted,
            output_token_ids=_output_token_ids(choice, max_tokens, info),
            num_expected_cached_tokens=submit.num_expected_cached_tokens,
            root_hash=root,
            guide=guide,
            adapter=submit.adapter.name,
            discards_blocks=submit.discards_blocks,
            kv_share=kv_share,
            no_speculation=submit.no_speculation,
            prefill_only=submit.prefill_only,
            handoff=submit.handoff or None,
            class_rank=class_rank,
            tenant=submit.tenant,
            traceparent=submit.traceparent,
            origin=origin,
        )
        for choice in submit.choices
    ]


def _pooled_request(
    submit: ShardSubmit, prompt: list[int], info: EngineInfo, serial: int, origin: int, root: int
) -> EngineRequest:
    """The request for an embedding. Raises KvloomError."""
    if Capability.EMBED not in info.capabilities:
        raise unsupported(f"{info.model} gives no embeddings here.", "model")
    if len(submit.choices) != 1 or submit.choices[0].output_token_ids:
        raise invalid_argument("An embedding has one choice, without output tokens.", "choices")
    if len(prompt) > info.max_model_len:
        raise context_length_exceeded(info.max_model_len, len(prompt), None, "prompt_token_ids", "stop.max_tokens")
    if submit.pooling.kind not in _POOLING_KINDS:  # The enum is open, so any number can arrive.
        raise invalid_argument(f"pooling.kind has no value {submit.pooling.kind}.", "pooling.kind")
    return EngineRequest(
        request_id=f"{submit.request_id}#{submit.attempt_id}.{submit.choices[0].index}/{serial}",
        prompt_token_ids=prompt,
        sampling=Sampling(),
        max_tokens=0,
        pooling=Pooling(_POOLING_KINDS[submit.pooling.kind], normalize=not submit.pooling.raw_length),
        num_expected_cached_tokens=submit.num_expected_cached_tokens,
        root_hash=root,
        adapter=submit.adapter.name,
        tenant=submit.tenant,
        origin=origin,
    )


def _sampling(
    sampling: SamplingParams, seed: int, logit_bias: tuple[tuple[int, float], ...], choice: Choice
) -> Sampling:
    # An earlier attempt has reported the prompt's logprobs with its first token.
    takes_likeliest = sampling.HasField("top_p") and sampling.top_p == 0
    wants_prompt_logprobs = sampling.HasField("prompt_logprobs") and not choice.output_token_ids
    return Sampling(
        temperature=sampling.temperature if sampling.HasField("temperature") else DEFAULT_TEMPERATURE,
        top_p=DEFAULT_TOP_P if takes_likeliest or not sampling.HasField("top_p") else sampling.top_p,
        top_k=1 if takes_likeliest else sampling.top_k,
        seed=seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        num_logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        num_prompt_logprobs=sampling.prompt_logprobs if wants_prompt_logprobs else None,
        prompt_logprobs_start=sampling.prompt_logprobs_start if wants_prompt_logprobs else 0,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        logit_bias=logit_bias,
    )


def guide_of(sampling: SamplingParams, capabilities: AbstractSet[Capability] = frozenset(Capability)) -> Guide:
    """The guide in the form that engines accept; `sampling` has been checked."""
    guide = sampling.guide
    match guide.WhichOneof("form"):
        case "json_schema":
            return Guide(GuideKind.JSON_SCHEMA, guide.json_schema, tuple(guide.relaxable_definitions))
        case "regex":
            return Guide(GuideKind.REGEX, guide.regex)
        case "choice":
            return Guide(GuideKind.CHOICE, json.dumps(list(guide.choice.texts), ensure_ascii=False))
        case "grammar":
            return Guide(GuideKind.GRAMMAR, guide.grammar)
        case "structural_tags" if Capability.STRUCTURAL_TAGS not in capabilities:
            return Guide(GuideKind.JSON_SCHEMA, guide.structural_tags.json_schema)  # the JSON alone
        case "structural_tags":
            return Guide(GuideKind.STRUCTURAL_TAGS, _structural_tags(guide.structural_tags))
        case _:
            return Guide(GuideKind.JSON_SCHEMA, '{"type": "object"}')


def _structural_tags(wanted: StructuralTags) -> str:
    tags = [{"begin": tag.begin, "json_schema": tag.json_schema, "end": tag.end} for tag in wanted.tags]
    form = {"json_schema": wanted.json_schema} if wanted.json_schema else {}
    return json.dumps({"tags": tags, "triggers": list(wanted.triggers), **form}, ensure_ascii=False)


def _max_tokens(submit: ShardSubmit, num_prompt_tokens: int, info: EngineInfo) -> int:
    left = info.max_model_len - num_prompt_tokens
    stop = submit.stop
    max_tokens = stop.max_tokens if stop.HasField("max_tokens") else left
    if left < 1 or max_tokens > left:
        raise context_length_exceeded(
            info.max_model_len,
            num_prompt_tokens,
            max_tokens if stop.HasField("max_tokens") else None,
            "prompt_token_ids",
            "stop.max_tokens",
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


def _check_token_ids(token_ids: Sequence[int], info: EngineInfo, field: str) -> None:
    largest = max(token_ids)
    if largest >= info.vocab_size:
        raise _unknown_token(largest, info, field)


def _unknown_token(token_id: int, info: EngineInfo, field: str) -> KvloomError:
    return invalid_argument(f"Token id {token_id} is not in the vocabulary of {info.vocab_size} tokens.", field)


def _wants_free_structures(submit: ShardSubmit) -> bool:
    guide = submit.sampling.guide
    return guide.WhichOneof("form") == "structural_tags" and not guide.structural_tags.json_schema


def _wants_repetition_penalty(submit: ShardSubmit) -> bool:
    sampling = submit.sampling
    return sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1


_NEEDS: Final[Sequence[tuple[Capability, Callable[[ShardSubmit], object], str, str]]] = (
    (
        Capability.LOGPROBS,
        lambda submit: submit.sampling.HasField("logprobs"),
        "sampling.logprobs",
        "gives no logprobs",
    ),
    (
        Capability.PROMPT_LOGPROBS,
        lambda submit: submit.sampling.HasField("prompt_logprobs"),
        "sampling.prompt_logprobs",
        "gives no prompt_logprobs",
    ),
    (Capability.GUIDED, lambda submit: submit.sampling.HasField("guide"), GUIDE_FIELD, "has no guided decoding"),
    (
        Capability.STRUCTURAL_TAGS,
        _wants_free_structures,
        GUIDE_FIELD,
        "cannot guide structures in free text, as strict tools need it",
    ),
    (Capability.TOP_K, lambda submit: submit.sampling.top_k, "sampling.top_k", "has no top_k"),
    (
        Capability.PENALTIES,
        lambda submit: submit.sampling.presence_penalty,
        "sampling.presence_penalty",
        "has no penalties",
    ),
    (
        Capability.PENALTIES,
        lambda submit: submit.sampling.frequency_penalty,
        "sampling.frequency_penalty",
        "has no penalties",
    ),
    (Capability.MIN_P, lambda submit: submit.sampling.min_p, "sampling.min_p", "has no min_p"),
    (
        Capability.REPETITION_PENALTY,
        _wants_repetition_penalty,
        "sampling.repetition_penalty",
        "has no repetition_penalty",
    ),
    (Capability.LOGIT_BIAS, lambda submit: submit.sampling.logit_bias, "sampling.logit_bias", "has no logit_bias"),
    (Capability.MIN_TOKENS, lambda submit: submit.stop.min_tokens, "stop.min_tokens", "has no min_tokens"),
)
"""A capability, how a request shows that it needs it, the field to name, and the complaint. In the order of checks."""


def _check_capabilities(submit: ShardSubmit, info: EngineInfo) -> None:
    """Raise KvloomError for the first parameter that would have an effect which this engine does not offer. A request
    is only asked for what is not offered."""
    for capability, is_needed, field, what in _NEEDS:
        if capability not in info.capabilities and is_needed(submit):
            raise unsupported(f"{info.model} {what} here.", field)
