"""The forward pass computes what the reference implementation (transformers) computes on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from lab.shallow_model import write_shallow_model
from shard_server.engines.torch_engine.config import load_config
from shard_server.engines.torch_engine.model_runner import ModelRunner, ScheduledSequence
from tests.fakes.tiny_llama import write_tiny_llama
from tests.lazy_imports import imported_when_used

pytestmark = pytest.mark.xdist_group("transformers")  # which takes seconds to import
transformers = imported_when_used("transformers")

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def our_logits(model_dir: Path, token_ids: list[int], dtype: str) -> torch.Tensor:
    """Returns the logits of every position: half of the tokens are prefilled and the others decoded one by one."""
    runner = ModelRunner(model_dir, dtype=dtype, block_size=16, num_blocks=16, max_model_len=128, num_threads=1)
    half = len(token_ids) // 2
    block_table = list(range(15, 0, -1))
    rows = [runner.run([ScheduledSequence(token_ids[:half], 0, block_table, True)])]
    rows += [
        runner.run([ScheduledSequence([token_ids[position]], position, block_table, True)])
        for position in range(half, len(token_ids))
    ]
    return torch.cat(rows)


def reference_logits(model_dir: Path, token_ids: list[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0, len(token_ids) // 2 - 1 :]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4, "tie_word_embeddings": False},
        {"num_key_value_heads": 1, "head_dim": 16},
        {"rope_scaling": LLAMA3_SCALING, "attention_bias": True, "mlp_bias": True},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 500000.0},
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": 16},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
    ],
    ids=["gqa", "mha-untied", "mqa", "llama3-rope-biases", "linear-rope", "qwen2", "mistral"],
)
def test_float32_logits_of_every_family_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]):
    """In float32 a wrong rotation or a missing bias exceeds any rounding error."""
    model_dir = write_tiny_llama(tmp_path, **changes)
    token_ids = torch.randint(0, 320, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    torch.testing.assert_close(
        our_logits(model_dir, token_ids, "float32"), reference_logits(model_dir, token_ids), rtol=1e-3, atol=1e-3
    )


CONVERSATION = (
    "<|im_start|>user\nWhat is the capital of France? Answer in one short sentence.<|im_end|>\n"
    "<|im_start|>assistant\nThe capital of France is Paris. It lies on the Seine.<|im_end|>\n"
    "<|im_start|>user\nWrite a function that adds two numbers in Python.<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.parametrize("num_layers", [4, pytest.param(30, marks=pytest.mark.long)])
def test_logits_of_the_built_in_model_are_those_of_transformers(model_dir: Path, tmp_path: Path, num_layers: int):
    """Over 30 layers nothing may differ in float32, and rounding must not accumulate in bf16 (transformers' own bf16
    logits have a mean cosine of 0.9996 with its float32 ones here)."""
    if num_layers < load_config(model_dir).num_layers:
        model_dir = write_shallow_model(model_dir, tmp_path / "shallow", num_layers)
    token_ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(CONVERSATION).ids
    reference = reference_logits(model_dir, token_ids)
    exact = torch.cosine_similarity(our_logits(model_dir, token_ids, "float32"), reference)
    assert exact.min() > 0.99999
    rounded = torch.cosine_similarity(our_logits(model_dir, token_ids, "bfloat16"), reference)
    assert rounded.mean() > 0.999
    assert rounded.min() > 0.99
