"""Compiled norms and rotation compute what torch's operators compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shard_server.engines.torch_engine.rope import rotate_, rotation_table

row_kernels = pytest.importorskip("shard_server.engines.torch_engine.row_kernels")


def random_rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("columns", [1, 30, 576, 1027])
def test_norms_are_torchs_but_for_the_last_bit(columns: int):
    """Sums run in another order, so a rounding may rarely fall to the other side; rows may lie apart."""
    x, weight = random_rows(20, columns + 7)[:, :columns], random_rows(columns)
    expected = F.rms_norm(x, (columns,), weight, 1e-5)
    rows = row_kernels.normalised(x, weight, 1e-5)
    torch.testing.assert_close(rows, expected, rtol=2**-7, atol=0)
    assert (rows != expected).float().mean() < 0.01
    assert torch.equal(row_kernels.normalised(x[3:4], weight, 1e-5), rows[3:4])


def test_rotated_rows_and_what_is_stored_are_the_same_bits():
    """Keys of the first rows go to their places with the values; padding rows behind them go nowhere."""
    rows, num_tokens, query_size, kv_size, dim = 9, 7, 96, 32, 16
    qkv = random_rows(rows, query_size + 2 * kv_size)
    cos, sin = rotation_table(50, dim, 1e4)
    positions, places = torch.arange(40, 40 + rows), torch.randperm(20)[:num_tokens]
    pool = torch.zeros(20, 2 * kv_size).bfloat16()
    expected_pool, expected = pool.clone(), qkv.clone()
    rotate_(expected[:, : query_size + kv_size].unflatten(-1, (-1, dim)), cos[positions, None], sin[positions, None])
    expected_pool.index_copy_(0, places, expected[:num_tokens, query_size:])
    row_kernels.rotate_and_store(qkv, places, positions=positions, cos=cos, sin=sin, query_size=query_size, pool=pool)
    assert torch.equal(qkv, expected)
    assert torch.equal(pool, expected_pool)
