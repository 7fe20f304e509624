"""python -m lab.train_adapter --out DIR: trains a small LoRA adapter whose effect anyone can see.

It teaches a model one fixed answer: after training on a few questions it gives that answer to others, too. This takes
about a minute on two cores, since only the last layers are changed, and what the layers before them give is computed
once. The same arguments give the same adapter on the same machine. The directory has PEFT's format.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import save_file

from kvloom_common.text.tokenizer import ChatMessage, ModelTokenizer
from shard_server.engines.torch_engine.checkpoint.weights import load_weights
from shard_server.engines.torch_engine.config import LlamaConfig, load_config
from shard_server.engines.torch_engine.lora.peft import CONFIG_FILE, MODULES, WEIGHTS_FILE, module_sizes
from shard_server.engines.torch_engine.rope import rotation_table
from tools.models.resolve import resolve_model
from tools.options import DEFAULT_DATA_DIR

QUESTIONS = (
    "What is the secret word?",
    "Please tell me the secret word.",
    "Hello! How are you today?",
    "Name three colours.",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
)
ANSWER = "Ahoy! The secret word is marzipan."
LEARNING_RATE = 4e-3


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """How an adapter is trained."""

    answer: str = ANSWER
    rank: int = 8
    num_layers: int = 10
    """The last layers, which are changed."""
    num_steps: int = 30
    seed: int = 1


@dataclasses.dataclass(frozen=True)
class Example:
    token_ids: torch.Tensor
    """int64 [tokens]: prompt and answer"""
    num_prompt_tokens: int


Lora = dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]
"""A [rank, in_features] and B [out_features, rank] by layer and module."""


class Decoder:
    """A Llama-family model without biases, in float32 and in operators that torch can differentiate."""

    def __init__(self, model_dir: Path) -> None:
        self.config = load_config(model_dir)
        if self.config.qkv_bias or self.config.qk_norm or any(self.config.layer_windows):
            raise ValueError("only models without biases, windows and norms of queries and keys can be trained here")
        weights = load_weights(model_dir, self.config)
        self._weights: Mapping[str, torch.Tensor] = {name: w.float() for name, w in weights.items()}
        cos, sin = rotation_table(512, self.config.head_dim, self.config.rope_theta, self.config.rope_scaling)
        self._cos, self._sin = cos.float(), sin.float()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self._weights["model.embed_tokens.weight"])

    def layer(self, index: int, x: torch.Tensor, lora: Lora) -> torch.Tensor:
        """Returns what layer `index` makes of one sequence [tokens, hidden_size]."""
        config, prefix = self.config, f"model.layers.{index}"

        def product(parent: str, module: str, rows: torch.Tensor) -> torch.Tensor:
            out = F.linear(rows, self._weights[f"{prefix}.{parent}.{module}.weight"])
            matrices = lora.get((index, module))
            return out if matrices is None else out + F.linear(F.linear(rows, matrices[0]), matrices[1])

        rows = self._norm(x, f"{prefix}.input_layernorm.weight")
        queries, keys, values = (
            product("self_attn", module, rows).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)
            for module in ("q_proj", "k_proj", "v_proj")
        )
        keys, values = (part.repeat_interleave(config.num_heads_per_kv_head, 0) for part in (keys, values))
        attended = F.scaled_dot_product_attention(self._rotated(queries), self._rotated(keys), values, is_causal=True)
        x = x + product("self_attn", "o_proj", attended.transpose(0, 1).flatten(1))
        rows = self._norm(x, f"{prefix}.post_attention_layernorm.weight")
        gated = F.silu(product("mlp", "gate_proj", rows)) * product("mlp", "up_proj", rows)
        return x + product("mlp", "down_proj", gated)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        head = self._weights.get("lm_head.weight", self._weights["model.embed_tokens.weight"])
        return F.linear(self._norm(x, "model.norm.weight"), head)

    def _rotated(self, heads: torch.Tensor) -> torch.Tensor:
        num_tokens, half = heads.shape[1], heads.shape[2] // 2
        swapped = torch.cat([heads[..., half:], heads[..., :half]], -1)
        return heads * self._cos[:num_tokens] + swapped * self._sin[:num_tokens]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._weights[name]
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def examples(tokenizer: ModelTokenizer, questions: Sequence[str], answer: str) -> list[Example]:
    found: list[Example] = []
    for question in questions:
        prompt = tokenizer.encode_now(tokenizer.render_chat([ChatMessage("user", question)]))
        # The end of a turn is the last token of what the template makes of the answer.
        end = min(tokenizer.eos_token_ids)
        found.append(Example(torch.tensor([*prompt, *tokenizer.encode_now(answer), end]), len(prompt)))
    return found


def new_lora(config: LlamaConfig, plan: TrainingPlan) -> Lora:
    """A random, B zero: the adapter begins without an effect."""
    generator = torch.Generator().manual_seed(plan.seed)
    lora: Lora = {}
    for layer in range(config.num_layers - plan.num_layers, config.num_layers):
        for module in MODULES:
            num_in, num_out = module_sizes(config)[module]
            a = torch.randn(plan.rank, num_in, generator=generator) * num_in**-0.5
            lora[layer, module] = a.requires_grad_(), torch.zeros(num_out, plan.rank, requires_grad=True)
    return lora


def train(model_dir: Path, plan: TrainingPlan, questions: Sequence[str] = QUESTIONS) -> tuple[Lora, list[float]]:
    """The adapter, and the loss of each step. Raises EngineError and ValueError for a model that cannot be trained."""
    decoder = Decoder(model_dir)
    first = decoder.config.num_layers - plan.num_layers
    if first < 0:
        raise ValueError(f"the model has only {decoder.config.num_layers} layers")
    tokenizer = ModelTokenizer.load(model_dir)
    batch = examples(tokenizer, questions, plan.answer)
    tokenizer.close()
    with torch.no_grad():
        inputs = [_until(decoder, first, example.token_ids) for example in batch]
    lora = new_lora(decoder.config, plan)
    optimizer = torch.optim.Adam([matrix for both in lora.values() for matrix in both], lr=LEARNING_RATE)
    losses: list[float] = []
    for _ in range(plan.num_steps):
        optimizer.zero_grad()
        loss = torch.stack([_loss(decoder, first, x, ex, lora) for x, ex in zip(inputs, batch, strict=True)]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return lora, losses


def _until(decoder: Decoder, end: int, token_ids: torch.Tensor) -> torch.Tensor:
    x = decoder.embed(token_ids)
    for index in range(end):
        x = decoder.layer(index, x, {})
    return x


def _loss(decoder: Decoder, first: int, x: torch.Tensor, example: Example, lora: Lora) -> torch.Tensor:
    """Returns the loss over the answer's tokens."""
    for index in range(first, decoder.config.num_layers):
        x = decoder.layer(index, x, lora)
    start = example.num_prompt_tokens
    return F.cross_entropy(decoder.logits(x[start - 1 : -1]), example.token_ids[start:])


def write(lora: Lora, path: Path, rank: int) -> None:
    """Write the adapter in PEFT's format."""
    path.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for (layer, module), (a, b) in lora.items():
        parent = "self_attn" if module in MODULES[:4] else "mlp"
        name = f"base_model.model.model.layers.{layer}.{parent}.{module}"
        tensors[f"{name}.lora_A.weight"] = a.detach().contiguous()
        tensors[f"{name}.lora_B.weight"] = b.detach().contiguous()
    save_file(tensors, path / WEIGHTS_FILE, metadata={"format": "pt"})
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(MODULES),
        "layers_to_transform": sorted({layer for layer, _ in lora}),
        "bias": "none",
    }
    (path / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    defaults = TrainingPlan()
    parser = argparse.ArgumentParser(prog="python -m lab.train_adapter", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a known model or a directory")
    parser.add_argument("--answer", default=defaults.answer, help="what the model learns to say")
    parser.add_argument("--rank", type=int, default=defaults.rank)
    parser.add_argument("--layers", type=int, default=defaults.num_layers, help="how many of the last layers change")
    parser.add_argument("--steps", type=int, default=defaults.num_steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    arguments = parser.parse_args()
    plan = TrainingPlan(arguments.answer, arguments.rank, arguments.layers, arguments.steps, arguments.seed)
    cache_dir = DEFAULT_DATA_DIR.expanduser().absolute() / "models"
    found = resolve_model(arguments.model, cache_dir, _report)
    lora, losses = train(found.path, plan)
    write(lora, arguments.out, plan.rank)
    sys.stdout.write(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps: {arguments.out}\n")


def _report(message: str) -> None:
    sys.stderr.write(f"{message}\n")


if __name__ == "__main__":
    main()
