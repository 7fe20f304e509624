"""Compiled norms, rotation and look-up compute what torch's operators compute."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shard_server.engines.torch_engine.rope import rotate_, rotation_table
from tests.fakes.kernel_threads import kernel_thread_pool

tasks = pytest.importorskip("shard_server.engines.torch_engine.kernels.codegen.tasks")


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[object]:
    with kernel_thread_pool(request.param) as found:
        yield found


def random_rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def normalised(threads, x: torch.Tensor, weight: torch.Tensor, rows: list[int] | None = None) -> torch.Tensor:
    indices = None if rows is None else np.array(rows, np.int64)
    num_rows = len(x) if indices is None else len(indices)
    out = torch.empty(num_rows, x.shape[1], dtype=torch.bfloat16)
    addresses = 0 if indices is None else indices.ctypes.data, x.data_ptr(), out.data_ptr(), weight.data_ptr()
    threads.run(tasks.program([tasks.task(tasks.NORM, num_rows, *addresses, x.shape[1], tasks.float_bits(1e-5))]))
    return out


@pytest.mark.parametrize("columns", [32, 96, 576, 1056])
def test_norms_are_torchs_but_for_the_last_bit(threads, columns: int):
    """Sums run in another order, so a rounding may rarely fall to the other side; of any rows, at any place."""
    x, weight = random_rows(20, columns), random_rows(columns)
    expected = F.rms_norm(x, (columns,), weight, 1e-5)
    rows = normalised(threads, x, weight)
    torch.testing.assert_close(rows, expected, rtol=2**-7, atol=0)
    assert (rows != expected).float().mean() < 0.01
    assert torch.equal(normalised(threads, x, weight, [3, 19, 3]), rows[[3, 19, 3]])


def test_norms_of_heads_have_the_weights_of_queries_and_of_keys(threads):
    """Values are left alone."""
    query_size, kv_size, dim = 96, 64, 32
    qkv, weights = random_rows(7, query_size + 2 * kv_size), (random_rows(dim), random_rows(dim) * 3)
    expected = qkv.clone().unflatten(1, (-1, dim))
    for heads, weight in ((slice(0, 3), weights[0]), (slice(3, 5), weights[1])):
        expected[:, heads] = F.rms_norm(expected[:, heads], (dim,), weight, 1e-5)
    addresses = (tensor.data_ptr() for tensor in (qkv, *weights))
    sizes = query_size, kv_size, dim
    threads.run(tasks.program([tasks.task(tasks.HEAD_NORMS, 7, *addresses, *sizes, tasks.float_bits(1e-5))]))
    torch.testing.assert_close(qkv, expected.flatten(1), rtol=2**-7, atol=0)


def test_rotated_rows_and_what_is_stored_are_the_same_bits(threads):
    """Keys go to their slots with the values, among the layer's own and those of 16 tokens: pairs of a key's numbers
    side by side, and pairs of tokens' values."""
    rows, query_size, kv_size, dim, block_size, num_layers, layer = 9, 96, 32, 16, 32, 3, 1
    qkv = random_rows(rows, query_size + 2 * kv_size)
    cos, sin = rotation_table(50, dim, 1e4)
    positions, slots = torch.arange(40, 40 + rows), torch.randperm(5 * block_size)[:rows]
    pool = torch.zeros(5, num_layers, block_size // 16, 2, kv_size * 16).bfloat16()
    expected_pool, expected = torch.zeros(5, num_layers, block_size, 2 * kv_size).bfloat16(), qkv.clone()
    rotate_(expected[:, : query_size + kv_size].unflatten(-1, (-1, dim)), cos[positions, None], sin[positions, None])
    expected_pool[slots // block_size, layer, slots % block_size] = expected[:, query_size:]
    addresses = (tensor.data_ptr() for tensor in (positions, slots, qkv, cos, sin))
    sizes = query_size, kv_size, dim, pool.data_ptr(), block_size, num_layers, layer
    threads.run(tasks.program([tasks.task(tasks.ROTATE, rows, *addresses, *sizes)]))
    assert torch.equal(qkv, expected)
    keys = pool[:, :, :, 0].unflatten(3, (kv_size // 2, 16, 2)).permute(0, 1, 2, 4, 3, 5).reshape(5, 3, 32, kv_size)
    values = pool[:, :, :, 1].unflatten(3, (kv_size // 16, 8, 16, 2)).permute(0, 1, 2, 4, 6, 3, 5)
    assert torch.equal(keys, expected_pool[..., :kv_size])
    assert torch.equal(values.reshape(5, 3, 32, kv_size), expected_pool[..., kv_size:])


def test_rows_of_a_table_are_looked_up(threads):
    """An embedding that is not the head's, too."""
    table, indices = random_rows(10, 48), torch.tensor([3, 0, 9, 3, 5])
    out = torch.empty(5, 48, dtype=torch.bfloat16)
    task = tasks.task(tasks.LOOK_UP, 5, indices.data_ptr(), table.data_ptr(), 48, out.data_ptr())
    threads.run(tasks.program([task]))
    assert torch.equal(out, table[indices])


@pytest.mark.parametrize("columns", [32, 96, 384])
def test_layer_norms_are_torchs(threads, columns: int):
    """Encoders have them: of the sum of two arrays, in place in float32, and rounded for the next product."""
    generator = torch.Generator().manual_seed(1)
    numbers, others = torch.randn(2, 9, columns, generator=generator).mul(3).add(1).unbind()
    weight, bias = torch.randn(2, columns, generator=generator).unbind()
    expected = F.layer_norm(numbers + others, (columns,), weight, bias, 1e-12)
    out = torch.empty(9, columns, dtype=torch.bfloat16)
    addresses = (tensor.data_ptr() for tensor in (numbers, others, weight, bias))
    arguments = *addresses, columns, tasks.float_bits(1e-12), out.data_ptr()
    threads.run(tasks.program([tasks.task(tasks.LAYER_NORM, 9, *arguments)]))
    torch.testing.assert_close(numbers, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(out, numbers.bfloat16())
