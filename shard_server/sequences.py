"""A sequence as the shard server sees it: where its news goes, its text, and what it has delivered."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.text.detokenizer import IncrementalDetokenizer
from kvloom.v1 import generation_pb2
from kvloom.v1.generation_pb2 import FINISH_REASON_STOP, FinishReason, SequenceFinish
from shard_server.connection import RouterConnection
from shard_server.engines.base import EngineRequest, TokenLogprobs


class LiveSequence:
    """One choice that was submitted and has not finished."""

    __slots__ = (
        "connection",
        "detokenizer",
        "has_stop_strings",
        "num_cached_tokens",
        "num_output_tokens",
        "received_at",
        "request",
        "slot",
    )

    def __init__(
        self,
        connection: RouterConnection,
        slot: int,
        request: EngineRequest,
        detokenizer: IncrementalDetokenizer,
        has_stop_strings: bool,
        received_at: float,
    ) -> None:
        self.connection = connection
        self.slot = slot
        self.request = request
        self.detokenizer = detokenizer
        self.has_stop_strings = has_stop_strings
        self.num_cached_tokens = 0
        self.num_output_tokens = len(request.output_token_ids)
        """Those of earlier attempts included."""
        self.received_at = received_at

    def already_ended(self) -> FinishReason.ValueType | None:
        """How a sequence ended whose end an earlier attempt generated but did not report."""
        tokens = self.request.output_token_ids
        if self.detokenizer.stop_string is not None or (tokens and tokens[-1] in self.request.stop_token_ids):
            return FinishReason.FINISH_REASON_STOP
        if len(tokens) >= self.request.max_tokens:
            return FinishReason.FINISH_REASON_LENGTH
        return None

    def push_carefully(self, token_ids: Sequence[int]) -> tuple[Sequence[int], str]:
        """Several tokens, or the last ones: the delivered tokens and their text. A stop token has no text, and nothing
        is delivered behind the token that completes a stop string."""
        text = ""
        for i, token_id in enumerate(token_ids):
            if token_id not in self.request.stop_token_ids:
                text += self.detokenizer.push((token_id,))
            if self.detokenizer.stop_string is not None:
                return token_ids[: i + 1], text
        return token_ids, text

    def finish(self, reason: FinishReason.ValueType) -> SequenceFinish:
        """The sequence's end, with exact usage."""
        stop_string = self.detokenizer.stop_string if reason == FINISH_REASON_STOP else None
        return SequenceFinish(
            slot=self.slot,
            reason=reason,  # pyright: ignore[reportArgumentType]  (the stubs take the enum's type, ints are fine)
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            stop_string=stop_string or "",
        )


def shown_output(request: EngineRequest) -> Sequence[int]:
    """The output of earlier attempts, without the stop token that ended it: that has no text."""
    tokens = request.output_token_ids
    return tokens[:-1] if tokens and tokens[-1] in request.stop_token_ids else tokens


def logprobs_to_proto(slot: int, logprobs: Sequence[TokenLogprobs]) -> list[generation_pb2.TokenLogprobs]:
    return [
        generation_pb2.TokenLogprobs(
            slot=slot,
            logprob=entry.logprob,
            top_token_ids=[token_id for token_id, _ in entry.top],
            top_logprobs=[logprob for _, logprob in entry.top],
        )
        for entry in logprobs
    ]
