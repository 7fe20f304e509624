"""Random weights in groups."""

from __future__ import annotations

import torch

from shard_server.engines.torch_engine.grouped_weight import GROUP, GroupedWeight, words_of

GROUPED = ("q4", "q8", "q8_16")
"""The names of forms of kernels/codegen/group_blocks.py"""


def random_grouped(form: str, rows: int, columns: int, seed: int = 0) -> GroupedWeight:
    """Numbers, scales and minima of all sizes that 4 or 8 bits have, and a group of zeros."""
    generator = torch.Generator().manual_seed(seed)
    bits = 4 if form == "q4" else 8
    low, high = (0, 16) if bits == 4 else (-128, 128)
    numbers = torch.randint(low, high, (rows, columns), generator=generator).to(
        torch.uint8 if bits == 4 else torch.int8
    )
    num_scales = columns // GROUP * (2 if form == "q8_16" else 1)
    scales = torch.randn(rows, num_scales, generator=generator).half()
    scales[0, 0] = 0
    minima = None if form == "q8" else torch.randn(rows, columns // GROUP, generator=generator).half()
    return GroupedWeight(bits, words_of(numbers, bits), scales, minima)
