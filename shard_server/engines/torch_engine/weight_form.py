"""The forms that the weights of linear layers can have in memory."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final


class WeightForm(enum.Enum):
    """Values are those of the configuration key `shard.torch.weights`."""

    DTYPE = "dtype"
    INT8 = "int8"
    """Rounded to 8 bits at the start, with a scale per output channel"""
    PACKED = "packed"
    """A GGUF file's own; what it does not have in 4 to 8 bits is bf16"""
    INT4 = "int4"
    """Rounded at the start to 4 bits, with a scale and a minimum for every 32; the head to 8 bits"""


@dataclasses.dataclass(frozen=True, slots=True)
class PackedFiles:
    """Says what packed weights a model's files hold."""

    is_there: bool = False
    is_whole: bool = False
    """True when every matrix that a step multiplies with is packed."""
    num_bytes: int = 0


NOT_PACKED: Final = PackedFiles()
