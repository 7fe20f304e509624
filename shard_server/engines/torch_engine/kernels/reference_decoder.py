"""The baseline of `kvloom bench engine --reference`: the simplest decoder that computes the same model.

It has contiguous KV, one batch of equally long sequences, stock attention, no scheduler, no KV blocks, no sampling
beyond argmax and no guarantees about bits. The comparison, on one machine in one run, shows the cost of the engine's KV
blocks, ragged lengths and determinism.
"""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.weights import load_weights
from shard_server.engines.torch_engine.config import LlamaConfig, load_config

_PROMPT_TOKENS = 144
_DECODE_STEPS = 48


class ReferenceDecoder:
    """Llama-family weights in bf16, without biases. Raises EngineError when they cannot be read."""

    def __init__(self, model_dir: Path, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._config = load_config(model_dir)
        if self._config.qkv_bias or self._config.qk_norm or any(self._config.layer_windows):
            raise EngineError(
                "the reference decoder computes models without biases, windows and norms of queries and keys only"
            )
        self._weights = {name: w.to(torch.bfloat16) for name, w in load_weights(model_dir, self._config).items()}
        for layer in range(self._config.num_layers):
            self._fuse(layer, "qkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
            self._fuse(layer, "gate_up", "mlp.gate_proj", "mlp.up_proj")
        head_dim = self._config.head_dim
        self._frequencies = self._config.rope_theta ** -(torch.arange(0, head_dim, 2).float() / head_dim)

    @torch.inference_mode()
    def decode_tokens_per_second(
        self, batch: int, num_prompt_tokens: int = _PROMPT_TOKENS, max_seconds: float = math.inf
    ) -> float:
        """The median over steps of `batch` sequences after prompts of random tokens. No further step begins after
        `max_seconds`."""
        config = self._config
        shape = (2, batch, config.num_kv_heads, num_prompt_tokens + _DECODE_STEPS, config.head_dim)
        kv = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(config.num_layers)]
        token_ids = self._step(torch.randint(0, config.vocab_size, (batch, num_prompt_tokens)), 0, kv)
        seconds: list[float] = []
        end = time.perf_counter() + max_seconds
        for step in range(_DECODE_STEPS):
            begin = time.perf_counter()
            if seconds and begin > end:
                break
            token_ids = self._step(token_ids, num_prompt_tokens + step, kv)
            seconds.append(time.perf_counter() - begin)
        return batch / statistics.median(seconds)

    def _fuse(self, layer: int, name: str, *parts: str) -> None:
        prefix = f"model.layers.{layer}."
        self._weights[f"{prefix}{name}.weight"] = torch.cat(
            [self._weights.pop(f"{prefix}{part}.weight") for part in parts]
        )

    def _step(self, token_ids: torch.Tensor, position: int, kv: list[torch.Tensor]) -> torch.Tensor:
        """int64 [batch, tokens] at `position` → the next tokens, int64 [batch, 1]."""
        config, weights = self._config, self._weights
        embedding = weights["model.embed_tokens.weight"]
        angles = torch.outer(torch.arange(position, position + token_ids.shape[1]).float(), self._frequencies)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        x = F.embedding(token_ids, embedding)
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}."
            h = F.linear(self._norm(x, f"{prefix}input_layernorm"), weights[f"{prefix}qkv.weight"])
            attended = _attend(h, config, position, kv[layer], cos, sin)
            x = x + F.linear(attended, weights[f"{prefix}self_attn.o_proj.weight"])
            h = F.linear(self._norm(x, f"{prefix}post_attention_layernorm"), weights[f"{prefix}gate_up.weight"])
            gate, up = h.chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, weights[f"{prefix}mlp.down_proj.weight"])
        head = embedding if config.tie_word_embeddings else weights["lm_head.weight"]
        return F.linear(self._norm(x[:, -1], "model.norm"), head).argmax(dim=-1, keepdim=True)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)


def _attend(
    qkv: torch.Tensor, config: LlamaConfig, position: int, kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """`qkv` [batch, tokens, ...], `kv` [2, batch, kv heads, window, head_dim] → [batch, tokens, heads * head_dim]."""
    batch, num_tokens = qkv.shape[:2]
    end = position + num_tokens
    q, k, v = (
        part.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        for part in qkv.split([config.query_size, config.kv_size, config.kv_size], dim=-1)
    )
    q = _rotated(q, cos, sin)
    kv[0, :, :, position:end], kv[1, :, :, position:end] = _rotated(k, cos, sin), v
    keys, values = kv[0, :, :, :end], kv[1, :, :, :end]
    if num_tokens == 1:  # the heads that share keys are rows of one product
        grouped = q.reshape(batch, config.num_kv_heads, -1, config.head_dim)
        out = F.scaled_dot_product_attention(grouped, keys, values).view_as(q)
    else:
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).reshape(batch, num_tokens, -1)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
