"""A step that was given to a runner, the rows of its logits, and the tokens that are drawn from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from shard_server.engines.base import SequenceEnd, SequenceFinishReason, TokenLogprobs
from shard_server.engines.torch_engine.drafter import Drafts
from shard_server.engines.torch_engine.model_runner import ScheduledSequence, drawn_token
from shard_server.engines.torch_engine.sampling.batched_draws import PlainRow
from shard_server.engines.torch_engine.sampling.device_draws import DeviceDraws
from shard_server.engines.torch_engine.sampling.guides import GuideError
from shard_server.engines.torch_engine.sampling.sampler import Draws, SampleRow
from shard_server.engines.torch_engine.scheduler import Chunk
from shard_server.engines.torch_engine.sequence import Sequence as EngineSequence


@dataclasses.dataclass(slots=True)
class LaunchedStep:
    """Until its tokens are known, sequences of it may end: their rows are then void."""

    batch: list[Chunk]
    scheduled: list[ScheduledSequence]
    """The parts of the sequences of `batch`."""
    drafts: Drafts
    begin: float
    """In the clock's time."""
    logits: torch.Tensor
    draws: DeviceDraws | None = None
    """None: its tokens are drawn on the CPU."""

    @property
    def can_draw_on_device(self) -> bool:
        """True when the CPU needs nothing but the tokens, one for each row of logits."""
        return not self.drafts and not any(one.num_prompt_logits or one.wants_hidden_states for one in self.scheduled)

    @property
    def drawing(self) -> list[EngineSequence]:
        """By row of logits, if it can draw on the device: the sequences that tokens are drawn for."""
        return [sequence for (sequence, _), part in zip(self.batch, self.scheduled, strict=True) if part.wants_logits]

    def live_rows(self) -> Iterator[tuple[EngineSequence, int, int]]:
        """The sequences that have not ended meanwhile: (sequence, computed tokens, first row of its logits)."""
        row = 0
        for (sequence, num_tokens), part in zip(self.batch, self.scheduled, strict=True):
            if sequence.is_running:
                yield sequence, num_tokens, row
            row += part.num_logits


def scheduled_part(sequence: EngineSequence, num_tokens: int, draft: Sequence[int]) -> ScheduledSequence:
    """The next `num_tokens` tokens of a sequence and the drafts after them, for a runner."""
    start = sequence.num_computed_tokens
    end = start + num_tokens
    complete = end == sequence.num_tokens
    is_pooled = sequence.pooled is not None
    table = sequence.block_table
    token_ids = sequence.token_ids[start:end] if sequence.drawn_row is None else [drawn_token(sequence.drawn_row)]
    return ScheduledSequence(
        token_ids=[*token_ids, *draft] if draft else token_ids,
        num_computed_tokens=start,
        block_table=table if complete else table[: -(-end // sequence.block_size)],
        wants_logits=complete and not is_pooled,
        num_drafts=len(draft),
        num_prompt_logits=sequence.num_prompt_logits(num_tokens),
        wants_hidden_states=is_pooled,
        adapter=sequence.adapter,
    )


def drawn_rows(batch: Sequence[ScheduledSequence]) -> list[int]:
    """The logit rows of a step that tokens are drawn from."""
    rows: list[int] = []
    num_rows = 0
    for sequence in batch:
        num_rows += sequence.num_logits
        if sequence.wants_logits:
            rows += range(num_rows - 1 - sequence.num_drafts, num_rows)
    return rows


def plain_rows(step: LaunchedStep) -> list[PlainRow]:
    """The logit rows of a step whose tokens depend on no other token that is drawn in it."""
    rows: list[PlainRow] = []
    for sequence, num_tokens, first_row in step.live_rows():
        if sequence.num_uncomputed_tokens != num_tokens or sequence.pooled is not None:
            continue  # part of a prompt, or a whole one without an answer
        # The first output token is drawn from the last row of a complete prompt.
        first_row += max(sequence.num_prompt_logits(num_tokens) - 1, 0)
        sampling = sequence.request.sampling
        if sampling.temperature > 0 and sequence.guide is None and sequence.adjustments is None:
            num_output_tokens = sequence.num_output_tokens
            num_rows = 1 + len(step.drafts.get(sequence, ()))
            rows += [PlainRow(first_row + i, sampling, num_output_tokens + i) for i in range(num_rows)]
    return rows


def sample_row(sequence: EngineSequence) -> SampleRow:
    """How the sequence's next token is to be drawn. Raises GuideError."""
    mask = None if sequence.guide is None else sequence.guide.mask()
    return SampleRow(sequence.request.sampling, sequence.num_output_tokens, sequence.adjustments, mask)


def draw_token(
    sequence: EngineSequence, draws: Draws, row: int, token_ids: list[int], logprobs: list[TokenLogprobs]
) -> SequenceEnd | None:
    """Draw the sequence's next token and append it to the lists; returns the sequence's end if it ends."""
    try:
        how = sample_row(sequence)
    except GuideError as error:
        return guide_failed(sequence, error)
    token_id, token_logprobs = draws.draw(row, how)
    if token_id is None:
        return not_finite(sequence)
    token_ids.append(token_id)
    if token_logprobs is not None:
        logprobs.append(token_logprobs)
    return take_token(sequence, token_id)


def take_token(sequence: EngineSequence, token_id: int) -> SequenceEnd | None:
    """Append a drawn token to a sequence; returns the sequence's end if it ends."""
    guide = sequence.guide
    sequence.append(token_id)
    reason = finish_reason(sequence)
    if reason is None and guide is not None:
        guide.take((token_id,))
        if guide.is_complete:
            reason = SequenceFinishReason.STOP
    return None if reason is None else SequenceEnd(sequence.request.request_id, reason)


def finish_reason(sequence: EngineSequence) -> SequenceFinishReason | None:
    """Why the sequence ends after its last token; None: it goes on."""
    num_output_tokens = sequence.num_output_tokens
    if num_output_tokens and sequence.token_ids[-1] in sequence.request.stop_token_ids:
        return SequenceFinishReason.STOP
    if num_output_tokens >= sequence.request.max_tokens:
        return SequenceFinishReason.LENGTH
    return None


def guide_failed(sequence: EngineSequence, error: GuideError) -> SequenceEnd:
    """The end of a sequence whose guide has no mask for its next token."""
    request_id = sequence.request.request_id
    return SequenceEnd(request_id, SequenceFinishReason.ERROR, "its guide cannot be followed", str(error))


def not_finite(sequence: EngineSequence) -> SequenceEnd:
    """The end of a sequence whose next token cannot be drawn."""
    return SequenceEnd(sequence.request.request_id, SequenceFinishReason.ERROR, "the model's logits are not finite")


def collect_prompt_logprobs(
    sequence: EngineSequence, num_tokens: int, num_logits: int, draws: Draws, first_row: int
) -> None:
    """Add the logprobs of the prompt tokens that follow the last `num_logits` of the next `num_tokens` tokens, whose
    logits begin at row `first_row`."""
    known, num_top = sequence.prompt_logprobs, sequence.request.sampling.num_prompt_logprobs
    assert known is not None
    assert num_top is not None
    end = sequence.num_computed_tokens + num_tokens
    first = end - num_logits
    for position in range(first, min(end, len(sequence.request.prompt_token_ids) - 1)):
        known.append(draws.logprobs(first_row + position - first, sequence.token_ids[position + 1], num_top))
