"""The Triton attention kernel of single rows equals the plain one. These tests need a GPU, or Triton and
TRITON_INTERPRET=1."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_server.engines.torch_engine.config import load_config
from shard_server.engines.torch_engine.device.attention import gathering_rows, triton_rows
from shard_server.engines.torch_engine.kv_cache import KvCache
from tests.fakes.tiny_llama import write_tiny_llama

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="no GPU, and TRITON_INTERPRET=1 is not set",
    ),
]
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
"""Triton's interpreter computes with numpy, which has no bfloat16."""
NUM_BLOCKS = 80
LENGTHS = [1, 2, 16, 17, 63, 64, 65, 255, 256, 257, 511, 600]


def kernels(tmp_path: Path, dtype: torch.dtype, block_size: int, **changes: Any) -> Any:
    config = load_config(write_tiny_llama(tmp_path, **changes))
    cache = KvCache(config, num_blocks=NUM_BLOCKS, block_size=block_size, dtype=dtype, device=DEVICE)
    generator = torch.Generator().manual_seed(1)
    cache.pool.copy_(torch.randn(cache.pool.shape, generator=generator))
    max_keys = -(-640 // block_size) * block_size
    return config, cache, triton_rows(config, cache, max_keys), max_keys // block_size


def inputs(config: Any, dtype: torch.dtype, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chooser = random.Random(2)
    tables = [[chooser.randrange(NUM_BLOCKS) for _ in range(width)] for _ in LENGTHS]
    generator = torch.Generator().manual_seed(3)
    # As in the model, this is a part of wider rows.
    queries = torch.randn(len(LENGTHS), 2 * config.query_size, generator=generator).to(DEVICE, dtype)
    return (
        queries[:, : config.query_size],
        torch.tensor(tables, dtype=torch.int32, device=DEVICE),
        torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE),
    )


@pytest.mark.parametrize("window", [None, 1, 50, 300])
@pytest.mark.parametrize(
    ("dtype", "block_size", "changes"),
    [
        (torch.float32, 16, {}),
        (torch.float32, 5, {"num_attention_heads": 6, "head_dim": 24}),
        (HALF, 32, {"num_key_value_heads": 1, "head_dim": 64}),
    ],
    ids=["float32", "odd-sizes", "half"],
)
def test_the_kernels_compute_attention_over_paged_keys(
    tmp_path: Path, dtype: torch.dtype, block_size: int, changes: dict[str, Any], window: int | None
):
    """The lengths lie around the borders of tiles, segments and blocks, and some head counts and sizes fill no tile."""
    config, cache, attend, width = kernels(tmp_path, dtype, block_size, **changes)
    queries, tables, lengths = inputs(config, dtype, width)
    expected = gathering_rows(config, cache)(queries, 1, tables, lengths, window)
    actual = attend(queries, 1, tables, lengths, window)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_a_row_gets_the_same_bits_in_any_company(tmp_path: Path):
    """Batch invariance on a GPU relies on this."""
    config, _, attend, width = kernels(tmp_path, torch.float32, 16)
    queries, tables, lengths = inputs(config, torch.float32, width)
    together = attend(queries, 0, tables, lengths, None)
    order = random.Random(4).sample(range(len(LENGTHS)), 5)
    assert torch.equal(attend(queries[order], 0, tables[order], lengths[order], None), together[order])
    # The longest possible table does not matter either.
    shortest = lengths <= 256
    alone = attend(queries[shortest], 0, tables[shortest][:, :16].contiguous(), lengths[shortest], None)
    assert torch.equal(alone, together[shortest])


def test_more_rows_than_have_room_are_taken_in_turns(tmp_path: Path):
    """Prompts whose rows are computed one by one have hundreds of them."""
    config, _, attend, width = kernels(tmp_path, torch.float32, 16)
    queries, tables, lengths = (part.repeat(25, 1) for part in _columns(inputs(config, torch.float32, width)))
    out = attend(queries, 1, tables, lengths[:, 0].contiguous(), None)
    assert torch.equal(out[:12], out[-12:])


def _columns(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(part if part.dim() == 2 else part[:, None] for part in parts)
