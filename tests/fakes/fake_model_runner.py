"""A ModelRunner without a model: it stores token ids where the real one stores KV.

The logits of a sequence are a fixed function of all its tokens as read back from its block table. So a block that is
reused wrongly, freed too early or written by two sequences shows as other tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from kvloom_common.text.block_hash import token_bytes
from shard_server.engines.torch_engine.model_runner import ScheduledSequence

VOCAB_SIZE = 61
HIDDEN_SIZE = 5


class FakeModelRunner:
    drawn_tokens: torch.Tensor | None = None
    """As ModelRunner has it."""

    def __init__(
        self,
        model_dir: Path = Path(),
        *,
        dtype: str = "float32",
        block_size: int = 4,
        num_blocks: int = 64,
        max_model_len: int = 0,
        num_threads: int = 1,
        wants_batch_invariance: bool = True,
        weights: str = "dtype",
        kernels: str = "auto",
        shared_cores: int = 0,
        shares_weights: bool = False,
        on_progress: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.vocab_size = VOCAB_SIZE
        self.hidden_size = HIDDEN_SIZE
        self.max_model_len = max_model_len or 512
        self.eos_token_ids = frozenset({0})
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.batch_invariant = True
        self.variant, self.description = "fake", "a fake"
        self.batches: list[list[ScheduledSequence]] = []
        self.num_tokens_computed = 0
        self.before_run: Callable[[list[ScheduledSequence]], None] = lambda batch: None
        self.num_context_tokens: int | None = None
        """Logits depend only on this many last tokens; a small number makes answers that repeat themselves."""
        self._kv = np.full((num_blocks, block_size), -1, dtype=np.int64)

    def run(self, batch: list[ScheduledSequence]) -> torch.Tensor:
        self.before_run(batch)
        self.batches.append(list(batch))
        for scheduled in batch:
            assert scheduled.token_ids, "nothing to compute"
            end = scheduled.num_computed_tokens + len(scheduled.token_ids)
            assert len(scheduled.block_table) == -(-end // self.block_size), "the block table covers other tokens"
            self.num_tokens_computed += len(scheduled.token_ids)
            for position, token_id in enumerate(scheduled.token_ids, scheduled.num_computed_tokens):
                block_id = scheduled.block_table[position // self.block_size]
                self._kv[block_id, position % self.block_size] = token_id
        rows: list[torch.Tensor] = []
        for scheduled in batch:
            end = scheduled.num_computed_tokens + len(scheduled.token_ids)
            ends = range(end - scheduled.num_logits + 1, end + 1)
            rows += [logits_of(self._read(scheduled.block_table, position)) for position in ends]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)

    def hidden_states(self) -> list[torch.Tensor]:
        """A function of all tokens up to each, as the logits are."""
        found: list[torch.Tensor] = []
        for scheduled in self.batches[-1]:
            if scheduled.wants_hidden_states:
                first = scheduled.num_computed_tokens + 1
                ends = range(first, first + len(scheduled.token_ids))
                rows = [logits_of(self._read(scheduled.block_table, end))[1 : 1 + HIDDEN_SIZE] for end in ends]
                found.append(torch.stack(rows))
        return found

    def _read(self, block_table: list[int], num_tokens: int) -> list[int]:
        token_ids = self._kv[block_table].reshape(-1)[:num_tokens].tolist()
        assert min(token_ids) >= 0, "KV was read that was never written"
        return token_ids[-self.num_context_tokens :] if self.num_context_tokens else token_ids


class FakeDeviceRunner(FakeModelRunner):
    """Computes with tokens that only the device knows, and has logits until it is given the next step, as DeviceRunner
    does."""

    def __init__(self, model_dir: Path = Path(), **options: Any) -> None:
        super().__init__(model_dir, **options)
        self.drawn_tokens = torch.zeros(64, dtype=torch.int64)
        self._logits = torch.empty(0, VOCAB_SIZE)

    def run(self, batch: list[ScheduledSequence]) -> torch.Tensor:
        self._logits.fill_(torch.nan)
        self._logits = super().run([self._with_known_tokens(scheduled) for scheduled in batch])
        return self._logits

    def _with_known_tokens(self, scheduled: ScheduledSequence) -> ScheduledSequence:
        assert self.drawn_tokens is not None
        known = [int(self.drawn_tokens[-1 - one]) if one < 0 else one for one in scheduled.token_ids]
        return dataclasses.replace(scheduled, token_ids=known)


def logits_of(token_ids: list[int]) -> torch.Tensor:
    """Logits [VOCAB_SIZE] after these tokens; eos (0) never wins by itself."""
    assert min(token_ids) >= 0, "KV was read that was never written"
    seed = xxhash.xxh3_64_intdigest(token_bytes(token_ids))
    logits = np.random.default_rng(seed).standard_normal(VOCAB_SIZE).astype(np.float32) * 3
    logits[0] = -30.0
    return torch.from_numpy(logits)
