"""The Llama-family decoder: a forward pass over a flat batch of tokens from many sequences."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812

from shard_server.engines.torch_engine.checkpoint.weights import OnProgress
from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.grouped_weight import AnyWeight, GroupedWeight, joined_rows, plain
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.lora.torch_adapter import AdaptedRows, Gated
from shard_server.engines.torch_engine.operators.linear import Linear, MakesLinears, Product, Weight
from shard_server.engines.torch_engine.rope import rotate_, rotation_table

_LAYERS_PER_REPORT = 16
_CPU = torch.device("cpu")

ModelWeights = dict[str, torch.Tensor] | dict[str, AnyWeight]
"""By the names in the files"""

Attend = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer, queries [rows, num_heads * head_dim]) → the same shape, over KV that is written already."""


@dataclasses.dataclass(slots=True)
class DecoderLayer:
    attention_norm: torch.Tensor
    qkv: Linear
    query_key_norms: tuple[torch.Tensor, torch.Tensor] | None
    attention_output: Linear
    mlp_norm: torch.Tensor
    gated: Product
    down: Linear


class LlamaModel:
    """The weights, converted for computing, and the forward pass."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: ModelWeights,
        *,
        dtype: torch.dtype,
        max_model_len: int,
        linears: MakesLinears,
        on_progress: OnProgress = lambda _message: None,
        device: torch.device = _CPU,
    ) -> None:
        """Consumes `weights`: entries are removed as they are converted, so that memory need not hold both."""
        self._config = config
        embedding = _taken(weights, "model.embed_tokens.weight", dtype, device)
        head = embedding if config.tie_word_embeddings else _taken(weights, "lm_head.weight", dtype, device)
        self.head = linears.linear(head, None)
        look_up = self.head.weight_rows if config.tie_word_embeddings else None
        table = plain(embedding, dtype) if look_up is None else torch.empty(0)
        self.embedding = table if look_up is None else None
        """[vocab_size, hidden_size]; None: rows are looked up in the head's weights."""
        self._look_up = look_up or functools.partial(F.embedding, weight=table)
        del embedding, head  # they may be unused from here on
        self.norm = plain(_taken(weights, "model.norm.weight", dtype, device))
        self.layers: list[DecoderLayer] = []

        for index in range(config.num_layers):
            self.layers.append(_take_layer(weights, index, dtype, device, linears))
            if (index + 1) % _LAYERS_PER_REPORT == 0 or index + 1 == config.num_layers:
                on_progress(f"weights: layer {index + 1} of {config.num_layers}")
        first_key, first_value = config.query_size, config.query_size + config.kv_size
        self._qkv_columns = {
            "q_proj": slice(first_key),
            "k_proj": slice(first_key, first_value),
            "v_proj": slice(first_value, first_value + config.kv_size),
        }
        table = rotation_table(max_model_len, config.head_dim, config.rope_theta, config.rope_scaling)
        self.cos, self.sin = (part.to(device) for part in table)

    @property
    def distinct_products(self) -> list[Product]:
        """One product of every shape."""
        layer = self.layers[0]
        return [layer.qkv, layer.attention_output, layer.gated, layer.down, self.head]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        token_rows: torch.Tensor,
        attend: Attend,
        cache: KvCache,
    ) -> torch.Tensor:
        """`token_ids` and `positions`: int64 [rows], padding included. Writes the KV of the first rows, as many as
        `token_rows` (int64 [layers, tokens]) has places for.

        Returns float32 logits [len(logit_rows), vocab_size].
        """
        return self.logits(self.last_layer(token_ids, positions, token_rows, attend, cache), logit_rows)

    def last_layer(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        token_rows: torch.Tensor,
        attend: Attend,
        cache: KvCache,
        adapted: AdaptedRows | None = None,
    ) -> torch.Tensor:
        """Returns the last layer's output, before the last norm: [rows, hidden_size]. `adapted`: the rows that adapters
        change. The rest is as in `forward`."""
        config = self._config
        x = self._look_up(token_ids)
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        rotated_size = config.query_size + config.kv_size
        for index, layer in enumerate(self.layers):
            normalised = self._normalise(x, layer.attention_norm)
            qkv = layer.qkv(normalised)
            if adapted is not None:
                adapted.add(index, self._qkv_columns, normalised, qkv)
            if layer.query_key_norms is not None:
                self._normalise_heads_(qkv, *layer.query_key_norms)
            rotate_(qkv[:, :rotated_size].unflatten(-1, (-1, config.head_dim)), cos, sin)
            cache.write(token_rows[index], qkv[: token_rows.shape[1], config.query_size :])
            attended = attend(index, qkv[:, : config.query_size])
            x = layer.attention_output.add(attended, x)
            if adapted is not None:
                adapted.add(index, {"o_proj": slice(None)}, attended, x)
            normalised = self._normalise(x, layer.mlp_norm)
            gated = layer.gated(normalised)
            if adapted is not None:
                adapted.gate(index, cast(Gated, layer.gated), normalised, gated)
            x = layer.down.add(gated, x)
            if adapted is not None:
                adapted.add(index, {"down_proj": slice(None)}, gated, x)
        return x

    def logits(self, x: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        """float32 [len(logit_rows), vocab_size], from what `last_layer` gave."""
        return self.head.floats(self._normalise(x[logit_rows], self.norm))

    def hidden_states(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [rows, hidden_size], from rows of what `last_layer` gave: after the last norm, not rounded again."""
        return self._normalise(x.float(), self.norm.float())

    def _normalise_heads_(self, qkv: torch.Tensor, query_norm: torch.Tensor, key_norm: torch.Tensor) -> None:
        config = self._config
        queries, keys, _ = qkv.split([config.query_size, config.kv_size, config.kv_size], dim=-1)
        for heads, weight in ((queries, query_norm), (keys, key_norm)):
            heads = heads.unflatten(-1, (-1, config.head_dim))
            heads.copy_(F.rms_norm(heads, weight.shape, weight, self._config.rms_norm_eps))

    def _normalise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)


def _taken(weights: ModelWeights, name: str, dtype: torch.dtype, device: torch.device) -> AnyWeight:
    """Always a copy if it is plain, so that nothing keeps a reference to the mapped file."""
    weight = weights.pop(name)
    return weight if isinstance(weight, GroupedWeight) else weight.to(device, dtype, copy=True)


def _take_layer(
    weights: ModelWeights, index: int, dtype: torch.dtype, device: torch.device, linears: MakesLinears
) -> DecoderLayer:
    prefix = f"model.layers.{index}"

    def norm(name: str) -> torch.Tensor:
        return plain(_taken(weights, f"{prefix}.{name}.weight", dtype, device))

    query_key_norms = None
    if f"{prefix}.self_attn.q_norm.weight" in weights:
        query_key_norms = (norm("self_attn.q_norm"), norm("self_attn.k_norm"))

    def weight(*names: str) -> Weight:
        parts = [weights.pop(f"{prefix}.{name}.weight") for name in names]
        moved = [part if isinstance(part, GroupedWeight) else part.to(device, dtype) for part in parts]
        bias_names = [f"{prefix}.{name}.bias" for name in names]
        biases = [plain(weights.pop(name)).to(device, dtype) for name in bias_names if name in weights]
        # Always a copy: even `cat` of one tensor no longer refers to the mapped file.
        return joined_rows(moved), torch.cat(biases) if biases else None

    return DecoderLayer(
        attention_norm=norm("input_layernorm"),
        qkv=linears.linear(*weight("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        query_key_norms=query_key_norms,
        attention_output=linears.linear(*weight("self_attn.o_proj")),
        mlp_norm=norm("post_attention_layernorm"),
        gated=linears.gated(weight("mlp.gate_proj"), weight("mlp.up_proj")),
        down=linears.linear(*weight("mlp.down_proj")),
    )
