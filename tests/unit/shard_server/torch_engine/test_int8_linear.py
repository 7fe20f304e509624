"""int8 weights: what is rounded, that products are exact, and that rows do not depend on one another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.weights import weight_bytes
from shard_server.engines.torch_engine.config import load_config
from shard_server.engines.torch_engine.model_runner import ModelRunner, ScheduledSequence
from shard_server.engines.torch_engine.operators import int8_linear
from shard_server.engines.torch_engine.operators.int8_linear import (
    Int8Linear,
    check_int8_products,
    quantise_rows,
    split_digits,
)
from shard_server.engines.torch_engine.operators.linear import row_granularity
from tests.examples import num_examples
from tests.fakes.int8_products import skip_unless_exact
from tests.fakes.tiny_llama import write_tiny_llama


def random_rows(num_rows: int, num_columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=num_examples(30), deadline=None)
@given(
    num_rows=st.integers(1, 9),
    num_columns=st.integers(1, 70),
    exponent=st.integers(-20, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rounding_is_off_by_half_a_step_at_most(num_rows: int, num_columns: int, exponent: int, dtype: torch.dtype):
    """Of each row's own step: a channel with large weights does not coarsen its neighbours."""
    row_sizes = torch.logspace(0, 3, num_rows)[:, None]
    rows = (random_rows(num_rows, num_columns) * row_sizes * 2.0**exponent).to(dtype)
    values, scales = quantise_rows(rows)
    assert values.dtype == torch.int8
    assert int(values.abs().max()) == 127
    assert torch.all((values * scales - rows.float()).abs() <= 0.5001 * scales)


def test_two_digits_keep_fifteen_bits():
    """So that activations lose less than bfloat16 loses, and only the weights are coarse."""
    rows = random_rows(20, 300) * torch.logspace(-3, 3, 20)[:, None]
    digits, scales = split_digits(rows)
    first, second = (digits.int() - 128).split(20)
    assert torch.all(((first + second / 254) * scales - rows).abs() <= 0.51 * scales / 254)
    zeros, _ = split_digits(torch.zeros(2, 8))
    assert torch.all(zeros == 128)


def test_what_fits_the_steps_comes_back_unchanged():
    """The round trip is exact there: quantising twice is quantising once. A row of zeros stays one."""
    values = torch.randint(-127, 128, (5, 40), generator=torch.Generator().manual_seed(0))
    values[:, 0] = 127
    values[4] = 0
    scales = torch.tensor([2.0**-8, 0.25, 1.0, 64.0, 1.0])[:, None]
    again, scales_again = quantise_rows(values * scales)
    assert torch.equal(again, values.to(torch.int8))
    assert torch.equal(scales_again[:4], scales[:4])


@pytest.mark.parametrize(
    ("num_rows", "num_in", "num_out"), [(0, 64, 96), (1, 64, 96), (7, 96, 64), (32, 33, 50), (70, 576, 8)]
)
def test_a_product_is_the_integers_own(num_rows: int, num_in: int, num_out: int):
    """Nothing is lost but by the rounding of the inputs: sums are exact whatever kernel the library takes."""
    skip_unless_exact()
    weight, rows = random_rows(num_out, num_in, 1), random_rows(num_rows, num_in, 2)
    (digits, scales), (values, weight_scales) = split_digits(rows), quantise_rows(weight)
    products = ((digits.long() - 128) @ values.long().T).float() * weight_scales.T
    expected = (products[:num_rows] + products[num_rows:] / 254) * scales
    assert torch.equal(Int8Linear(weight, None, torch.float32)(rows), expected)


def test_bias_and_what_is_fused_follow_the_product():
    """The four methods of a linear layer say the same as the plain formulas, and inputs that are shared are quantised
    once."""
    linear = Int8Linear(random_rows(48, 64, 1), torch.arange(48.0), torch.float32)
    rows, other = random_rows(5, 64, 2), random_rows(5, 48, 3)
    product = linear(rows)
    assert torch.equal(product, Int8Linear(random_rows(48, 64, 1), None, torch.float32)(rows) + torch.arange(48.0))
    assert torch.equal(linear.silu(rows), torch.nn.functional.silu(product))
    assert torch.equal(linear.multiply(rows, other), product * other)
    assert torch.equal(linear.add(rows, other.bfloat16()), (product + other.bfloat16()).bfloat16())
    assert torch.equal(linear(split_digits(rows)), product)


def test_rows_do_not_depend_on_the_batch():
    """So that products need not be cut into 32 rows, and failover is exact."""
    linear = Int8Linear(random_rows(96, 80), None, torch.bfloat16)
    assert row_granularity(linear, torch.bfloat16) == 1


def test_a_cpu_whose_products_overflow_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Wrong answers are worse than none; where they are right, nothing is said."""

    def inexact(self: Int8Linear, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x), self.out_features)

    with monkeypatch.context() as patched:
        patched.setattr(int8_linear.Int8Linear, "_product", inexact)
        with pytest.raises(EngineError, match="not exact"):
            check_int8_products()
    skip_unless_exact()
    check_int8_products()


def test_the_model_is_nearly_the_same_and_takes_half_the_memory(tmp_path: Path):
    """A transposed scale or a forgotten bias would make it another model."""
    skip_unless_exact()
    model_dir = write_tiny_llama(tmp_path, model_type="qwen2")
    logits = []
    for weights in ("dtype", "int8"):
        runner = ModelRunner(
            model_dir,
            dtype="float32",
            block_size=16,
            num_blocks=8,
            max_model_len=64,
            num_threads=1,
            weights=weights,
            kernels="torch",
        )
        assert runner.batch_invariant
        logits.append(runner.run([ScheduledSequence(list(range(3, 33)), 0, [0, 1], True)]))
    assert torch.nn.functional.cosine_similarity(*logits).item() > 0.995
    config = load_config(model_dir)
    embedding = config.vocab_size * config.hidden_size
    float_bytes, int8_bytes = (
        weight_bytes(config, torch.bfloat16),
        weight_bytes(config, torch.bfloat16, bits=8),
    )
    assert float_bytes - int8_bytes == float_bytes // 2 - embedding
