"""Decode steps of a few fixed sizes over static buffers: on a GPU, each is recorded once and then replayed, which costs
one launch instead of a thousand (CUDA graphs). Elsewhere the same steps run unrecorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

_TOKEN, _POSITION, _SLOT, _NUM_HEADER_COLUMNS = 0, 1, 2, 3
_NUM_STAGING_BUFFERS: Final = 2
"""One is filled while the copy of the other may wait for the step that runs."""
_WARM_UPS: Final = 2
"""Runs before a step is recorded: libraries allocate memory and choose their code in the first runs."""


@dataclasses.dataclass(slots=True)
class DecodeRow:
    """A token to compute, and its sequence's block table."""

    token_id: int
    position: int
    block_table: Sequence[int]
    adapter: Any = None
    """See ScheduledSequence."""


@dataclasses.dataclass(slots=True)
class DecodeInputs:
    """The inputs of one step, in the static buffer, including padding rows."""

    token_ids: torch.Tensor
    """int64 [rows]"""
    positions: torch.Tensor
    """int64 [rows]"""
    slots: torch.Tensor
    """int64 [rows]: block * block_size + offset"""
    tables: torch.Tensor
    """int32 [rows, blocks]"""
    lengths: torch.Tensor
    """int32 [rows]"""


class _StagingBuffer:
    """Rows in the CPU's memory, on their way to the device."""

    def __init__(self, num_rows: int, num_columns: int, is_cuda: bool) -> None:
        self.rows = torch.zeros(num_rows, num_columns, dtype=torch.int32, pin_memory=is_cuda)
        self.array = self.rows.numpy()
        self._copied = torch.cuda.Event() if is_cuda else None

    def wait(self) -> None:
        """Wait until the last copy has read the rows."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy the first rows, as many as `target` has, after what the device was given before."""
        target.copy_(self.rows[: len(target)], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class DecodeSteps:
    """Runs batches of rows in the smallest step that has room for them."""

    def __init__(
        self,
        compute: Callable[[DecodeInputs, Sequence[Any] | None], torch.Tensor],
        *,
        sizes: Sequence[int],
        table_width: int,
        block_size: int,
        spare_block: int,
        vocab_size: int,
        drawn_tokens: torch.Tensor,
        device: torch.device,
    ) -> None:
        """`compute` returns float32 logits [rows, vocab_size] and reads nothing but its inputs, the KV cache and
        adapters by row, with which steps are not recorded.
        `sizes` are ascending. `spare_block` belongs to no sequence; padding rows write into it. `drawn_tokens`
        (int64, on the device) has the tokens that `drawn_token` of model_runner.py stands for."""
        self.sizes = list(sizes)
        self._compute = compute
        self._block_size = block_size
        self._spare_block = spare_block
        columns = _NUM_HEADER_COLUMNS + table_width
        is_cuda = device.type == "cuda"
        # Everything that changes from step to step is in one buffer, so that it takes one copy.
        self._staging = [_StagingBuffer(self.sizes[-1], columns, is_cuda) for _ in range(_NUM_STAGING_BUFFERS)]
        self._inputs = torch.zeros(self.sizes[-1], columns, dtype=torch.int32, device=device)
        self._drawn_tokens = drawn_tokens
        # One buffer for all sizes: a recorded step would keep results of its own alive.
        self._logits = torch.zeros(self.sizes[-1], vocab_size, dtype=torch.float32, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(self, rows: Sequence[DecodeRow]) -> torch.Tensor:
        """float32 logits [len(rows), vocab_size], valid until the next step. At most sizes[-1] rows."""
        size = next(size for size in self.sizes if size >= len(rows))
        self._stage(rows, size)
        adapters = [row.adapter for row in rows] if any(row.adapter is not None for row in rows) else None
        graph = self._graphs.get(size) if adapters is None else None
        if graph is not None:
            graph.replay()
        else:
            self._step(size, adapters)
        return self._logits[: len(rows)]

    def record(self, on_progress: Callable[[str], None]) -> None:
        """Record all sizes, the largest first, whose memory the others then share. CUDA only."""
        pool = torch.cuda.graph_pool_handle()
        self._stage([], self.sizes[-1])
        for size in reversed(self.sizes):
            on_progress(f"CUDA graphs: decode steps of {size} rows")
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self._step(size)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._step(size)
            self._graphs[size] = graph

    def _stage(self, rows: Sequence[DecodeRow], size: int) -> None:
        buffer = self._staging.pop(0)
        self._staging.append(buffer)
        buffer.wait()
        staged = buffer.array
        for index, row in enumerate(rows):
            block, offset = divmod(row.position, self._block_size)
            own = staged[index]
            own[_TOKEN] = row.token_id
            own[_POSITION] = row.position
            own[_SLOT] = row.block_table[block] * self._block_size + offset
            # Entries after the row's own blocks keep their old content, which is never read.
            own[_NUM_HEADER_COLUMNS : _NUM_HEADER_COLUMNS + block + 1] = row.block_table[: block + 1]
        padding = staged[len(rows) : size]
        padding[:, : _NUM_HEADER_COLUMNS + 1] = (0, 0, self._spare_block * self._block_size, self._spare_block)
        buffer.copy_to(self._inputs[:size])

    def _step(self, size: int, adapters: Sequence[Any] | None = None) -> None:
        header = self._inputs[:size, :_NUM_HEADER_COLUMNS].long()
        token_ids = header[:, _TOKEN]
        drawn = self._drawn_tokens[(-1 - token_ids).clamp(min=0)]
        inputs = DecodeInputs(
            token_ids=torch.where(token_ids < 0, drawn, token_ids),
            positions=header[:, _POSITION],
            slots=header[:, _SLOT],
            tables=self._inputs[:size, _NUM_HEADER_COLUMNS:],
            lengths=self._inputs[:size, _POSITION] + 1,
        )
        self._logits[:size].copy_(self._compute(inputs, adapters))


def step_sizes(max_rows: int, multiple: int = 1) -> list[int]:
    """Sizes up to `max_rows`: powers of two and the midpoints between them, so that there is little padding. Each is a
    multiple of `multiple`."""
    sizes = {multiple * size for power in range(12) for size in (1 << power, 3 << power >> 1)}
    needed = sorted(size for size in sizes if size < max_rows)
    return [*needed, -(-max_rows // multiple) * multiple]
