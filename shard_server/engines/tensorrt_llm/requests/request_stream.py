"""One sequence inside TensorRT-LLM: the new part of each iteration of its RequestOutput.

Every iteration yields the same object with all tokens so far, so the delta is what lies beyond the tokens seen. At the
end the list may be shorter than before (a stop word was removed): tokens that were delivered stay delivered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from shard_server.engines.base import EngineRequest, SequenceEnd, SequenceFinishReason, TokenLogprobs
from shard_server.engines.tensorrt_llm.api import CompletionOutput, Logprob, RequestOutput

_FINISH_REASONS: Final = {"stop": SequenceFinishReason.STOP, "length": SequenceFinishReason.LENGTH}
"""Every other end is an error here, because a request that we cancelled is not read any further."""


@dataclasses.dataclass(slots=True)
class StreamDelta:
    """`logprobs` is empty unless the request asked for them; `end` and `error` are set when the sequence has ended."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    end: SequenceFinishReason | None = None
    error: str = ""


class RequestStream:
    """The state of one submitted request. `take` is called after each iteration. Times are the event loop's."""

    __slots__ = (
        "_max_tokens",
        "aborts_later",
        "cut_off_at",
        "has_root",
        "num_tokens",
        "output",
        "pending_end",
        "request",
        "submitted_at",
    )

    def __init__(self, request: EngineRequest, output: RequestOutput, submitted_at: float) -> None:
        self.request = request
        self.output = output
        self.submitted_at = submitted_at
        self.pending_end: SequenceEnd | None = None
        """Set once the request has been aborted: its future end. Its tokens are ignored from then on."""
        self.cut_off_at = 0.0
        """The time at which it ends even if TensorRT-LLM has not ended it; set together with pending_end."""
        self.aborts_later = False
        """True when it has been aborted here, and TensorRT-LLM is to abort it as soon as its KV has been fetched."""
        self.has_root = False
        """True when its first block is in the RootLedger."""
        self.num_tokens = 0
        """The number of tokens that this attempt has delivered."""
        self._max_tokens = request.max_tokens - len(request.output_token_ids)

    @property
    def num_context_tokens(self) -> int:
        request = self.request
        return len(request.prompt_token_ids) + len(request.output_token_ids) + self.num_tokens

    def take(self, output: RequestOutput) -> StreamDelta:
        """The output since the last call. Must not be called again after it has returned an `end`."""
        completion = output.outputs[0]
        seen = self.num_tokens
        token_ids = completion.token_ids[seen:] if len(completion.token_ids) > seen else []
        delta = StreamDelta(token_ids, [])
        if output.finished:
            self._finish(delta, completion)
        self._trim(delta)
        if self.request.sampling.num_logprobs is not None and delta.token_ids:
            delta.logprobs = self._logprobs(completion, seen, delta.token_ids)
        self.num_tokens += len(delta.token_ids)
        return delta

    def _finish(self, delta: StreamDelta, completion: CompletionOutput) -> None:
        reason = completion.finish_reason
        if self.request.prefill_only and reason == "not_finished":
            reason = "length"  # some versions end a context-only request so: another engine continues it
        delta.end = _FINISH_REASONS.get(reason or "", SequenceFinishReason.ERROR)
        if delta.end is SequenceFinishReason.ERROR:
            delta.error = f"TensorRT-LLM ended it with finish_reason {reason!r}"

    def _trim(self, delta: StreamDelta) -> None:
        """Drop tokens after a stop token and beyond max_tokens; a step may have several tokens."""
        stops = self.request.stop_token_ids
        left = self._max_tokens - self.num_tokens
        for position, token_id in enumerate(delta.token_ids):
            if position == left:
                del delta.token_ids[position:]
                delta.end = SequenceFinishReason.LENGTH
                return
            if token_id in stops:
                del delta.token_ids[position + 1 :]
                delta.end = SequenceFinishReason.STOP
                return

    def _logprobs(self, completion: CompletionOutput, seen: int, token_ids: Sequence[int]) -> list[TokenLogprobs]:
        entries = (completion.logprobs or ())[seen : seen + len(token_ids)]
        num_top = self.request.sampling.num_logprobs or 0
        return [_logprobs_of(token_id, entry, num_top) for token_id, entry in zip(token_ids, entries, strict=True)]


def _logprobs_of(token_id: int, entry: Mapping[int, Logprob], num_top: int) -> TokenLogprobs:
    """`entry` holds the likeliest tokens, and always the chosen one."""
    likeliest = sorted(((other, value.logprob) for other, value in entry.items()), key=lambda pair: -pair[1])
    return TokenLogprobs(entry[token_id].logprob, likeliest[:num_top])
