"""Frames that bring tokens and nothing that has to be looked at now.

Nearly every frame of a shard says which blocks its cache has stored and how much it has to do. That matters when
something is decided next: when a request is to be placed, a sequence has ended, a clock has run out. Until then it is
put off, and then taken in as if it had been at once: in order, each frame at its own time. A token's way is shorter by
that, and many frames' news costs little more than one's, whose code and memory have to come from far away each time.
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

MAX_PUT_OFF: Final = 8


class DeferredFrames:
    """What is put off, of all shards."""

    def __init__(
        self,
        fleet: Fleet,
        queue: DispatchQueue,
        overload: OverloadGuard,
        relay: Relay,
        take_in: Callable[[Any, float], None],
    ) -> None:
        """`take_in`: handles what a shard says of its cache or its load."""
        self._fleet = fleet
        self._queues = queue.queues
        self._overload = overload
        self._relay = relay
        self._take_in = take_in
        self._put_off: list[tuple[TokensOnlyFrame, float]] = []
        self.is_full = False
        """It is time to catch up."""

    def relay(self, frame: TokensOnlyFrame, now: float) -> list[Action] | None:
        """The tokens, if that is all that has to be done now. None: nothing was done, treat it as any other frame."""
        shard = self._fleet.shards.get(frame.shard_id)
        if shard is None or shard.is_draining or shard.hands_over:
            return None
        if self._queues.num_requests or self._overload.somebody_waited:
            return None
        sent = self._relay.forward_fast(shard, frame.step)
        if sent is not None:
            self._put_off.append((frame, now))
            self.is_full = len(self._put_off) >= MAX_PUT_OFF
        return sent

    def flush(self) -> None:
        """Something is to be decided, or told."""
        if not self._put_off:
            return
        put_off, self._put_off = self._put_off, []
        self.is_full = False
        for frame, now in put_off:
            for part in frame.read_rest():
                self._take_in(part, now)
            self._relay.note_pace(self._fleet.shards[frame.shard_id], frame.step, now)
