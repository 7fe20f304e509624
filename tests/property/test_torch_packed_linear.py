"""Compiled linear layers compute linear layers, and a row's bits are its own: in every kernel family of this CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_server.engines.torch_engine.grouped_weight import plain
from shard_server.engines.torch_engine.operators.int8_linear import quantise_rows, split_digits
from shard_server.engines.torch_engine.operators.linear import Linear, MakesLinears, Product, row_granularity
from tests.examples import num_examples
from tests.fakes.grouped_weights import GROUPED, random_grouped
from tests.fakes.kernel_threads import (
    family_params,
    float32_family_names,
    float32_family_params,
    new_thread_pool,
    runnable_family_names,
)

packed_linear = pytest.importorskip("shard_server.engines.torch_engine.kernels.packed_linear")

depths = st.sampled_from([32, 64, 96, 576])
columns = st.sampled_from([1, 15, 16, 31, 32, 33, 64, 200, 576])
row_counts = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 600]))


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def new_linear(
    family: str, weights: str, num_columns: int, depth: int, num_threads: int = 1, bias: torch.Tensor | None = None
) -> Linear:
    """`weights`: how random ones are packed, or the form of grouped ones."""
    if weights in GROUPED:
        return makes_linears(family, num_threads).linear(random_grouped(weights, num_columns, depth, 1), bias)
    return makes_linears(family, num_threads, weights).linear(random_bf16(num_columns, depth, seed=1), bias)


def makes_linears(family: str, num_threads: int = 1, weights: str = "PackedBf16") -> MakesLinears:
    return packed_linear.PackedLinears(getattr(packed_linear, weights), new_thread_pool(family, num_threads))


def random_bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def close(actual: torch.Tensor, expected: torch.Tensor, products: torch.Tensor) -> bool:
    """To a rounding to bf16, and what sums in float32 lose of the `products` that they sum."""
    allowed = expected.abs() * 2**-8 + products * 1e-6 + 1e-6
    return actual.shape == expected.shape and bool(((actual.double() - expected).abs() <= allowed).all())


@pytest.mark.parametrize("family", family_params())
@settings(max_examples=num_examples(40), deadline=None)
@given(depths, columns, row_counts, st.booleans(), st.sampled_from([1, 2]))
def test_it_is_the_product_to_the_precision_of_bf16(
    family: str, depth: int, num_columns: int, num_rows: int, has_bias: bool, num_threads: int
):
    """With what follows it fused: columns that fill no tile, rows that fill no block, no bias."""
    weight, x = random_bf16(num_columns, depth, seed=1), random_bf16(num_rows, depth, seed=2)
    bias = random_bf16(num_columns, seed=3) if has_bias else None
    other = random_bf16(num_rows, num_columns, seed=4)
    linear = makes_linears(family, num_threads).linear(weight, bias)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    products = F.linear(x.double().abs(), weight.double().abs())
    assert close(linear(x), expected, products)
    assert (linear.floats(x).double() - expected).abs().max() <= 1e-6 * products.max()
    # Where `add` is not fused it rounds twice.
    assert close(linear.add(x, other), expected + other.double(), products + 4000 * expected.abs())


@pytest.mark.parametrize("family", family_params())
@settings(max_examples=20, deadline=None)
@given(depths, st.sampled_from([16, 32, 48, 160]), row_counts, st.floats(0.01, 10.0))
def test_gate_and_up_are_multiplied_column_by_column(
    family: str, depth: int, num_columns: int, num_rows: int, size: float
):
    """Their columns lie in turns: silu(x) must meet its own. Gates far from zero neither overflow nor lose digits."""
    gate, up = random_bf16(num_columns, depth, seed=1) * size, random_bf16(num_columns, depth, seed=2)
    x = random_bf16(num_rows, depth, seed=3)
    biases = random_bf16(num_columns, seed=4), random_bf16(num_columns, seed=5)
    gated = makes_linears(family).gated((gate, biases[0]), (up, biases[1]))
    gates = F.linear(x.double(), gate.double(), biases[0].double())
    ups = F.linear(x.double(), up.double(), biases[1].double())
    products = F.linear(x.double().abs(), up.double().abs()) * gates.abs()
    products += F.linear(x.double().abs(), gate.double().abs()) * ups.abs()
    assert close(gated(x), F.silu(gates) * ups, products)


@pytest.mark.parametrize("family", family_params())
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["PackedBf16", "PackedInt8", *GROUPED]),
    depths,
    columns,
    st.integers(2, 200),
    st.randoms(use_true_random=False),
)
def test_a_row_has_the_same_bits_wherever_it_is(
    family: str, weights: str, depth: int, num_columns: int, num_rows: int, chooser: random.Random
):
    """Alone, in any part of any batch, at any place, on one thread or two: failover rests on it."""
    x, other = random_bf16(num_rows, depth, seed=2), random_bf16(num_rows, num_columns, seed=3)
    linear = new_linear(family, weights, num_columns, depth)
    whole, whole_sum, whole_floats = linear(x), linear.add(x, other), linear.floats(x)
    linear = new_linear(family, weights, num_columns, depth, 2)
    for _ in range(3):
        rows = chooser.sample(range(num_rows), chooser.randint(1, num_rows))
        assert torch.equal(linear(x[rows]), whole[rows])
        assert torch.equal(linear.add(x[rows], other[rows]), whole_sum[rows])
        assert torch.equal(linear.floats(x[rows]), whole_floats[rows])


@pytest.mark.parametrize("family", family_params())
@settings(max_examples=num_examples(30), deadline=None)
@given(depths, columns, row_counts, st.booleans(), st.integers(-20, 20))
def test_with_int8_weights_only_their_rounding_is_lost(
    family: str, depth: int, num_columns: int, num_rows: int, has_bias: bool, exponent: int
):
    """Rows keep 15 bits, or all: the product is that of the rounded weights. A row of zeros stays one."""
    weight, x = random_bf16(num_columns, depth, seed=1), random_bf16(num_rows, depth, seed=2) * 2.0**exponent
    x[-1] = 0
    bias = random_bf16(num_columns, seed=3) if has_bias else None
    linear = makes_linears(family, weights="PackedInt8").linear(weight, bias)
    values, scales = quantise_rows(weight)
    expected = F.linear(x.double(), values.double() * scales, None if bias is None else bias.double())
    largest = x.abs().amax(1, keepdim=True).double() * scales.T.double()
    # Half a step of the second digit for every number of the sum, at worst; what float32 loses of it.
    allowed = largest * depth * (0.51 / 254 + 127 * 1e-6) + expected.abs() * 1e-6 + 1e-30
    assert ((linear.floats(x).double() - expected).abs() <= allowed).all()
    assert torch.equal(linear.floats(x)[-1], torch.zeros(num_columns) if bias is None else bias.float())
    if family in float32_family_names():  # rows stay as they are
        assert ((linear.floats(x).double() - expected).abs() <= allowed - largest * depth * 0.51 / 254).all()
        return
    digits, row_scales = split_digits(x)
    first, second = (digits.double() - 128).split(num_rows)  # uint8, 128 more than they are
    exact = F.linear((first + second / 254) * row_scales, values.double() * scales)
    exact += 0 if bias is None else bias
    # torch divides where the kernel multiplies with the inverse: a second digit may be its neighbour.
    typical = largest * depth**0.5 * (0.2 / 254) + largest * depth * 127 * 1e-6 + expected.abs() * 1e-6 + 1e-30
    assert ((linear.floats(x).double() - exact).abs() <= typical).all()


@pytest.mark.parametrize("family", family_params())
@settings(max_examples=num_examples(30), deadline=None)
@given(st.sampled_from(GROUPED), depths, columns, row_counts, st.booleans(), st.integers(-20, 20))
def test_grouped_weights_are_multiplied_as_they_are(
    family: str, form: str, depth: int, num_columns: int, num_rows: int, has_bias: bool, exponent: int
):
    """Of the rows 15 bits are kept, group by group. Rows and groups of zeros stay zeros."""
    x = random_bf16(num_rows, depth, seed=2) * 2.0**exponent
    x[-1] = 0
    bias = random_bf16(num_columns, seed=3) if has_bias else None
    weight = random_grouped(form, num_columns, depth, 1)
    linear = new_linear(family, form, num_columns, depth, bias=bias)
    exact = weight.expanded().double()
    expected = F.linear(x.double(), exact, None if bias is None else bias.double())
    largest = x.abs().double().unflatten(1, (-1, 32)).amax(2).repeat_interleave(32, 1)
    # Half a step of each number at worst; and what float32 loses of what it adds.
    magnitudes = F.linear(x.double().abs(), exact.abs()) + F.linear(x.double().abs(), torch.full_like(exact, 8))
    allowed = F.linear(largest, exact.abs()) * (0.51 / 32767) + magnitudes * 1e-6 + expected.abs() * 1e-6 + 1e-30
    assert ((linear.floats(x).double() - expected).abs() <= allowed).all()
    assert torch.equal(linear.floats(x)[-1], torch.zeros(num_columns) if bias is None else bias.float())
    others = random_bf16(num_rows, num_columns, seed=4)
    assert torch.equal(linear(x), linear.floats(x).bfloat16())
    if num_columns % 32 == 0:
        assert torch.equal(linear.add(x, others), (linear.floats(x) + others.float()).bfloat16())


@pytest.mark.parametrize("form", GROUPED)
@settings(max_examples=10, deadline=None)
@given(depths, columns, row_counts)
def test_all_families_without_tiles_multiply_grouped_weights_alike(
    form: str, depth: int, num_columns: int, num_rows: int
):
    """By whatever instruction: sums of a group are exact."""
    fastest, *_, slowest = [name for name in runnable_family_names() if name != "amx"]
    x = random_bf16(num_rows, depth, seed=2)
    rows = [new_linear(name, form, num_columns, depth).floats(x) for name in (fastest, slowest)]
    assert torch.equal(*rows)


@pytest.mark.parametrize("family", family_params())
@settings(max_examples=15, deadline=None)
@given(st.sampled_from(GROUPED), depths, columns, st.lists(st.integers(0, 10**6), max_size=9))
def test_grouped_weights_can_be_looked_up_where_they_are_packed(
    family: str, form: str, depth: int, num_columns: int, indices: list[int]
):
    """To the bits of what they stand for, in bf16."""
    chosen = torch.tensor([index % num_columns for index in indices], dtype=torch.int64)
    look_up = new_linear(family, form, num_columns, depth).weight_rows
    assert look_up is not None
    assert torch.equal(look_up(chosen), random_grouped(form, num_columns, depth, 1).expanded().bfloat16()[chosen])


@pytest.mark.parametrize("family", family_params())
@pytest.mark.parametrize(("gate", "up"), [("q4", "q4"), ("q4", "q8_16"), ("q8", "plain")])
def test_gate_and_up_may_be_grouped_alike_or_not(family: str, gate: str, up: str):
    """Files of mixed kinds have such layers."""
    weights = [
        (random_bf16(48, 64, seed=5) if form == "plain" else random_grouped(form, 48, 64, seed), None)
        for seed, form in enumerate((gate, up))
    ]
    x = random_bf16(5, 64, seed=3)
    gates, ups = (F.linear(x.double(), plain(weight).double()) for weight, _ in weights)
    gated = makes_linears(family).gated(*weights)(x)
    assert F.cosine_similarity(gated.double(), F.silu(gates) * ups).min() > 0.9999


@pytest.mark.parametrize("family", family_params())
@settings(max_examples=15, deadline=None)
@given(depths, columns, st.lists(st.integers(0, 10**6), max_size=9))
def test_weights_can_be_looked_up_where_they_are_packed(family: str, depth: int, num_columns: int, indices: list[int]):
    """So a tied embedding needs no memory of its own."""
    weight = random_bf16(num_columns, depth)
    chosen = torch.tensor([index % num_columns for index in indices], dtype=torch.int64)
    look_up = makes_linears(family).linear(weight, None).weight_rows
    assert look_up is not None
    assert torch.equal(look_up(chosen), weight[chosen])
    values, scales = quantise_rows(weight)
    look_up = makes_linears(family, weights="PackedInt8").linear(weight, None).weight_rows
    assert look_up is not None
    assert torch.equal(look_up(chosen), (values.float() * scales).bfloat16()[chosen])


@pytest.mark.parametrize("names", float32_family_params())
@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["PackedBf16", "PackedInt8", *GROUPED]), depths, columns, row_counts)
def test_float32_families_compute_the_same_bits(
    names: list[str], weights: str, depth: int, num_columns: int, num_rows: int
):
    """Registers of four, eight and sixteen numbers: shards on different CPUs can continue one another's answers."""
    x = random_bf16(num_rows, depth, seed=2)
    rows = [new_linear(name, weights, num_columns, depth).floats(x) for name in names]
    assert all(torch.equal(rows[0], others) for others in rows[1:])


@pytest.mark.parametrize("family", family_params())
def test_no_rows_are_no_work(family: str):
    """The head gets none in the middle of a prompt."""
    linears = makes_linears(family)
    linear = linears.linear(random_bf16(48, 64), None)
    x = random_bf16(0, 64)
    assert linear(x).shape == linear.floats(x).shape == linear.add(x, random_bf16(0, 48)).shape == (0, 48)


@pytest.mark.parametrize("family", family_params())
def test_the_start_finds_them_invariant_and_would_find_it_if_they_were_not(family: str):
    """What is promised to others is measured first; beyond 32 rows, too, since these are not cut there."""
    linear: Linear = makes_linears(family).linear(random_bf16(48, 64), None)
    assert row_granularity(linear, torch.bfloat16) == 1

    class Varying:
        in_features, is_whole = 64, True

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return linear(x) + (len(x) > 64)

    varying: Product = Varying()
    assert row_granularity(varying, torch.bfloat16) != 1
