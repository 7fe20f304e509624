"""The compiled attention computes attention, and a row's bits are its own: in every kernel family of this CPU."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.operators.attention import Extent
from tests.fakes.kernel_threads import family_params, float32_family_params, new_thread_pool

MAX_TOKENS = 700
NUM_BLOCKS = 64
paged_attention = pytest.importorskip("shard_server.engines.torch_engine.kernels.paged_attention")


@dataclasses.dataclass(frozen=True)
class Shape:
    num_kv_heads: int
    group_size: int
    head_dim: int
    window: int | None
    block_size: int


shapes = st.builds(
    Shape,
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 3, 5, 8, 17]),
    st.sampled_from([64, 128]),  # AMX has no others; see the test of the float32 families
    st.sampled_from([None, None, 1, 40, 128, 300]),
    st.sampled_from([16, 32]),
)


class Layers:
    """Two layers' attention over one random sequence, and over many queries of it."""

    def __init__(self, family: str, shape: Shape, num_threads: int = 1) -> None:
        self.config = model_config(shape)
        self.cache = KvCache(self.config, num_blocks=NUM_BLOCKS, block_size=shape.block_size, dtype=torch.bfloat16)
        threads = new_thread_pool(family, num_threads)
        if shape.head_dim % threads.family.head_step:
            pytest.skip("no such heads")
        self.attention = paged_attention.CompiledAttention(self.config, self.cache, threads)
        generator = torch.Generator().manual_seed(1)
        self.keys_values = torch.randn(MAX_TOKENS, 2 * self.config.kv_size, generator=generator).bfloat16()
        self.queries = torch.randn(MAX_TOKENS, self.config.query_size, generator=generator).mul_(2).bfloat16()
        self.table = random.Random(2).sample(range(NUM_BLOCKS), -(-MAX_TOKENS // shape.block_size))
        slots = [self.table[i // shape.block_size] * shape.block_size + i % shape.block_size for i in range(MAX_TOKENS)]
        self.attention.write(1, slots, self.keys_values)

    def attend(self, *extents: tuple[int, int]) -> torch.Tensor:
        """Rows of the positions from .. to each, as one step computes them."""
        decodes: list[Extent] = []
        prefills: list[Extent] = []
        positions: list[int] = []
        for start, end in sorted(extents, key=lambda extent: extent[1] - extent[0] > 1):
            kind = decodes if end - start == 1 else prefills
            kind.append(Extent(len(positions), end - start, start, self.table))
            positions += range(start, end)
        plan = self.attention.plan(decodes, prefills)
        rows = self.attention.attend(plan, 1, self.queries[positions])
        return rows[torch.tensor(positions).argsort(stable=True)]

    def expected(self, position: int) -> torch.Tensor:
        """float64 [query_size]"""
        config = self.config
        window = config.layer_windows[1]
        first = 0 if window is None else max(0, position + 1 - window)
        kv = self.keys_values[first : position + 1].double().view(-1, 2, config.num_kv_heads, config.head_dim)
        query = self.queries[position].double().view(config.num_kv_heads, -1, config.head_dim)
        weights = torch.einsum("hgd,thd->hgt", query, kv[:, 0]).mul_(config.head_dim**-0.5).softmax(-1)
        return torch.einsum("hgt,thd->hgd", weights, kv[:, 1]).flatten()


def model_config(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        model_type="llama",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=2,
        num_heads=shape.num_kv_heads * shape.group_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_TOKENS,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        tie_word_embeddings=True,
        qk_norm=False,
        layer_windows=(None, shape.window),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        eos_token_ids=frozenset(),
    )


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", family_params())
@settings(max_examples=12, deadline=None)
@given(shapes, st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=4, unique=True))
def test_it_is_attention_to_the_precision_of_bf16(family: str, shape: Shape, ends: list[int]):
    """Any group of heads, window and length, with blocks anywhere: weights and results are bf16, sums are not."""
    layers = Layers(family, shape)
    for end in ends:
        rows = layers.attend((max(0, end - 150), end))
        for position in {max(0, end - 150), end - 1}:
            expected = layers.expected(position)
            error = (rows[position - max(0, end - 150)].double() - expected).abs().max()
            assert error < 0.01 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("family", family_params())
@settings(max_examples=8, deadline=None)
@given(shapes, st.integers(2, MAX_TOKENS), st.randoms(use_true_random=False))
def test_a_row_has_the_same_bits_decoded_prefilled_and_in_any_chunks(
    family: str, shape: Shape, num_tokens: int, chooser: random.Random
):
    """Whatever shares a step, on one thread or two: failover depends on it."""
    whole = Layers(family, shape).attend((0, num_tokens))
    layers = Layers(family, shape, num_threads=2)
    cuts = sorted({0, num_tokens, *(chooser.randrange(num_tokens) for _ in range(3))})
    assert torch.equal(torch.cat([layers.attend(part) for part in itertools.pairwise(cuts)]), whole)
    positions = sorted(chooser.sample(range(num_tokens), min(num_tokens, 9)))
    decoded = layers.attend(*((position, position + 1) for position in positions))
    assert torch.equal(decoded, whole[positions])


@pytest.mark.parametrize("family", family_params())
def test_what_lies_behind_the_end_leaves_no_trace(family: str):
    """Blocks are used again: behind a sequence's end lies what another one left there."""
    layers = Layers(family, Shape(2, 3, 64, None, 16))
    before = layers.attend((100, 150), (69, 70))
    layers.attention.write(1, [layers.table[150 // 16] * 16 + 150 % 16], torch.full((1, 256), 1e30).bfloat16())
    layers.attend((600, 700))
    assert torch.equal(layers.attend((100, 150), (69, 70)), before)


@pytest.mark.parametrize("names", float32_family_params())
@settings(max_examples=8, deadline=None)
@given(shapes, st.sampled_from([32, 64, 96]), st.integers(2, MAX_TOKENS))
def test_float32_families_compute_the_same_bits(names: list[str], shape: Shape, head_dim: int, num_tokens: int):
    """Registers of four, eight and sixteen numbers, and heads that AMX cannot have."""
    shape = dataclasses.replace(shape, head_dim=head_dim)
    start = max(0, num_tokens - 60)
    rows = [Layers(name, shape).attend((start, num_tokens)) for name in names]
    assert all(torch.equal(rows[0], others) for others in rows[1:])
