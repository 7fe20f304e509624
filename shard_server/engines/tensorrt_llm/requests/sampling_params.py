"""An EngineRequest as TensorRT-LLM's SamplingParams.

Two differences from the torch engine remain: a seed makes an answer repeatable only as far as the sampler and the batch
allow; penalties are those of the sampler, which counts prompt tokens as well unless `prompt_ignore_length` exists.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from shard_server.engines.base import EngineError, EngineInfo, EngineRequest
from shard_server.engines.tensorrt_llm.api import TensorRtLlm
from shard_server.engines.tensorrt_llm.requests.request_fields import guide_arguments

_SEED_MASK = 2**63 - 1
"""Some samplers hold seeds in signed 64 bits."""
NO_END: Final = -1
"""The end_id of an answer that no end-of-sequence token ends. Newer versions drop the stop tokens of a request with
`ignore_eos`, which does the same otherwise."""


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingMapper:
    """Builds SamplingParams."""

    library: TensorRtLlm
    make: Any
    takes_prompt_length: bool
    """True when this version can be told which tokens of the prompt penalties must not count."""
    guided_decoding_backend: str
    logits_width: int
    """The number of logits of a position: the model's vocabulary, as it is padded, which may be larger than the
    tokenizer's."""

    @classmethod
    def of(cls, library: TensorRtLlm, guided_decoding_backend: str, logits_width: int) -> SamplingMapper:
        takes_prompt_length = library.knows("SamplingParams", "prompt_ignore_length")
        make = library.symbol("SamplingParams")
        return cls(library, make, takes_prompt_length, guided_decoding_backend, logits_width)

    def params_of(self, request: EngineRequest, info: EngineInfo) -> Any:
        """The SamplingParams of a request. Raises EngineError for anything that this engine cannot do."""
        arguments = sampling_arguments(request, info)
        if self.takes_prompt_length and _has_penalties(request):
            # Tokens of earlier attempts were appended to the prompt, but still count as output.
            arguments["prompt_ignore_length"] = len(request.prompt_token_ids)
        if request.sampling.logit_bias:
            arguments["embedding_bias"] = _embedding_bias(request, self.logits_width)
        guide = guide_arguments(request, self.guided_decoding_backend)
        if guide:
            arguments["guided_decoding"] = self.library.build("llmapi.GuidedDecodingParams", "guide", **guide)
        try:
            return self.make(**arguments)
        except (ValueError, TypeError) as error:
            raise EngineError(f"TensorRT-LLM refuses the sampling parameters: {error}") from error


def sampling_arguments(request: EngineRequest, info: EngineInfo) -> dict[str, Any]:
    """The arguments that every version accepts."""
    sampling = request.sampling
    arguments: dict[str, Any] = {
        "n": 1,
        "max_tokens": request.max_tokens - len(request.output_token_ids),
        "detokenize": False,
        # Otherwise the stop token is removed at the end, although it was streamed already.
        "include_stop_str_in_output": True,
        **_stop_arguments(request.stop_token_ids, info.eos_token_ids),
    }
    if sampling.temperature > 0:
        # Greedy sampling is requested by leaving out all three.
        arguments["temperature"] = sampling.temperature
        arguments["top_p"] = sampling.top_p
        if sampling.top_k:
            arguments["top_k"] = sampling.top_k
        if sampling.min_p:
            arguments["min_p"] = sampling.min_p
        arguments["seed"] = sampling.seed & _SEED_MASK
    if sampling.presence_penalty:
        arguments["presence_penalty"] = sampling.presence_penalty
    if sampling.frequency_penalty:
        arguments["frequency_penalty"] = sampling.frequency_penalty
    if sampling.repetition_penalty != 1:
        arguments["repetition_penalty"] = sampling.repetition_penalty
    if request.min_tokens > len(request.output_token_ids):
        arguments["min_tokens"] = request.min_tokens - len(request.output_token_ids)
    if sampling.num_logprobs is not None:
        # In some versions, 0 turns logprobs off.
        arguments["logprobs"] = max(1, sampling.num_logprobs)
    return arguments


def _stop_arguments(stops: frozenset[int], eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """Without a tokenizer the engine knows no end-of-sequence token: one is `end_id`, the others are stop tokens."""
    ends = sorted(stops & eos_token_ids)
    if not ends:
        pad_id = min(eos_token_ids, default=0)
        return {"end_id": NO_END, "pad_id": pad_id, "stop_token_ids": sorted(stops) or None}
    others = sorted(stops - {ends[0]})
    return {"end_id": ends[0], "pad_id": ends[0], "stop_token_ids": others or None}


def _embedding_bias(request: EngineRequest, logits_width: int) -> Any:
    """Returns what is added to each logit: a tensor as wide as they are. Another width fails the whole batch."""
    import torch  # the library has loaded it

    bias = torch.zeros(logits_width)
    for token_id, value in request.sampling.logit_bias:
        bias[token_id] = value
    return bias


def _has_penalties(request: EngineRequest) -> bool:
    return bool(request.sampling.presence_penalty or request.sampling.frequency_penalty)
