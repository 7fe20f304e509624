"""Sequences that have finished here and were cancelled in the engine, whose end there is still to come; and what those
cost that nobody wanted any more."""

from __future__ import annotations

import structlog

from shard_server.metrics import ShardMetrics

log = structlog.get_logger()


class CancellingSequences:
    """By the engine's request ids."""

    def __init__(self, metrics: ShardMetrics) -> None:
        self._metrics = metrics
        self._num_wasted: dict[str, int | None] = {}

    def __len__(self) -> int:
        return len(self._num_wasted)

    def add(self, request_id: str) -> None:
        """Its answer is complete, only the engine does not know: what it still generates is not counted."""
        self._num_wasted[request_id] = None

    def add_unwanted(self, request_id: str, num_late_tokens: int) -> None:
        """Nobody wants it any more, and had not wanted its last `num_late_tokens`."""
        self._num_wasted[request_id] = num_late_tokens

    def note_tokens(self, request_id: str, count: int) -> None:
        """The engine has generated more."""
        num_wasted = self._num_wasted.get(request_id)
        if num_wasted is not None:
            self._num_wasted[request_id] = num_wasted + count

    def end(self, request_id: str) -> None:
        """The engine has ended a sequence, whichever."""
        num_wasted = self._num_wasted.pop(request_id, None)
        if num_wasted is not None:
            self._metrics.on_unwanted_end(num_wasted)
            log.info("cancelled sequence ended", request_id=request_id, num_wasted_tokens=num_wasted)
