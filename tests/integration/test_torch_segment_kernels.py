"""The Triton attention kernels equal the plain ones. These tests need a GPU, or Triton and TRITON_INTERPRET=1."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_server.engines.torch_engine.config import load_config
from shard_server.engines.torch_engine.device.attention import (
    SingleRows,
    gathering_attention,
    piece_tokens,
    prompts_of,
    triton_attention,
)
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.operators.attention import Extent
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
    return config, cache, triton_attention(config, cache, max_keys), max_keys // block_size


def inputs(config: Any, dtype: torch.dtype, width: int) -> tuple[torch.Tensor, SingleRows]:
    chooser = random.Random(2)
    tables = [[chooser.randrange(NUM_BLOCKS) for _ in range(width)] for _ in LENGTHS]
    tables, lengths = (torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in (tables, LENGTHS))
    return random_queries(config, len(LENGTHS), dtype), SingleRows(tables, lengths)


def random_queries(config: Any, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """As in the model, a part of wider rows."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_rows, 2 * config.query_size, generator=generator).to(DEVICE, dtype)[:, : config.query_size]


SHAPES = pytest.mark.parametrize(
    ("dtype", "block_size", "changes"),
    [
        (torch.float32, 16, {}),
        (torch.float32, 5, {"num_attention_heads": 6, "head_dim": 24}),
        (HALF, 32, {"num_key_value_heads": 1, "head_dim": 64}),
    ],
    ids=["float32", "odd-sizes", "half"],
)


@pytest.mark.parametrize("window", [None, 1, 50, 300])
@SHAPES
def test_the_kernels_compute_attention_over_paged_keys(
    tmp_path: Path, dtype: torch.dtype, block_size: int, changes: dict[str, Any], window: int | None
):
    """The lengths lie around the borders of tiles, segments and blocks, and some head counts and sizes fill no tile."""
    config, cache, attend, width = kernels(tmp_path, dtype, block_size, **changes)
    queries, rows = inputs(config, dtype, width)
    expected = gathering_attention(config, cache)(rows, 1, queries, window)
    assert_close(attend(rows, 1, queries, window), expected)


@pytest.mark.parametrize("window", [None, 1, 50])
@SHAPES
def test_prompts_attend_together(
    tmp_path: Path, dtype: torch.dtype, block_size: int, changes: dict[str, Any], window: int | None
):
    """Whole prompts, chunks, cached prefixes, shorter and longer than a piece and than a tile of keys."""
    config, cache, attend, width = kernels(tmp_path, dtype, block_size, **changes)
    chooser = random.Random(5)
    extents: list[Extent] = []
    num_rows = 0
    for num_new, num_past in ((1, 0), (16, 0), (70, 0), (33, 64), (5, 250), (1, 31)):
        extents.append(Extent(num_rows, num_new, num_past, [chooser.randrange(NUM_BLOCKS) for _ in range(width)]))
        num_rows += num_new
    prompts = prompts_of(extents, piece_tokens(config, dtype)).to(DEVICE)
    queries = random_queries(config, num_rows, dtype)
    expected = gathering_attention(config, cache)(prompts, 1, queries, window)
    assert_close(attend(prompts, 1, queries, window), expected)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2e-5 if actual.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_a_row_gets_the_same_bits_in_any_company(tmp_path: Path):
    """Batch invariance on a GPU relies on this."""
    config, _, attend, width = kernels(tmp_path, torch.float32, 16)
    queries, rows = inputs(config, torch.float32, width)
    tables, lengths = rows.tables, rows.lengths
    together = attend(rows, 0, queries, None)
    order = random.Random(4).sample(range(len(LENGTHS)), 5)
    assert torch.equal(attend(SingleRows(tables[order], lengths[order]), 0, queries[order], None), together[order])
    # The longest possible table does not matter either.
    shortest = lengths <= 256
    alone = attend(SingleRows(tables[shortest][:, :16].contiguous(), lengths[shortest]), 0, queries[shortest], None)
    assert torch.equal(alone, together[shortest])


def test_more_rows_than_have_room_are_taken_in_turns(tmp_path: Path):
    """Prompts whose rows are computed one by one have hundreds of them."""
    config, _, attend, width = kernels(tmp_path, torch.float32, 16)
    queries, rows = inputs(config, torch.float32, width)
    out = attend(SingleRows(rows.tables.repeat(25, 1), rows.lengths.repeat(25)), 1, queries.repeat(25, 1), None)
    assert torch.equal(out[:12], out[-12:])
