"""The text of an answer's tokens, piece by piece, as the shard has sent it that generated them."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.v1.generation_pb2 import FINISH_REASON_STOP, SamplingParams, StopConditions
from kvloom_common.text.detokenizer import IncrementalDetokenizer, TokenText, stopping_detokenizer
from router.core.events import Request
from router.features.result_cache.stored_answer import StoredChoice


def pieces_of(tokenizer: TokenText | None, request: Request, choice: StoredChoice) -> list[str] | None:
    """One text for each token; the last one includes what the detokenizer held until the end. None: there is no
    tokenizer, or it makes another text of the tokens than the shard's has made."""
    sampling, stop, token_ids = request.sampling, request.stop, choice.token_ids
    assert isinstance(sampling, SamplingParams)
    assert isinstance(stop, StopConditions)
    if tokenizer is None:
        return None
    if not token_ids:
        return [] if not choice.num_chars else None
    ended_by_token = choice.reason == FINISH_REASON_STOP and not choice.stop_string
    # A token that stops the answer has no text. An answer whose guide is complete stops as well, after one that has.
    for num_texts in (len(token_ids) - ended_by_token, len(token_ids)):
        shown = sampling.shown_special_token_ids
        detokenizer = stopping_detokenizer(tokenizer, stop, shown_special_token_ids=shown)
        pieces = _pieces(detokenizer, token_ids, num_texts)
        if sum(map(len, pieces)) == choice.num_chars:
            return pieces
    return None


def _pieces(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int], num_texts: int) -> list[str]:
    pieces = [detokenizer.push((token_id,)) for token_id in token_ids[:num_texts]]
    pieces += [""] * (len(token_ids) - num_texts)
    if detokenizer.stop_string is None:
        pieces[-1] += detokenizer.flush()
    return pieces
