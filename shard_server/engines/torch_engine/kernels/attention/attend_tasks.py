"""The task (tasks.py) of attention."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from shard_server.engines.torch_engine.kernels.attention.attend import Multiplies, make_attend_pieces
from shard_server.engines.torch_engine.kernels.attention.scratch import AttentionShape, scratch_at
from shard_server.engines.torch_engine.kernels.codegen.compiled import bf16_at, float_of_bits, integers_at, jit
from shard_server.engines.torch_engine.kernels.codegen.tasks import ROWS


def make_attend_rows(multiplies: Multiplies) -> Any:
    """`attend_rows` for one kind of CPU."""
    attend_pieces = make_attend_pieces(multiplies)

    @jit(variant=multiplies.name)
    def attend_rows(task: Any, part: Any, num_parts: Any) -> None:
        """plan (see CompiledPlan.words), queries (bf16, rows `stride` apart), stride, out (bf16 [rows, query_size]),
        layer, window, constants (see CompiledAttention)"""
        plan, queries, stride, out, layer, window = task[3], task[4], task[5], task[6], task[7], task[8]
        (
            pool,
            pool_size,
            scratches,
            scratch_size,
            scale,
            block_size,
            num_kv_heads,
            group_size,
            head_dim,
            block_stride,
            token_size,
        ) = carray(integers_at(task[9]), (11,))
        shape = AttentionShape(block_size, num_kv_heads, group_size, head_dim, block_stride, token_size)
        row_size = num_kv_heads * group_size * head_dim
        num_shares, tables_size = carray(integers_at(plan), (2,))
        ends = carray(integers_at(plan + 16), (num_shares + 1,))
        pieces = plan + 16 + (num_shares + 1) * 8
        tables = carray(integers_at(pieces + ends[num_shares] * 8), (tables_size,))
        for index in range(part, num_shares, num_parts):
            attend_pieces(
                carray(bf16_at(pool), (pool_size,)),
                layer,
                tables,
                carray(integers_at(pieces + ends[index] * 8), (ends[index + 1] - ends[index],)),
                shape,
                carray(bf16_at(queries), (task[ROWS] * stride,)),
                stride,
                carray(bf16_at(out), (task[ROWS] * row_size,)),
                window,
                float_of_bits(np.uint32(scale)),
                scratch_at(scratches + part * scratch_size, shape),
            )

    return attend_rows
