"""PromptReport is what an answer repeats of its prompt: its text (`echo`) and the log-probabilities of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from edge_http.openai.logprobs import LOWEST_LOGPROB, CompletionLogprobs, shown_token
from edge_http.openai.prompt import PromptInput
from edge_http.openai.requests import CompletionBody, GenerationBody
from kvloom.errors import invalid_argument, unsupported
from kvloom.sampling import MAX_LOGPROBS, check_prompt_logprobs
from kvloom.v1.generation_pb2 import SamplingParams, TokenLogprobs
from kvloom_common.text.tokenizer import ModelTokenizer

encode_json: Final = msgspec.json.Encoder().encode


class PromptReport(msgspec.Struct, frozen=True):
    """The part of a request that asks for such a report."""

    prompts: Sequence[PromptInput]
    n: int
    """Choices are numbered across all prompts: prompt * n + choice."""
    echoes: bool = False
    echo_logprobs: int | None = None
    """How many of the likeliest tokens the echoed prompt's logprobs have; None: it has no logprobs."""
    prompt_logprobs: int | None = None
    """The same for vLLM's field `prompt_logprobs`."""
    is_all: bool = False
    """The client wants nothing else: what engines generate, which is at least one token, is left out."""

    def text(self, index: int, tokenizer: ModelTokenizer) -> str:
        """The prompt of a choice as text: as it was given, or decoded."""
        prompt = self.prompts[index // self.n]
        return prompt.text or tokenizer.decode(prompt.token_ids)

    def echoed_logprobs(
        self, index: int, tokenizer: ModelTokenizer, entries: Sequence[TokenLogprobs]
    ) -> Sequence[bytes] | None:
        """The contents of the arrays of a plain completion's `logprobs`, for the prompt; None without."""
        if self.echo_logprobs is None:
            return None
        lists = CompletionLogprobs(tokenizer)
        first, *others = self.prompts[index // self.n].token_ids
        whole = lists.push((first,), (TokenLogprobs(),)) | {"token_logprobs": [None], "top_logprobs": [None]}
        cut = [_cut(entry, self.echo_logprobs) for entry in entries]
        for name, values in lists.push(others, cut).items():
            whole[name] += values
        return [encode_json(values)[1:-1] for values in whole.values()]

    def listed_logprobs(self, index: int, tokenizer: ModelTokenizer, entries: Sequence[TokenLogprobs]) -> bytes:
        """The value of `prompt_logprobs`: null for the first token, then an object by token id for each."""
        num_top = self.prompt_logprobs or 0
        listed: list[dict[str, Any] | None] = [None]
        for token_id, entry in zip(self.prompts[index // self.n].token_ids[1:], entries, strict=True):
            likeliest = list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))[:num_top]
            ranked = {top_id: (logprob, rank + 1) for rank, (top_id, logprob) in enumerate(likeliest)}
            shown = {token_id: ranked.get(token_id, (entry.logprob, None)), **ranked}
            listed.append(
                {
                    str(top_id): {
                        "logprob": max(logprob, LOWEST_LOGPROB),
                        "rank": rank,
                        "decoded_token": shown_token(tokenizer, top_id),
                    }
                    for top_id, (logprob, rank) in shown.items()
                }
            )
        return encode_json(listed)


def _cut(entry: TokenLogprobs, num_top: int) -> TokenLogprobs:
    if len(entry.top_token_ids) <= num_top:
        return entry
    return TokenLogprobs(
        logprob=entry.logprob,
        top_token_ids=entry.top_token_ids[:num_top],
        top_logprobs=entry.top_logprobs[:num_top],
    )


def prompt_report(
    body: GenerationBody, sampling: SamplingParams, prompts: Sequence[PromptInput], n: int
) -> PromptReport | None:
    """The report that a body asks for; None for most. Sets `sampling.prompt_logprobs`. Raises KvloomError."""
    echoes = isinstance(body, CompletionBody) and bool(body.echo)
    if body.prompt_logprobs is None and not echoes:
        return None
    if body.prompt_logprobs is not None:
        if not 0 <= body.prompt_logprobs <= MAX_LOGPROBS:
            raise invalid_argument(f"prompt_logprobs must be between 0 and {MAX_LOGPROBS}.", "prompt_logprobs")
        if body.stream:
            raise unsupported("prompt_logprobs goes only with answers that are not streamed.", "prompt_logprobs")
    echo_logprobs = sampling.logprobs if echoes and sampling.HasField("logprobs") else None
    asked = [num_top for num_top in (body.prompt_logprobs, echo_logprobs) if num_top is not None]
    if asked:
        sampling.prompt_logprobs = max(asked)
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        for prompt in prompts:
            check_prompt_logprobs(sampling, len(prompt.token_ids), n, field)
    is_all = isinstance(body, CompletionBody) and body.max_tokens == 0
    return PromptReport(prompts, n, echoes, echo_logprobs, body.prompt_logprobs, is_all)
