"""Derives from a request what decides the place of an engine's sequence in the order of prefill."""

from __future__ import annotations

from shard_server.engines.base import EngineRequest


class QueuedRequest:
    """An OrderedSequence (prefill_order.py), from which engines derive their sequences."""

    __slots__ = ("request", "submit_time", "turn")

    def __init__(self, request: EngineRequest, submit_time: float) -> None:
        self.request = request
        self.submit_time = submit_time
        self.turn = 0
        """See PrefillOrder."""

    @property
    def class_rank(self) -> int:
        return self.request.class_rank

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def num_expected_prefill_tokens(self) -> int:
        return self.request.num_expected_prefill_tokens
