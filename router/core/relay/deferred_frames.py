"""Frames that bring tokens and nothing that needs attention at once.

Nearly every frame of a shard reports blocks that its cache has stored, and its load. That matters only when a decision
is due: when a request is to be placed, a sequence has ended, or a deadline has passed. Until then those parts are
deferred, and are then handled as if they had been handled at once: in order, each frame at its own time. This shortens
the path of a token, and the deferred parts of many frames cost little more than those of one, whose code and memory
would have to be loaded into the processor's caches each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from router.core.actions import Action
from router.core.dispatch.dispatch_queue import DispatchQueue
from router.core.dispatch.overload import OverloadGuard
from router.core.events import TokensOnlyFrame
from router.core.fleet.fleet import Fleet
from router.core.relay.relay import Relay

MAX_DEFERRED: Final = 8


class DeferredFrames:
    """The deferred parts of all shards' frames."""

    def __init__(
        self,
        fleet: Fleet,
        queue: DispatchQueue,
        overload: OverloadGuard,
        relay: Relay,
        handle_part: Callable[[Any, float], None],
    ) -> None:
        """`handle_part` handles a shard's KV events or load report."""
        self._fleet = fleet
        self._queues = queue.queues
        self._overload = overload
        self._relay = relay
        self._handle_part = handle_part
        self._deferred: list[tuple[TokensOnlyFrame, float]] = []
        self.is_full = False
        """True when `flush` is due."""

    def relay(self, frame: TokensOnlyFrame, now: float) -> list[Action] | None:
        """Relay the frame's tokens if nothing else has to be done now. Returns None when nothing was done and the frame
        must be handled like any other."""
        shard = self._fleet.shards.get(frame.shard_id)
        if shard is None or shard.is_draining or shard.hands_over:
            return None
        if self._queues.num_requests or self._overload.has_waited:
            return None
        sent = self._relay.forward_fast(shard, frame.step)
        if sent is not None:
            self._deferred.append((frame, now))
            self.is_full = len(self._deferred) >= MAX_DEFERRED
        return sent

    def flush(self) -> None:
        """Handle the deferred parts, because a decision is due."""
        if not self._deferred:
            return
        deferred, self._deferred = self._deferred, []
        self.is_full = False
        for frame, now in deferred:
            for part in frame.read_rest():
                self._handle_part(part, now)
            self._relay.note_pace(self._fleet.shards[frame.shard_id], frame.step, now)
