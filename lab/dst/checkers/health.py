"""Hung and draining shards lose their work in time, and suspicion is bounded."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from lab.dst.checker import Checker
from lab.dst.observed import ObservedChoice, ObservedShard, State, eligible
from lab.dst.views import SimulatedRouterView
from router.core.actions import Action, ShardHealthChanged
from router.core.events import Event, ShardUp
from router.core.fleet.shard_health import HealthState, check_seconds
from router.core.health.departing_shards import CHECK_SECONDS
from router.core.relay.lifecycle import MAX_MOVES
from router.core.rule_settings import HealthSettings

STALLS: Final = 3.0
SLACK_SECONDS: Final = 0.5
"""For prefill that the router has reason to wait for, and for events that it does not see, such as another load report
of the shard."""


def num_serving(shards: Sequence[ObservedShard]) -> tuple[int, int]:
    """How many shards accept work, and how many of these are not healthy."""
    serving = [shard for shard in shards if not shard.is_draining]
    return len(serving), sum(shard.health is not HealthState.HEALTHY for shard in serving)


def has_other(node: SimulatedRouterView, choice: ObservedChoice, here: ObservedShard) -> bool:
    """True when an unsuspected shard other than `here`, where the choice runs, has room for it."""
    request = choice.request.request
    longest = max(other.num_tokens for other in choice.request.choices)
    window = len(request.prompt_token_ids) + (longest + 1 if request.max_tokens is None else request.max_tokens)
    return any(
        shard is not here and not shard.is_suspected and shard.description.max_model_len >= window
        for shard in eligible(node.witness.shards, choice.request)
        if node.witness.has_room(shard, choice.request)
    )


class HungShardsAbandoned(Checker):
    """No choice stays on a shard that produces no tokens for longer than the configured time and some slack while an
    unsuspected shard has room for it."""

    invariant = "hung_shards_abandoned"

    def __init__(self) -> None:
        self._since: dict[tuple[SimulatedRouterView, ObservedChoice], float] = {}
        """Since when a choice could have run on another shard."""

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        health = node.config.health
        if health is None:
            return
        waiting = set(self._waiting(node)) if node.stuck_shard_ids else set()
        self._since = {key: at for key, at in self._since.items() if key[0] is not node or key[1] in waiting}
        for choice in waiting:
            since = self._since.setdefault((node, choice), max(node.now, choice.placed_at))
            seconds = node.now - max(since, node.here_since)
            if seconds > STALLS * health.stall_seconds + SLACK_SECONDS:
                assert choice.place is not None
                self.fail(
                    f"{choice.request.request.request_id} has been on {choice.place[0]}, which hangs, for "
                    f"{seconds:.2f} s"
                )

    def _waiting(self, node: SimulatedRouterView) -> Iterator[ObservedChoice]:
        shards = node.witness.shards
        for observed in node.witness.live.values():
            if observed.is_waiting or any(choice.num_moves >= MAX_MOVES for choice in observed.choices):
                continue
            for choice in observed.choices:
                if choice.state is State.RUNNING and choice.place and choice.place[0] in node.stuck_shard_ids:
                    stuck = shards.get(choice.place[0])
                    if stuck is not None and self._may_suspect(node, stuck) and has_other(node, choice, stuck):
                        yield choice

    def _may_suspect(self, node: SimulatedRouterView, stuck: ObservedShard) -> bool:
        assert node.config.health is not None
        if stuck.health is not HealthState.HEALTHY or stuck.is_draining:
            return True
        model = stuck.description.model
        count, num_unhealthy = num_serving([s for s in node.witness.shards.values() if s.description.model == model])
        return num_unhealthy + 1 <= node.config.health.max_suspected_share * count


class SuspicionBounded(Checker):
    """No more of a model's shards are suspected than the configuration allows: a problem that all shards have is not
    caused by any of them."""

    invariant = "suspicion_bounded"

    def on_health(self, node: SimulatedRouterView, change: ShardHealthChanged) -> None:
        shard = node.witness.shards[change.shard_id]
        # A shard that was suspected when its stream broke still is when it reconnects, however many there are by now.
        is_new = shard.health is HealthState.HEALTHY and not isinstance(node.witness.event, ShardUp)
        if change.state is not HealthState.SUSPECTED or not is_new or shard.is_draining:
            return
        model = shard.description.model
        count, num_unhealthy = num_serving([s for s in node.witness.shards.values() if s.description.model == model])
        share = 0.0 if node.config.health is None else node.config.health.max_suspected_share
        if num_unhealthy + 1 > share * count:
            self.fail(
                f"{node.name} suspects {num_unhealthy + 1} of {count} shards of {model}, at most {share:g} may be"
            )


class DrainedShardsEmpty(Checker):
    """No choice stays for long on a shard whose drain deadline has passed, or that has notice and is to be empty by
    now, while another shard has room for it."""

    invariant = "drained_shards_empty"

    def __init__(self) -> None:
        self._since: dict[tuple[SimulatedRouterView, ObservedChoice], float] = {}
        """Since when a choice could have run on another shard."""

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        left = dict(self._left(node))
        if left or self._since:
            self._since = {key: at for key, at in self._since.items() if key[0] is not node or key[1] in left}
        for choice, max_seconds in left.items():
            since = self._since.setdefault((node, choice), max(node.now, choice.placed_at))
            seconds = node.now - max(since, node.here_since)
            if seconds > max_seconds:
                self.fail(
                    f"{choice.request.request.request_id} is on {choice.place} {seconds:.2f} s after its drain deadline"
                )

    def _left(self, node: SimulatedRouterView) -> Iterator[tuple[ObservedChoice, float]]:
        """With how long it may take until the router tries again to move it."""
        for shard in node.witness.shards.values():
            has_to_leave = shard.empty_by is not None and shard.empty_by <= node.now
            if not shard.hands_over and not has_to_leave:
                continue
            max_seconds = 2 * check_seconds(node.config.health or HealthSettings())
            if has_to_leave:  # there is little time before it ends
                max_seconds = 1.25 * CHECK_SECONDS
            for slot in shard.open:
                choice = shard.current(slot)
                if choice is None or choice.is_at_limit or choice.request.is_waiting:
                    continue
                may_move = has_to_leave or all(other.num_moves < MAX_MOVES for other in choice.request.choices)
                if may_move and has_other(node, choice, shard):
                    yield choice, max_seconds
