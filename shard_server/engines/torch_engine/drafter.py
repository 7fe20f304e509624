"""Decides which sequences of a step get drafts, and how many tokens: as many as fit into blocks and a matrix
product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvloom_common.config import SpeculationConfig
from shard_server.engines.torch_engine.sampling.prediction import PredictedAnswer
from shard_server.engines.torch_engine.sampling.speculation import MAX_STEP_ROWS, PromptLookup
from shard_server.engines.torch_engine.scheduler import Chunk, Scheduler
from shard_server.engines.torch_engine.sequence import Sequence as EngineSequence

Drafts = dict[EngineSequence, list[int]]
"""By sequence: tokens that may follow its known ones."""
FIRST_PREDICTED_TOKENS: Final = 8
"""So many tokens of a request's `prediction` are drafted at first; up to 31 while all are right."""


class Drafter:
    """Drafts tokens for the decoding sequences of a step, and counts how many were accepted."""

    def __init__(self, scheduler: Scheduler, config: SpeculationConfig) -> None:
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.predictions: dict[str, tuple[int, int]] = {}
        """By request id: the drafted tokens of its prediction in this step, and how many of them were accepted."""
        self._predicting: set[EngineSequence] = set()
        """The sequences whose drafts of this step come from their predictions."""
        self._scheduler = scheduler
        self._config = config

    def can_draft(self, batch: Sequence[Chunk]) -> bool:
        """True if sequences of the batch may ever get drafts."""
        return bool(self._config.max_draft_tokens) or any(sequence.request.predicted_token_ids for sequence, _ in batch)

    def draft(self, batch: Sequence[Chunk]) -> Drafts:
        """Draft, and reserve blocks for the drafts if needed. Call `release_blocks` after the step."""
        if not self.can_draft(batch):
            return {}
        decoding = [sequence for sequence, _ in batch if sequence.num_uncomputed_tokens == 1]
        rows_left = MAX_STEP_ROWS - len(decoding)
        drafts: Drafts = {}
        for sequence in decoding:
            if rows_left < 1:
                break
            draft = self._draft(sequence, rows_left)
            if draft:
                drafts[sequence] = draft
                rows_left -= len(draft)
        return drafts

    def on_verified(self, sequence: EngineSequence, draft: Sequence[int], token_ids: Sequence[int]) -> None:
        """`token_ids` are the drawn tokens: one more than the accepted drafts."""
        num_accepted = 0
        while num_accepted < min(len(draft), len(token_ids)) and draft[num_accepted] == token_ids[num_accepted]:
            num_accepted += 1
        self.num_draft_tokens += len(draft)
        self.num_accepted_tokens += num_accepted
        if sequence in self._predicting:
            assert sequence.predicted is not None
            sequence.predicted.on_verified(len(draft), num_accepted)
            self.predictions[sequence.request.request_id] = (len(draft), num_accepted)
        else:
            assert sequence.lookup is not None
            sequence.lookup.on_verified(len(draft), num_accepted)

    def take_predictions(self) -> dict[str, tuple[int, int]]:
        """Returns what the last step has verified of predictions; see StepOutput."""
        taken, self.predictions = self.predictions, {}
        return taken

    def release_blocks(self, drafts: Drafts) -> None:
        """Free the blocks that only wrong drafts used."""
        for sequence in drafts:
            if sequence.is_running:
                self._scheduler.release_draft_blocks(sequence)
        self._predicting.clear()

    def _draft(self, sequence: EngineSequence, rows_left: int) -> list[int]:
        # The token that is drawn after the last draft counts, too.
        limit = min(rows_left, sequence.request.max_tokens - sequence.num_output_tokens - 1)
        if limit < 1 or sequence.request.no_speculation:
            return []
        draft: list[int] = []
        if sequence.request.predicted_token_ids:
            draft = self._draft_predicted(sequence, limit)
        if draft:
            self._predicting.add(sequence)
        elif self._config.max_draft_tokens:
            if sequence.lookup is None:
                sequence.lookup = PromptLookup(self._config.max_draft_tokens)
            draft = sequence.lookup.draft(sequence.token_ids, limit)
        return draft[: self._scheduler.reserve_draft_blocks(sequence, len(draft))] if draft else draft

    def _draft_predicted(self, sequence: EngineSequence, limit: int) -> list[int]:
        if sequence.predicted is None:
            predicted = sequence.request.predicted_token_ids
            sequence.predicted = PredictedAnswer(predicted, FIRST_PREDICTED_TOKENS)
        return sequence.predicted.draft(sequence.token_ids, sequence.num_output_tokens, limit)
