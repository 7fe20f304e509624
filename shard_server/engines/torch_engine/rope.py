"""Rotary position embedding: frequencies and their scaling.

Source: Su et al., RoFormer (arXiv:2104.09864); the "llama3" scaling is the one Meta published with Llama 3.1.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np
import torch

LLAMA3_ORIGINAL_WINDOW = 8192


@dataclasses.dataclass(frozen=True, slots=True)
class RopeScaling:
    """How a model's window was extended beyond the one that it was first trained with."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = LLAMA3_ORIGINAL_WINDOW

    def to_json(self) -> dict[str, Any]:
        """The entry in config.json."""
        content: dict[str, Any] = dataclasses.asdict(self)
        return {"rope_type": content.pop("kind"), **content}


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> torch.Tensor:
    """float32 [head_dim / 2]: radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return frequencies / llama3_factors(head_dim, theta, scaling)


def llama3_factors(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """float32 [head_dim / 2]: the divisor of each frequency: 1 for short waves, `factor` for long ones."""
    wavelengths = 2 * math.pi / inverse_frequencies(head_dim, theta)
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling.factor + smooth)


def rotation_table(
    num_positions: int, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) for `rotate_`, each float32 [num_positions, head_dim]: the halves repeat, the first of sin negated."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(head_dim, theta, scaling)).double()
    # NumPy's, because MKL's cos may leave another thread rounding towards zero: last bits would vary between processes.
    cos, sin = (torch.from_numpy(turn(angles.numpy()).astype(np.float32)) for turn in (np.cos, np.sin))
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate `heads` [tokens, heads, head_dim] in place, in float32 or, if they are, in float64; `cos` and `sin` are
    [tokens, 1, head_dim]."""
    x = heads.to(torch.promote_types(heads.dtype, torch.float32), copy=True)
    # Product and sum are separate operations, each correctly rounded: a fused one would round differently in the
    # vectorised and in the leftover part of a loop, and which element falls where depends on the number of rows.
    turned = x.roll(heads.shape[-1] // 2, dims=-1).mul_(sin)
    heads.copy_(x.mul_(cos).add_(turned))
