"""Runs the model for the scheduler: one call computes one step of continuous batching."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from kvloom_common.process.freed_memory import return_freed_memory
from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.arithmetic import ArithmeticChoice, choose_arithmetic
from shard_server.engines.torch_engine.checkpoint.packed_files import find_packed, load_packed, multiplied_names
from shard_server.engines.torch_engine.checkpoint.weights import OnProgress, expected_shapes, load_weights
from shard_server.engines.torch_engine.config import LlamaConfig, load_config
from shard_server.engines.torch_engine.grouped_weight import AnyWeight, plain, quantised
from shard_server.engines.torch_engine.kv_cache import KvCache, default_num_blocks
from shard_server.engines.torch_engine.lora.peft import LoraWeights
from shard_server.engines.torch_engine.memory import check_memory
from shard_server.engines.torch_engine.model import LlamaModel
from shard_server.engines.torch_engine.operators.attention import Extent
from shard_server.engines.torch_engine.weight_form import PackedFiles, WeightForm

_MAX_GATHERED_TOKENS = 4096
"""The limit for one sequence with drafts: beyond it, one product of all its rows over the context is cheaper."""


@dataclasses.dataclass(slots=True)
class ScheduledSequence:
    """One sequence's part of a step."""

    token_ids: Sequence[int]
    """Tokens to compute in this step. `drawn_token(row)` stands for one that only the device knows (see
    DeviceRunner.drawn_tokens)."""
    num_computed_tokens: int
    """The number of the sequence's tokens whose KV is computed already; these come after them."""
    block_table: Sequence[int]
    """Covers num_computed_tokens + len(token_ids) tokens."""
    wants_logits: bool
    """True when the last of token_ids is the sequence's last known token or a draft after it."""
    num_drafts: int = 0
    """The number of drafts at the end of token_ids. Logits are computed after each and after the token before them."""
    num_prompt_logits: int = 0
    """The number of tokens, at the end of token_ids, after which logits are computed for the logprobs of a prompt."""
    wants_hidden_states: bool = False
    """True when the hidden states of token_ids are wanted, for an embedding."""
    adapter: Any = None
    """The adapter that ModelRunner.adapter gave; None: the model itself."""

    @property
    def num_logits(self) -> int:
        """The number of tokens, at the end of token_ids, after which logits are computed."""
        return self.num_prompt_logits or (1 + self.num_drafts if self.wants_logits else 0)


def drawn_token(row: int) -> int:
    """Stands for the token that the step before draws from `row` of its logits: a number below 0."""
    return -1 - row


class Runner(Protocol):
    """Computes the steps of an engine; ModelRunner and DeviceRunner do."""

    @property
    def drawn_tokens(self) -> torch.Tensor | None: ...

    def run(self, batch: Sequence[ScheduledSequence]) -> torch.Tensor: ...

    def hidden_states(self) -> list[torch.Tensor]: ...


class ModelRunner:
    """A model, its KV blocks and the threads that compute. Used from one thread at a time."""

    drawn_tokens: Final = None
    """A step has ended when `run` returns, and its tokens are drawn on the CPU."""

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: str,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        num_threads: int,
        wants_batch_invariance: bool = True,
        weights: str = "dtype",
        kernels: str = "auto",
        shared_cores: int = 0,
        shares_weights: bool = False,
        on_progress: OnProgress = lambda _message: None,
    ) -> None:
        """Loads the weights and allocates the KV blocks. `dtype`, `weights` and `kernels` are as in
        kvloom_common.config.TorchConfig; 0 for `num_blocks`, `max_model_len` or `num_threads` means the default.
        Without `wants_batch_invariance` prompts are prefilled in larger products where torch's operators compute:
        faster by half or more, but the last bits depend on the batch. With
        `shared_cores` compiled kernels compute with up to that many threads (see core_share.py), others with
        `num_threads`. `shares_weights`: see Wanted. `on_progress` is called with a message at every stage of loading.
        Raises EngineError."""
        if num_threads:
            torch.set_num_threads(max(num_threads, shared_cores))
        self.config = config = load_config(model_dir)
        _check_window(model_dir, config, max_model_len)
        self.vocab_size = config.vocab_size
        self.max_model_len = max_model_len or config.max_position_embeddings
        self.eos_token_ids = config.eos_token_ids
        self.hidden_size = config.hidden_size
        self._hidden_rows: list[tuple[int, int]] = []
        """(first row, rows) of the sequences of the latest batch whose hidden states are wanted."""

        packed = find_packed(model_dir, config)

        def check(dtype: torch.dtype, form: WeightForm) -> None:
            check_memory(
                config,
                dtype=dtype,
                bits=_bits(form, packed, config),
                num_blocks=num_blocks,
                block_size=block_size,
                max_model_len=self.max_model_len,
            )

        with torch.inference_mode():
            wanted = ArithmeticChoice(dtype, weights, kernels, wants_batch_invariance, shared_cores, shares_weights)
            arithmetic = choose_arithmetic(config, wanted, block_size, check, on_progress, packed)
            torch_dtype = arithmetic.dtype
            if num_threads and not arithmetic.kernels.shares_cores:
                torch.set_num_threads(num_threads)
            self.variant = arithmetic.variant
            """See EngineInfo.variant."""
            num_running = torch.get_num_threads()
            threads = f"up to {num_running} threads" if arithmetic.kernels.shares_cores else f"{num_running} threads"
            self.description = f"{arithmetic.description}, {threads}"
            """Says what computes, for people."""
            model = LlamaModel(
                config,
                _weights(model_dir, config, arithmetic.weights, on_progress),
                dtype=torch_dtype,
                max_model_len=self.max_model_len,
                linears=arithmetic.kernels.linears,
                on_progress=on_progress,
            )
            return_freed_memory()
            # Measured after the weights are loaded.
            self.num_blocks = num_blocks or default_num_blocks(
                config, block_size=block_size, max_model_len=self.max_model_len, dtype=torch_dtype
            )
            on_progress(f"KV cache: {self.num_blocks} blocks of {block_size} tokens")
            cache = KvCache(config, num_blocks=self.num_blocks, block_size=block_size, dtype=torch_dtype)
            self._forward = arithmetic.kernels.forward(model, config, cache)
            self.batch_invariant = wants_batch_invariance and self._forward.is_invariant()
            """True when logits do not depend on the batch, bit for bit: measured on this machine at the start."""
        return_freed_memory()

    @torch.inference_mode()
    def run(self, batch: Sequence[ScheduledSequence]) -> torch.Tensor:
        """Compute the tokens of `batch` and store their KV.

        Returns float32 logits [rows, vocab_size]: num_logits rows for every sequence, in batch order.
        """
        decodes: list[tuple[int, int]] = []  # (sequence, token in it): each a row that attends by itself
        prefills: list[int] = []
        for index, sequence in enumerate(batch):
            if len(sequence.token_ids) == 1 or (self._forward.multiplies_single_rows and _attends_row_by_row(sequence)):
                decodes += [(index, offset) for offset in range(len(sequence.token_ids))]
            else:
                prefills.append(index)
        decodes.sort(key=lambda row: batch[row[0]].num_computed_tokens + row[1], reverse=True)
        row_of: dict[tuple[int, int], int] = {}
        token_ids: list[int] = []
        positions: list[int] = []
        decode_extents: list[Extent] = []
        for index, offset in decodes:
            sequence = batch[index]
            position = sequence.num_computed_tokens + offset
            row_of[index, offset] = len(token_ids)
            decode_extents.append(Extent(len(token_ids), 1, position, sequence.block_table))
            token_ids.append(sequence.token_ids[offset])
            positions.append(position)
        prefill_extents: list[Extent] = []
        for index in prefills:
            sequence = batch[index]
            num_new, num_past = len(sequence.token_ids), sequence.num_computed_tokens
            for offset in range(num_new - sequence.num_logits, num_new):
                row_of[index, offset] = len(token_ids) + offset
            row_of[index, 0] = len(token_ids)
            prefill_extents.append(Extent(len(token_ids), num_new, num_past, sequence.block_table))
            token_ids += sequence.token_ids
            positions += range(num_past, num_past + num_new)
        plan = self._forward.plan(decode_extents, prefill_extents)
        logit_rows = [
            row_of[index, offset]
            for index, sequence in enumerate(batch)
            for offset in range(len(sequence.token_ids) - sequence.num_logits, len(sequence.token_ids))
        ]
        self._hidden_rows = [
            (row_of[index, 0], len(sequence.token_ids))
            for index, sequence in enumerate(batch)
            if sequence.wants_hidden_states
        ]
        adapters = None
        if any(sequence.adapter is not None for sequence in batch):
            adapters = [batch[index].adapter for index, _ in decodes]
            for index in prefills:
                adapters += [batch[index].adapter] * len(batch[index].token_ids)
        return self._forward.logits(token_ids, positions, logit_rows, plan, adapters)

    def adapter(self, weights: LoraWeights) -> Any:
        """An adapter in the form in which ScheduledSequence has it. Called in any thread."""
        return self._forward.adapter(weights)

    @torch.inference_mode()
    def hidden_states(self) -> list[torch.Tensor]:
        """Returns those of the sequences of the latest batch that want them, in order: float32 [len(token_ids),
        hidden_size], after the model's last norm."""
        return [self._forward.hidden_states(*rows) for rows in self._hidden_rows]


def _attends_row_by_row(sequence: ScheduledSequence) -> bool:
    """True when a decoding sequence's drafts are computed as if each were the next token of another sequence. They then
    share kernels with the whole batch, but the context is gathered once for each."""
    num_rows = len(sequence.token_ids)
    return num_rows == 1 + sequence.num_drafts and num_rows * sequence.num_computed_tokens <= _MAX_GATHERED_TOKENS


def _check_window(model_dir: Path, config: LlamaConfig, max_model_len: int) -> None:
    if max_model_len > config.max_position_embeddings:
        raise EngineError(
            f"max_model_len is {max_model_len}, more than the {config.max_position_embeddings} of {model_dir}"
        )


def _weights(model_dir: Path, config: LlamaConfig, form: WeightForm, on_progress: OnProgress) -> dict[str, AnyWeight]:
    """The weights by their names, in the form that was chosen if it is not made of plain ones. Raises EngineError."""
    weights: dict[str, AnyWeight] = {**load_weights(model_dir, config, on_progress)}
    if form is WeightForm.PACKED:
        weights |= load_packed(model_dir, config)
    elif form is WeightForm.INT4:
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        for name in multiplied_names(config):
            weights[name] = quantised(plain(weights[name]), 8 if name == head else 4)
    return weights


def _bits(form: WeightForm, packed: PackedFiles, config: LlamaConfig) -> float | None:
    """The bits of a weight; see weight_bytes."""
    if form is WeightForm.PACKED:
        return 8 * packed.num_bytes / sum(math.prod(expected_shapes(config)[name]) for name in multiplied_names(config))
    return {WeightForm.INT8: 8.0, WeightForm.INT4: 5.5}.get(form)
