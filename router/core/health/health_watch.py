"""Watches the shards: it suspects a shard, moves its requests, probes it, and readmits it."""

from __future__ import annotations

import math
from collections import OrderedDict
from statistics import median
from typing import Final

from router.core.action_buffer import ActionBuffer
from router.core.actions import CancelOnShard, ShardHealthChanged
from router.core.dispatch.attempt_sender import AttemptSender
from router.core.fleet.fleet import Fleet, Shard
from router.core.fleet.shard_health import HealthState, Pace, ShardHealth, Symptom, check_seconds
from router.core.health.migrator import Migrator
from router.core.load.load_ledger import LoadLedger
from router.core.rule_settings import HealthSettings

PREDICTION_SLACK: Final = 2.0
"""How many times its predicted prefill a first token may take before silence counts."""
MAX_COUNTED_INTERVALS: Final = 2.0
"""Limit on the counted time, in intervals between two checks: beyond that this router was not running itself, and what
shards had sent is unread."""
MAX_REMEMBERED: Final = 1024
"""Remembered shards that disconnected while they were suspected."""
PROBE_STEPS: Final = 2
"""A probe waits for the step that runs, and takes one of its own."""
PROBE_SLACK_SHARE: Final = 1 / 3
"""Share of `slow_factor`: how much slower than its peers' a shard's steps may be for it to be readmitted."""
MIN_PROBE_LIMIT_SECONDS: Final = 0.1


class HealthWatch:
    """With `settings` None no shard is watched, but draining shards still hand over their requests."""

    def __init__(
        self,
        settings: HealthSettings | None,
        fleet: Fleet,
        ledger: LoadLedger,
        attempt_sender: AttemptSender,
        migrator: Migrator,
        action_buffer: ActionBuffer,
    ) -> None:
        self._settings = settings
        self._check_seconds = check_seconds(settings or HealthSettings())
        self._fleet = fleet
        self._ledger = ledger
        self._attempt_sender = attempt_sender
        self._migrator = migrator
        self._action_buffer = action_buffer
        self._checked_at = -math.inf
        self._num_unhealthy = 0
        """The number of shards that are not healthy."""
        self._num_handing_over = 0
        self._departed: OrderedDict[str, tuple[str, ShardHealth]] = OrderedDict()
        """Shard → incarnation and health of one that was not healthy when its stream broke."""

    def next_deadline(self) -> float:
        """When `on_tick` has something to check; infinity: not before another event."""
        if self._settings is None:
            is_due = self._num_handing_over > 0
        else:
            is_due = self._num_unhealthy or self._num_handing_over or self._ledger.is_busy
        return self._checked_at + self._check_seconds if is_due else math.inf

    # -- events ---------------------------------------------------------------------------------------------------

    def on_shard_up(self, shard: Shard, now: float) -> None:
        """A breaker outlives the stream: a shard that hangs is no better after a new connection."""
        if self._settings is None:
            return
        incarnation_id, health = self._departed.pop(shard.shard_id, ("", None))
        if health is None or incarnation_id != shard.description.incarnation_id:
            shard.health = ShardHealth(self._settings)
            return
        shard.health = health
        health.reconnect(now)
        self._num_unhealthy += 1
        self._report_change(shard, health)

    def on_shard_down(self, shard: Shard) -> None:
        self._num_handing_over -= shard.hands_over
        health = shard.health
        if health is not None and health.state is not HealthState.HEALTHY:
            self._num_unhealthy -= 1
            self._departed[shard.shard_id] = (shard.description.incarnation_id, health)
            while len(self._departed) > MAX_REMEMBERED:
                self._departed.popitem(last=False)

    def on_load(self, shard: Shard, *, hands_over: bool, now: float) -> None:
        if shard.hands_over != hands_over:
            shard.hands_over = hands_over
            self._num_handing_over += 1 if hands_over else -1
            if hands_over:
                self._migrator.move_off(shard, now)

    def on_ends(self, shard: Shard, now: float) -> None:
        """Sequences have ended there, perhaps by failures: a shard that fails at once is never seen at work."""
        health = shard.health
        if health is not None and self._settings is not None and health.num_failures >= self._settings.max_failures:
            self._examine(shard, health, now)

    def on_tick(self, now: float) -> None:
        if now < self.next_deadline():
            return
        seconds = min(now - self._checked_at, MAX_COUNTED_INTERVALS * self._check_seconds)
        self._checked_at = now
        shards = list(self._fleet.shards.values())
        for shard in shards:
            if shard.health is not None:
                shard.health.note_time(seconds, has_work=bool(shard.attempts))
        for shard in shards:
            if shard.health is not None:
                self._examine(shard, shard.health, now)
            if shard.choices and (shard.hands_over or shard.is_suspected):
                self._migrator.move_off(shard, now)

    # -- symptoms -------------------------------------------------------------------------------------------------

    def _examine(self, shard: Shard, health: ShardHealth, now: float) -> None:
        if not health.is_suspected:
            symptom = self._symptom(shard, health, now)
            if symptom is not None and (health.state is HealthState.PROBING or self._may_suspect(shard)):
                self._suspect(shard, health, symptom, now)
        if health.state is not HealthState.HEALTHY and not shard.is_draining:
            self._probe(shard, health, now)

    def _symptom(self, shard: Shard, health: ShardHealth, now: float) -> Symptom | None:
        assert self._settings is not None
        if health.silent_seconds and shard.attempts:
            oldest = next(iter(shard.attempts.values()))
            silent_seconds = min(health.silent_seconds, now - oldest.sent_at)
            if silent_seconds > self._settings.stall_seconds + self._prefill_seconds(shard):
                return Symptom.STALLED
        if health.num_failures >= self._settings.max_failures:
            return Symptom.FAILING
        if health.pace.is_known(now) and health.pace.is_slow(self._peers(shard, now), self._settings.slow_factor):
            return Symptom.SLOW
        return None

    def _prefill_seconds(self, shard: Shard) -> float:
        """The time that may pass until the first token of the first request that waits there."""
        view = self._ledger.view(shard.shard_id)
        first = next(iter(view.queued.values()), None)
        if first is None:
            return 0.0
        return PREDICTION_SLACK * view.speed.seconds(first.work, view.num_context_tokens)

    def _peers(self, shard: Shard, now: float) -> list[Pace]:
        """The paces of healthy shards of the same model."""
        return [
            other.health.pace
            for other in self._fleet.shards.values()
            if other is not shard
            and other.health is not None
            and other.health.state is HealthState.HEALTHY
            and other.description.model == shard.description.model
            and other.health.pace.is_known(now)
        ]

    def _may_suspect(self, shard: Shard) -> bool:
        """A fault that all shards seem to have cannot be cured by moving requests."""
        assert self._settings is not None
        model = shard.description.model
        serving = [s for s in self._fleet.shards.values() if s.description.model == model and not s.is_draining]
        if shard.is_draining:
            return any(not other.is_suspected for other in serving)
        num_unhealthy = sum(s.health is not None and s.health.state is not HealthState.HEALTHY for s in serving)
        return num_unhealthy + 1 <= self._settings.max_suspected_share * len(serving)

    def _suspect(self, shard: Shard, health: ShardHealth, symptom: Symptom, now: float) -> None:
        self._num_unhealthy += health.state is HealthState.HEALTHY
        health.trip(symptom, now)
        self._report_change(shard, health)
        self._attempt_sender.queue.requeue_all(shard, now)

    # -- probes ---------------------------------------------------------------------------------------------------

    def _probe(self, shard: Shard, health: ShardHealth, now: float) -> None:
        before = health.state
        if health.is_probe_overdue(now):
            health.miss_probe(now)
            assert health.probe_slot is not None
            self._action_buffer.add(CancelOnShard(shard.shard_id, [health.probe_slot]))
        health.take_answer(now)
        if health.state is not before:
            self._fleet.note_readiness()
            if before is HealthState.SUSPECTED:
                shard.limit = 1
                self._attempt_sender.queue.leave_last_resorts(now)  # for this one
            self._num_unhealthy -= health.state is HealthState.HEALTHY
            if health.is_suspected:
                self._attempt_sender.queue.requeue_all(shard, now)
            self._report_change(shard, health)
        if health.state is not HealthState.HEALTHY and health.probe_slot is None and now >= health.probe_at:
            health.send_probe(self._attempt_sender.send_probe(shard, now), self._probe_limit_seconds(shard, now), now)

    def _probe_limit_seconds(self, shard: Shard, now: float) -> float:
        """A shard that is readmitted must be about as fast as its peers."""
        assert self._settings is not None
        peers = self._peers(shard, now)
        if not peers:
            return self._settings.stall_seconds
        step_seconds = 1.0 / max(median(peer.per_sequence for peer in peers), 1e-3)
        limit_seconds = PROBE_STEPS * PROBE_SLACK_SHARE * self._settings.slow_factor * step_seconds
        return min(max(limit_seconds, MIN_PROBE_LIMIT_SECONDS), self._settings.stall_seconds)

    def _report_change(self, shard: Shard, health: ShardHealth) -> None:
        self._fleet.note_readiness()
        symptom = "" if health.symptom is None else health.symptom.value
        self._action_buffer.add(ShardHealthChanged(shard.shard_id, health.state, symptom))
