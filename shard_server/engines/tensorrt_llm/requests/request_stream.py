"""One sequence inside TensorRT-LLM: what each iteration of its RequestOutput brings that is new.

Every iteration yields the same object with all tokens so far, so the news are what lies beyond the tokens seen. At the
end the list may be shorter than it was (a stop word taken back): what was delivered stays delivered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from shard_server.engines.base import EngineRequest, FinishReason, SequenceEnd, TokenLogprobs
from shard_server.engines.tensorrt_llm.api import CompletionOutput, Logprob, RequestOutput

_FINISH_REASONS: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
"""Every other end is an error here: a cancellation that was asked for is not read any further."""


@dataclasses.dataclass(slots=True)
class StreamDelta:
    """`logprobs` is empty unless the request asked for them; `end` and `error` are set when the sequence is over."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    end: FinishReason | None = None
    error: str = ""


class RequestStream:
    """Follows one submitted request. `take` is called after each iteration. Times are the event loop's."""

    __slots__ = (
        "_max_tokens",
        "cancelling_sequences",
        "cut_off_at",
        "has_root",
        "num_tokens",
        "output",
        "request",
        "submitted_at",
    )

    def __init__(self, request: EngineRequest, output: RequestOutput, submitted_at: float) -> None:
        self.request = request
        self.output = output
        self.submitted_at = submitted_at
        self.cancelling_sequences: SequenceEnd | None = None
        """Once it has been aborted: how it will end. Its tokens do not matter any more."""
        self.cut_off_at = 0.0
        """When it ends even if TensorRT-LLM does not end it; set with cancelling_sequences."""
        self.has_root = False
        """Whether its first block is in the RootLedger."""
        self.num_tokens = 0
        """Delivered by this attempt."""
        self._max_tokens = request.max_tokens - len(request.output_token_ids)

    @property
    def num_context_tokens(self) -> int:
        request = self.request
        return len(request.prompt_token_ids) + len(request.output_token_ids) + self.num_tokens

    def take(self, output: RequestOutput) -> StreamDelta:
        """What is new. After an `end` it must not be called again."""
        completion = output.outputs[0]
        seen = self.num_tokens
        token_ids = completion.token_ids[seen:] if len(completion.token_ids) > seen else []
        news = StreamDelta(token_ids, [])
        if output.finished:
            self._finish(news, completion)
        self._trim(news)
        if self.request.sampling.num_logprobs is not None and news.token_ids:
            news.logprobs = self._logprobs(completion, seen, news.token_ids)
        self.num_tokens += len(news.token_ids)
        return news

    def _finish(self, news: StreamDelta, completion: CompletionOutput) -> None:
        reason = completion.finish_reason
        news.end = _FINISH_REASONS.get(reason or "", FinishReason.ERROR)
        if news.end is FinishReason.ERROR:
            news.error = f"TensorRT-LLM ended it with finish_reason {reason!r}"

    def _trim(self, news: StreamDelta) -> None:
        """Nothing lies behind a stop token or beyond max_tokens, also when a step brings several tokens."""
        stops = self.request.stop_token_ids
        left = self._max_tokens - self.num_tokens
        for position, token_id in enumerate(news.token_ids):
            if position == left:
                del news.token_ids[position:]
                news.end = FinishReason.LENGTH
                return
            if token_id in stops:
                del news.token_ids[position + 1 :]
                news.end = FinishReason.STOP
                return

    def _logprobs(self, completion: CompletionOutput, seen: int, token_ids: Sequence[int]) -> list[TokenLogprobs]:
        entries = (completion.logprobs or ())[seen : seen + len(token_ids)]
        num_top = self.request.sampling.num_logprobs or 0
        return [_logprobs_of(token_id, entry, num_top) for token_id, entry in zip(token_ids, entries, strict=True)]


def _logprobs_of(token_id: int, entry: Mapping[int, Logprob], num_top: int) -> TokenLogprobs:
    """`entry` holds the likeliest tokens, and the chosen one even where it is not among them."""
    likeliest = sorted(((other, value.logprob) for other, value in entry.items()), key=lambda pair: -pair[1])
    return TokenLogprobs(entry[token_id].logprob, likeliest[:num_top])
