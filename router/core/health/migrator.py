"""Moves requests from a shard that is suspected, hands over its work or ends soon to other shards."""

from __future__ import annotations

from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH
from router.core.action_buffer import ActionBuffer
from router.core.actions import CancelOnShard, MoveReason, RequestsMoved
from router.core.dispatch.attempt_sender import AttemptSender
from router.core.dispatch.fair_shares import MAX_MOVES
from router.core.fleet.fleet import Shard
from router.core.frames import Finish
from router.core.live import LiveRequest
from router.core.placement.placer import Placer
from router.core.relay.lifecycle import Lifecycle


class Migrator:
    """Moves running requests from one shard to others that have room."""

    def __init__(
        self, placer: Placer, attempt_sender: AttemptSender, lifecycle: Lifecycle, action_buffer: ActionBuffer
    ) -> None:
        self._placer = placer
        self._attempt_sender = attempt_sender
        self._lifecycle = lifecycle
        self._action_buffer = action_buffer

    def move_off(self, shard: Shard, now: float) -> None:
        """Move every request that another shard has room for; the rest stays, since slow service is better than none.
        They are placed one after the other, each seeing the reservations of those before it, so that they spread."""
        shard.fast_path.write_back()
        self._attempt_sender.legs.move_off(shard, now)
        num_moved = 0
        for live in dict.fromkeys(choice.request for choice in shard.choices.values()):
            if self.move(live, shard, now):
                num_moved += 1
        if num_moved:
            reason = MoveReason.HAND_OVER if shard.hands_over else MoveReason.SUSPECTED
            self._action_buffer.add(RequestsMoved(shard.shard_id, num_moved, reason))

    def move(self, live: LiveRequest, shard: Shard, now: float, *, is_noticed: bool = False) -> bool:
        """Returns whether it has moved. It does not if no other shard has room, and if it has moved very often, except
        off a shard with notice (`is_noticed`), where it would be lost."""
        moved = [choice for choice in live.choices if choice.shard_id == shard.shard_id]
        if live.is_queued or (not is_noticed and any(choice.num_moves >= MAX_MOVES for choice in moved)):
            return False
        # At its limit a choice has no more tokens to produce; only its end has not come.
        open_choices = [choice for choice in moved if not choice.is_at_limit]
        live.pending = open_choices
        if open_choices and not self._has_place(live, shard):
            live.pending = []
            return False
        # Before they are dispatched again, so that nothing runs twice for a reader of the actions.
        self._action_buffer.add(CancelOnShard(shard.shard_id, [choice.shard_slot for choice in moved]))
        for choice in moved:
            shard.detach(choice)
        if open_choices:
            for choice in open_choices:
                choice.num_moves += 1
                live.moves = live.moves.with_migration(is_noticed=is_noticed)
            self._attempt_sender.queue.enter(live, now)
        for choice in moved:
            if choice not in open_choices:
                self._lifecycle.finish(choice, Finish(choice.client_slot, FINISH_REASON_LENGTH), now)
        return True

    def _has_place(self, live: LiveRequest, shard: Shard) -> bool:
        others = (
            other for other in self._placer.eligibility.eligible(live) if other is not shard and not other.is_suspected
        )
        return any(self._placer.eligibility.has_room(other, live) for other in others)
