"""Linear layers with grouped weights, for compiled kernels; see products/groups.py."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812

from shard_server.engines.torch_engine.grouped_weight import GroupedWeight
from shard_server.engines.torch_engine.kernels.codegen.group_blocks import FORMS, PANEL
from shard_server.engines.torch_engine.kernels.codegen.tasks import (
    GROUP_PRODUCT,
    GROUP_ROWS,
    LOOK_UP_IN_GROUPS,
    task,
)
from shard_server.engines.torch_engine.kernels.packed_weights import (
    Kept,
    Operands,
    in_own_memory,
    looked_up,
    padded_floats,
)
from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool
from shard_server.engines.torch_engine.operators.linear import LookUp

_KINDS: Final = [(form.bits, form.num_scales, form.has_minima) for form in FORMS]


class PackedGroups:
    """For every 32 columns, for every group: the tile of a GroupForm."""

    def __init__(
        self, weight: GroupedWeight, bias: torch.Tensor | None, threads: ThreadPool, kept: Kept = in_own_memory
    ) -> None:
        if weight.kind not in _KINDS:
            weight = weight.general()
        self._form = _KINDS.index(weight.kind)
        self._threads = threads
        self._in_pairs = weight.bits == 8 and threads.family.registers.are_few
        self.depth = weight.shape[1]
        self._weight = kept(_in_tiles(weight, in_pairs=self._in_pairs))
        self.num_columns = len(self._weight) * PANEL
        self._bias = padded_floats(bias, self.num_columns)
        self.weight_rows: LookUp | None = self._rows

    def tasks(self, num_rows: int, kind: int, operands: Operands) -> list[list[int]]:
        layer = self._threads.scratches, self.depth, self.num_columns, kind, operands.other
        tensors = self._bias.data_ptr(), self._weight.data_ptr()
        rows = operands.prepared, operands.row_scales
        return [
            task(GROUP_ROWS, num_rows, operands.x, self.depth, *rows),
            task(GROUP_PRODUCT, num_rows, operands.out, *layer, *tensors, *rows, self._form),
        ]

    def look_up_task(self, num_rows: int, indices: int, out: int) -> list[int]:
        form = map(int, (*_KINDS[self._form], self._in_pairs))
        return task(LOOK_UP_IN_GROUPS, num_rows, indices, self._weight.data_ptr(), self.depth, out, *form)

    def _rows(self, indices: torch.Tensor) -> torch.Tensor:
        return looked_up(self._threads, self, indices, self.depth)


def _in_tiles(weight: GroupedWeight, *, in_pairs: bool) -> torch.Tensor:
    """`in_pairs`: see GroupForm. uint8 [panels, groups, bytes of a tile]"""
    numbers = weight.numbers().view(torch.int16) if in_pairs else weight.words
    parts = [numbers, weight.scales, *([] if weight.minima is None else [weight.minima])]
    missing = -len(weight.words) % PANEL
    tiles = []
    for part in parts:
        whole = F.pad(part, (0, 0, 0, missing)) if missing else part
        by_group = whole.reshape(-1, PANEL, weight.num_groups, part.shape[1] // weight.num_groups)
        tiles.append(by_group.permute(0, 2, 3, 1).contiguous().flatten(2).view(torch.uint8))
    return torch.cat(tiles, 2)
