"""Weights in groups of 32 along the sum: whole numbers of 4 or 8 bits with a scale, as GGUF files have them.

A weight is number * scale + minimum. Compiled kernels multiply such weights as they are (kernels/products/groups.py);
torch's operators compute with what they stand for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import torch

GROUP: Final = 32


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedWeight:
    """[rows, columns]; a group is 32 numbers of a row."""

    bits: int
    words: torch.Tensor
    """int32 [rows, columns * bits / 32]; see `words_of`."""
    scales: torch.Tensor
    """float16 [rows, groups * scales of a group]: one, or two for the halves of the group"""
    minima: torch.Tensor | None = None
    """float16 [rows, groups]; None: zeros"""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.words), self.words.shape[1] * 32 // self.bits

    @property
    def num_groups(self) -> int:
        return self.shape[1] // GROUP

    @property
    def num_scales(self) -> int:
        """The scales of a group"""
        return self.scales.shape[1] // self.num_groups

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Weights of one kind can be joined: bits, scales of a group, whether there are minima."""
        return self.bits, self.num_scales, self.minima is not None

    def numbers(self) -> torch.Tensor:
        """[rows, columns]: uint8 for 4 bits, else int8"""
        pairs = self.words.view(torch.uint8).unflatten(1, (-1, 2, 2))  # [rows, words, half, byte]
        if self.bits == 4:
            pairs = torch.stack([pairs & 15, pairs >> 4], -1).flatten(3)
        numbers = pairs.transpose(2, 3).flatten(1)
        return numbers if self.bits == 4 else numbers.view(torch.int8)

    def expanded(self) -> torch.Tensor:
        """float32 [rows, columns]"""
        floats = self.numbers().float().unflatten(1, (self.scales.shape[1], -1)) * self.scales.float().unsqueeze(-1)
        floats = floats.flatten(1)
        if self.minima is not None:
            floats = (floats.unflatten(1, (-1, GROUP)) + self.minima.float().unsqueeze(-1)).flatten(1)
        return floats

    def general(self) -> GroupedWeight:
        """The same weights in the form that all can have: 8 bits, two scales, minima."""
        minima = torch.zeros_like(self.scales[:, : self.num_groups]) if self.minima is None else self.minima
        scales = self.scales.repeat_interleave(2 // self.num_scales, 1)
        words = words_of(self.numbers().view(torch.int8), 8) if self.bits == 4 else self.words
        return GroupedWeight(8, words, scales, minima)

    def rows(self, places: slice) -> GroupedWeight:
        minima = None if self.minima is None else self.minima[places]
        return GroupedWeight(self.bits, self.words[places], self.scales[places], minima)


AnyWeight = torch.Tensor | GroupedWeight


def words_of(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 (4 bits) or int8 [rows, columns] → int32 words, whose halves hold what is multiplied together: of the 8
    numbers a b c d e f g h of 4 bits a c e g from the lowest bit on, then b d f h; of 4 of 8 bits a c, b d."""
    halves = numbers.view(torch.uint8).unflatten(1, (-1, 16 // bits, 2)).transpose(2, 3)
    if bits == 4:
        halves = halves[..., 0::2] | halves[..., 1::2] << 4
    return halves.contiguous().flatten(1).view(torch.int32)


def quantised(weight: torch.Tensor, bits: int) -> GroupedWeight:
    """Round a matrix: 4 bits between the smallest and the largest number of each group; 8 bits on both sides of zero.
    Raises ValueError unless a row has whole groups."""
    if weight.shape[1] % GROUP:
        raise ValueError(f"rows of {weight.shape[1]} numbers are not whole groups of {GROUP}")
    groups = weight.float().unflatten(1, (-1, GROUP))
    if bits == 8:
        scales = groups.abs().amax(2).div_(127).half()
        numbers = (groups / _divisors(scales)).round_().clamp_(-127, 127).to(torch.int8)
        return GroupedWeight(8, words_of(numbers.flatten(1), 8), scales)
    minima = groups.amin(2).half()
    scales = (groups.amax(2) - minima.float()).div_(15).half()
    numbers = ((groups - minima.float().unsqueeze(-1)) / _divisors(scales)).round_().clamp_(0, 15).to(torch.uint8)
    return GroupedWeight(4, words_of(numbers.flatten(1), 4), scales, minima)


def _divisors(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales > 0, scales.float(), 1.0).unsqueeze(-1)


def joined_rows(parts: Sequence[AnyWeight]) -> AnyWeight:
    """The rows of all parts: grouped if all are, else expanded to the type of the plain ones. Always a copy."""
    grouped = [part for part in parts if isinstance(part, GroupedWeight)]
    if len(grouped) < len(parts):
        dtype = next(part.dtype for part in parts if not isinstance(part, GroupedWeight))
        return torch.cat([plain(part, dtype) for part in parts])
    if len({part.kind for part in grouped}) > 1:
        grouped = [part.general() for part in grouped]
    minima = [part.minima for part in grouped if part.minima is not None]
    return GroupedWeight(
        grouped[0].bits,
        torch.cat([part.words for part in grouped]),
        torch.cat([part.scales for part in grouped]),
        torch.cat(minima) if minima else None,
    )


def plain(weight: AnyWeight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The weight as a tensor: what is grouped is expanded to `dtype`."""
    return weight.expanded().to(dtype) if isinstance(weight, GroupedWeight) else weight
