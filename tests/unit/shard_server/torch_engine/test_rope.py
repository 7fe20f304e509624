"""Rotary position embedding."""

from __future__ import annotations

import numpy as np
import torch

from shard_server.engines.torch_engine.rope import inverse_frequencies, rotate_, rotation_table


def test_every_row_of_the_rotation_table_is_rounded_to_nearest() -> None:
    """Because MKL left threads rounding towards zero, a process in ten had other last bits and so other answers."""
    num_positions, head_dim = 8192, 64
    cos, sin = rotation_table(num_positions, head_dim, 1e4)
    positions = np.arange(num_positions, dtype=np.float32)
    angles = np.outer(positions, inverse_frequencies(head_dim, 1e4).numpy()).astype(np.float64)
    half = head_dim // 2
    assert np.array_equal(cos[:, :half].numpy(), np.cos(angles).astype(np.float32))
    assert np.array_equal(sin[:, half:].numpy(), np.sin(angles).astype(np.float32))


def test_numbers_in_float64_are_not_rounded_to_float32() -> None:
    """The exact model, with which kernels are compared, would otherwise share their rounding."""
    heads = torch.tensor([[[1.0 + 2.0**-40, 0.5]]], dtype=torch.float64)
    rotate_(heads, torch.ones(1, 1, 2), torch.zeros(1, 1, 2))
    assert heads.tolist() == [[[1.0 + 2.0**-40, 0.5]]]
