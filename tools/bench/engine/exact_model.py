"""The model in float64, against which number formats and kernel families are compared: no kernel of the engine takes
part. It computes one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from shard_server.engines.torch_engine.checkpoint.packed_files import load_packed
from shard_server.engines.torch_engine.checkpoint.weights import load_weights
from shard_server.engines.torch_engine.config import load_config
from shard_server.engines.torch_engine.grouped_weight import plain
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.model import LlamaModel
from shard_server.engines.torch_engine.model_runner import ScheduledSequence
from shard_server.engines.torch_engine.operators.linear import TorchLinears


class ExactRunner:
    """Computes what ModelRunner does, for batches of one sequence whose blocks are 0, 1, 2 and so on. The weights are
    those of the files, unrounded. Raises EngineError."""

    def __init__(self, model_dir: Path, *, block_size: int, num_blocks: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._config = config = load_config(model_dir)
        self.eos_token_ids = config.eos_token_ids
        num_tokens = num_blocks * block_size
        with torch.inference_mode():
            packed = {name: plain(weight, torch.float64) for name, weight in load_packed(model_dir, config).items()}
            weights = load_weights(model_dir, config) | packed
            linears = TorchLinears(None)
            self._model = LlamaModel(config, weights, dtype=torch.float64, max_model_len=num_tokens, linears=linears)
            self._cache = KvCache(config, num_blocks=num_blocks, block_size=block_size, dtype=torch.float64)
            self._token_rows = self._cache.token_rows(range(num_tokens))

    @torch.inference_mode()
    def run(self, batch: Sequence[ScheduledSequence]) -> torch.Tensor:
        """float32 logits [num_logits, vocab_size] of the only sequence of `batch`."""
        [sequence] = batch
        first, num_new = sequence.num_computed_tokens, len(sequence.token_ids)
        positions = torch.arange(first, first + num_new)

        def attend(layer: int, queries: torch.Tensor) -> torch.Tensor:
            return self._attend(layer, positions, queries)

        return self._model.forward(
            torch.tensor(list(sequence.token_ids)),
            positions,
            torch.arange(num_new - sequence.num_logits, num_new),
            self._token_rows[:, first : first + num_new],
            attend,
            self._cache,
        )

    def _attend(self, layer: int, positions: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        config, end = self._config, int(positions[-1]) + 1
        rows = self._cache.all_token_rows[self._token_rows[layer, :end]]
        keys_and_values = rows.view(end, 2, config.num_kv_heads, config.head_dim)
        keys, values = keys_and_values.repeat_interleave(config.num_heads_per_kv_head, 2).unbind(1)
        heads = queries.unflatten(-1, (-1, config.head_dim))
        scores = torch.einsum("qhd,khd->hqk", heads, keys) * config.head_dim**-0.5
        distances = positions[:, None] - torch.arange(end)
        window = config.layer_windows[layer]
        is_hidden = (distances < 0) | (distances >= (window or end))
        shares = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", shares, values).flatten(1)
