"""Planted bugs in deadlines, safety, the state of the fleet, and coming to rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lab.dst.checkers import (
    DeadlinesKept,
    EndsJustified,
    FleetReported,
    IndexExact,
    SafetyKept,
    VerdictsAwaited,
)
from lab.dst.nodes.safety import HOLD_BACK_CHARS
from router.core.admission.deadlines import Deadlines
from router.core.dispatch.dispatch_queue import DispatchQueue
from router.core.fleet.fleet import Shard
from router.core.frames import Step
from router.core.live import LiveRequest
from router.core.prefix_index.prefix_index import PrefixIndex
from router.core.relay.lifecycle import Lifecycle
from router.core.relay.verdicts import Verdicts
from router.core.shard_event_handler import ShardEventHandler
from router.core.uncleared_output import UnclearedOutput
from tests.lab.dst.planted_bugs.change_steps import change_steps
from tests.lab.dst.planted_bugs.registry import Patch, caught_by


@caught_by(DeadlinesKept)
def forgets_deadlines_of_waiting_requests(patch: Patch) -> None:
    """Only the second deadline of a request is checked."""
    original = Deadlines.add

    def add(self: Deadlines, deadline: float, request: Any) -> None:
        if deadline == request.deadline:
            deadline += 1.0
        original(self, deadline, request)

    patch.setattr(Deadlines, "add", add)


@caught_by(SafetyKept)
def shows_text_while_the_verdict_is_open(patch: Patch) -> None:
    """Withheld text is cleared as soon as the prompt has its verdict, in gate mode too."""
    original = Verdicts.on_prompt

    def on_prompt(self: Verdicts, verdict: Any, now: float) -> None:
        live = self._screening._checks.get(verdict.check_id)
        for choice in live.choices if live is not None else ():
            if choice.withheld is not None:
                choice.withheld.num_clear_chars = None
        original(self, verdict, now)

    patch.setattr(Verdicts, "on_prompt", on_prompt)


@caught_by(SafetyKept)
def serves_while_safety_is_away(patch: Patch) -> None:
    """Requests are admitted without a safety service, although it is required."""
    patch.setattr(Verdicts, "can_admit", property(lambda _self: True))


@caught_by(SafetyKept, first_seed=60)
def shows_what_was_held_when_safety_returns(patch: Patch) -> None:
    """Text that was withheld while the safety service was away is shown as soon as it returns, and all text after
    it."""
    original = Verdicts.on_up

    def on_up(self: Verdicts, now: float) -> None:
        if self._waits_until is not None:
            for live in self._lifecycle.requests.values():
                for choice in live.choices:
                    if choice.withheld is not None:
                        choice.withheld.num_clear_chars = None
                        choice.is_screened = False
        original(self, now)

    patch.setattr(Verdicts, "on_up", on_up)


@caught_by(SafetyKept)
def forgets_prompts_that_waited_for_safety(patch: Patch) -> None:
    """Prompts that had no verdict when the safety service died count as allowed when it returns."""
    original = Verdicts.on_up

    def on_up(self: Verdicts, now: float) -> None:
        if self._waits_until is not None:
            for live in self._lifecycle.requests.values():
                live.prompt_verdict_open = False
        original(self, now)

    patch.setattr(Verdicts, "on_up", on_up)


@caught_by(SafetyKept)
def shows_the_end_while_safety_is_away(patch: Patch) -> None:
    """An answer that ends while the safety service is away is shown: it has no screening slot, so all of it seems
    clear."""
    original = Lifecycle.finish

    def finish(self: Lifecycle, choice: Any, end: Any, now: float) -> None:
        if choice.withheld is not None and choice.screening_slot is None:
            choice.withheld.num_clear_chars = None
        original(self, choice, end, now)

    patch.setattr(Lifecycle, "finish", finish)


@caught_by(VerdictsAwaited)
def sends_what_is_held_back(patch: Patch) -> None:
    """Text that may become forbidden is sent with the cleared text before it."""
    original = UnclearedOutput.take_clear

    def take_clear(self: UnclearedOutput) -> Any:
        clear = self.num_clear_chars
        if clear is not None:
            self.num_clear_chars = clear + HOLD_BACK_CHARS
        try:
            return original(self)
        finally:
            self.num_clear_chars = clear

    patch.setattr(UnclearedOutput, "take_clear", take_clear)


@caught_by(EndsJustified)
def has_no_patience_with_safety(patch: Patch) -> None:
    """Requests that wait for the safety service are given up at once."""
    original = Verdicts.on_down

    def on_down(self: Verdicts, now: float) -> None:
        original(self, now)
        for live in list(self._lifecycle.requests.values()):
            if self._needs_verdict(live):
                self._give_up(live, now)

    patch.setattr(Verdicts, "on_down", on_down)


@caught_by(FleetReported)
def hides_draining_from_clients(patch: Patch) -> None:
    """Clients are not notified that a shard drains."""
    original = ShardEventHandler._on_load

    def on_load(self: ShardEventHandler, *args: Any) -> None:
        self._note_fleet_change = lambda: None
        original(self, *args)

    patch.setattr(ShardEventHandler, "_on_load", on_load)


@caught_by(IndexExact)
def ignores_removals(patch: Patch) -> None:
    """The index never learns that a block was evicted."""
    original = PrefixIndex.apply_events

    def apply_events(self: PrefixIndex, shard_id: str, number: int, changes: Sequence[Any], now: float) -> bool:
        return original(
            self, shard_id, number, [msgspec.structs.replace(change, removed=()) for change in changes], now
        )

    patch.setattr(PrefixIndex, "apply_events", apply_events)


@caught_by(IndexExact)
def overlooks_gaps(patch: Patch) -> None:
    """Batch numbers are not checked: lost events stay unnoticed."""
    original = PrefixIndex.apply_events
    numbers: dict[tuple[int, str], int] = {}

    def apply_events(self: PrefixIndex, shard_id: str, number: int, changes: Sequence[Any], now: float) -> bool:
        key = (id(self), shard_id)
        numbers[key] = numbers.get(key, 0) + 1
        return original(self, shard_id, numbers[key], changes, now)

    original_snapshot = PrefixIndex.apply_snapshot

    def apply_snapshot(self: PrefixIndex, shard_id: str, number: int, block_hashes: Any) -> Any:
        numbers[id(self), shard_id] = number
        return original_snapshot(self, shard_id, number, block_hashes)

    patch.setattr(PrefixIndex, "apply_events", apply_events)
    patch.setattr(PrefixIndex, "apply_snapshot", apply_snapshot)


@caught_by(None, "reaches_quiescence")
def loses_retried_requests(patch: Patch) -> None:
    """A request that is to be retried is not queued, and its deadline was lost with the attempt."""

    def wait_for_any(_self: DispatchQueue, live: LiveRequest, _now: float) -> None:
        live.deadline = float("inf")

    patch.setattr(DispatchQueue, "wait_for_any", wait_for_any)


@caught_by(None, "never_fails")
def cannot_take_the_same_end_twice(patch: Patch) -> None:
    """The end of a slot that is not in use is treated as impossible."""

    def change(shard: Shard, step: Step) -> None:
        for finish in step.finishes:
            shard.attempts[finish.slot]

    change_steps(patch, change)
