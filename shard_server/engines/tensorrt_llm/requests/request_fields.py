"""The parts of an EngineRequest besides its sampling: the cache salt, the guide, and general checks."""

from __future__ import annotations

import json
import re
from typing import Any

from shard_server.engines.base import Capability, EngineError, EngineInfo, EngineRequest, GuideKind

_AS_LETTERS = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
_REGEX_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()/]")


def cache_salt_of(request: EngineRequest) -> str:
    """TensorRT-LLM reuses blocks only among requests with the same salt. The root hash identifies model, adapter and
    tenant, so blocks are shared exactly where kvloom's own hashes are equal."""
    return f"{request.root_hash:016x}"


def guide_arguments(request: EngineRequest, backend: str) -> dict[str, Any]:
    """The request's guide as arguments of GuidedDecodingParams; empty without a guide. Raises EngineError for a guide
    that the backend would ignore or apply wrongly.

    XGrammar keeps what it has compiled by the text of the guide, for all requests of the engine, and how long a guide
    takes would tell whether another tenant has sent it. So its guides name the request's salt, where that means
    nothing. llguidance keeps nothing."""
    guide = request.guide
    if guide is None:
        return {}
    if not backend:
        # TensorRT-LLM would silently generate unguided text.
        raise EngineError("guided decoding needs shard.tensorrt_llm.options.guided_decoding_backend")
    if request.output_token_ids:
        # Its matcher starts at the first generated token and treats the tokens of earlier attempts as prompt.
        raise EngineError("TensorRT-LLM cannot continue a guided answer that was begun elsewhere")
    match guide.kind:
        case GuideKind.JSON_SCHEMA:
            return {"json": _salted_schema(guide.text, request) if backend == "xgrammar" else guide.text}
        case GuideKind.REGEX:
            return {"regex": _salted_regex(guide.text, request) if backend == "xgrammar" else guide.text}
        case GuideKind.CHOICE:
            regex = "|".join(_escape(choice) for choice in json.loads(guide.text))
            return {"regex": _salted_regex(regex, request) if backend == "xgrammar" else f"({regex})"}
        case GuideKind.GRAMMAR:
            if backend != "llguidance":
                raise EngineError("grammars are in Lark's syntax, which only the backend llguidance accepts")
            return {"grammar": guide.text}
        case GuideKind.STRUCTURAL_TAGS:
            if backend != "xgrammar":
                raise EngineError("structures in free text are guided only by the backend xgrammar")
            return {"structural_tag": _structural_tag(guide.text, request)}


def _salted_schema(schema: str, request: EngineRequest) -> str:
    """A JSON Schema, which may have comments. As text, since numbers may be larger than Python's."""
    begin, brace, rest = schema.partition("{")
    if begin.strip() or not brace:
        return schema  # `true` and `false` are the same for all
    comma = "" if rest.lstrip().startswith("}") else ", "
    return f'{{"$comment": "{cache_salt_of(request)}"{comma}{rest}'


def _salted_regex(regex: str, request: EngineRequest) -> str:
    """A regular expression as a group with a name, of letters, which XGrammar ignores."""
    name = cache_salt_of(request).translate(_AS_LETTERS)
    return f"(?<{name}>{regex})"


def _structural_tag(guide: str, request: EngineRequest) -> str:
    """The guide in xgrammar's format."""
    wanted = json.loads(guide)

    def schema(text: str) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": json.loads(_salted_schema(text, request))}

    tags = [
        {
            "type": "tag",
            "begin": tag["begin"],
            "content": schema(tag["json_schema"]) if tag["json_schema"] else {"type": "any_text"},
            "end": tag["end"],
        }
        for tag in wanted["tags"]
    ]
    form: dict[str, Any] = {"type": "triggered_tags", "triggers": wanted["triggers"], "tags": tags}
    if "json_schema" in wanted:
        form = {"type": "or", "elements": [schema(wanted["json_schema"]), {**form, "at_least_one": True}]}
    return json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)


def _escape(text: str) -> str:
    return _REGEX_SPECIAL.sub(lambda match: "\\" + match.group(), text)


def check_request(request: EngineRequest, info: EngineInfo) -> None:
    """Raise EngineError for a request that can never run. TensorRT-LLM rejects those late, or dies from them."""
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
    sampling = request.sampling
    for capability, is_asked in {
        Capability.PENALTIES: sampling.presence_penalty or sampling.frequency_penalty,
        Capability.REPETITION_PENALTY: sampling.repetition_penalty != 1,
        Capability.MIN_P: sampling.min_p,
        Capability.LOGIT_BIAS: sampling.logit_bias,
        Capability.MIN_TOKENS: request.min_tokens,
        Capability.LOGPROBS: sampling.num_logprobs is not None,
        Capability.PROMPT_LOGPROBS: sampling.num_prompt_logprobs is not None,
    }.items():
        if is_asked and capability not in info.capabilities:
            raise EngineError(f"the sampler here has no {capability.value} (docs/how-to/tensorrt-llm.md)")
