"""A simulated fleet: calls arrive, real router cores place them, and modelled shards run them, in virtual time.

    result = simulate(workload, FleetOptions(profile=PROFILES["70b"], num_shards=8, policy="ect"))

Links have no latency. Events at the same time happen in the order in which they were scheduled, so that a run is a
function of its workload and options.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvloom.v1.generation_pb2 import FinishReason
from router.core import events as ev
from router.core.actions import CancelOnShard, LeasesWanted, RequestEnded, SubmitAttempt, WantKvSnapshot
from router.core.core import CoreConfig
from router.core.dispatch.starts import StartEstimate
from router.core.events import ChoiceSpec, KvChange, Request, ShardDescription, TierRank, class_of
from router.placement_plugins import plugin_policy
from tools.simulate.bound import prefill_seconds
from tools.simulate.fleet.fleet import MODEL, FleetOptions, make_shards
from tools.simulate.fleet.scaling import ScaledFleet
from tools.simulate.fleet.sequence import ShardSequence
from tools.simulate.fleet.shard import SimShard, StepResult
from tools.simulate.fleet.shard_frames import step_of, too_long
from tools.simulate.idle_waits import IdleWaits
from tools.simulate.router import SimulatedRouter
from tools.simulate.workload import Call, Outcome, ShardSample, SimulatedWorkload, SimulationResult

__all__ = ["FleetOptions", "FleetWorld", "simulate"]

REPORT_SHARE_OF_STALENESS: Final = 0.25
MIN_REPORT_INTERVAL_SECONDS: Final = 0.05
_FOREVER_SECONDS: Final = 1e9
_UNLIMITED: Final = 2**40


def simulate(
    workload: SimulatedWorkload, options: FleetOptions, on_progress: Callable[[int], None] | None = None
) -> SimulationResult:
    """Run the workload to its end. `on_progress` is called with the number of ended calls, now and then and at the end.

    Raises ValueError for a policy that does not exist.
    """
    return FleetWorld(workload, options, on_progress).run()


class FleetWorld:
    """One fleet. `run` plays its workload; several fleets in one virtual time are begun, and then stepped by their
    caller, which may give them further calls."""

    def __init__(
        self,
        workload: SimulatedWorkload,
        options: FleetOptions,
        on_progress: Callable[[int], None] | None = None,
        *,
        begins_at: float = 0.0,
    ) -> None:
        self._workload = workload
        self._options = options
        self._on_progress = on_progress
        self._block_size = workload.block_size
        self._now = begins_at
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._num_scheduled = 0
        self._arrivals: Iterator[tuple[float, Call]] = iter(workload.first_calls())
        self._num_scheduled_arrivals = 0
        """The number of arrivals in the heap."""
        self._open: dict[str, tuple[Call, float]] = {}
        """Calls that have arrived and not ended, with their arrival times, by request_id."""
        self._sequences: dict[str, tuple[SimShard, ShardSequence]] = {}
        """By request_id: the sequence of an open call, and its shard."""
        self.outcomes: list[Outcome] = []
        self._samples: list[ShardSample] = []
        self._shards = make_shards(options, workload.block_size)
        self._index_of = {shard.shard_id: index for index, shard in enumerate(self._shards)}
        self._part_of = [part for part in options.parts for _ in range(part.num_shards)]
        """By the index of a shard: the shards of its model."""
        self._scaled: ScaledFleet | None = None
        if options.scaler is not None:
            self._scaled = ScaledFleet(
                options.scaler, self._shards, lambda index: make_shards(options, workload.block_size)[index]
            )
        self._idle_waits = {part.name: IdleWaits() for part in options.parts}
        for index, part in enumerate(self._part_of):
            self._idle_waits[part.name].note_shard(index, 0.0, is_idle=self._shards[index].is_connected)
        self._due_at = dict.fromkeys(self._index_of, math.inf)
        """The time of the next valid event of each shard in the heap."""
        self._num_kv_events = dict.fromkeys(self._index_of, 0)
        config = options.core_config or CoreConfig(
            max_queued_requests=_UNLIMITED,
            max_queue_seconds=_FOREVER_SECONDS,
            request_timeout_seconds=_FOREVER_SECONDS,
            policy=options.policy,
            plugin_policy=plugin_policy(options.policy),
            answer_mode="off",
            safety_required=False,
        )
        self._limits = options.limits
        self._links = [
            SimulatedRouter(
                index,
                config,
                options.seed + index,
                self._shards,
                None if self._limits is None else self._limits.limiter(),
            )
            for index in range(options.num_routers)
        ]
        self._next_sample_at = 0.0
        self._next_report_at = 0.0 if options.staleness_seconds else math.inf
        self._report_interval_seconds = max(
            MIN_REPORT_INTERVAL_SECONDS, REPORT_SHARE_OF_STALENESS * options.staleness_seconds
        )

    def run(self) -> SimulationResult:
        self.begin()
        while self.is_busy:
            self.step()
        return self.result()

    def begin(self) -> None:
        for index, shard in enumerate(self._shards):
            if shard.is_connected:
                self._connect(index)
        if self._scaled is not None:
            self._schedule(self._scaled.scaler.interval_seconds, self._on_scale, self._scaled)
        self._schedule_next_arrival()

    @property
    def is_busy(self) -> bool:
        """True while calls are open or will arrive."""
        return bool(self._open or self._num_scheduled_arrivals)

    @property
    def next_at(self) -> float:
        """The time of the next event; infinity when nothing is going on."""
        return self._heap[0][0] if self.is_busy else math.inf

    def step(self) -> None:
        """Let the next event happen. The fleet must be busy."""
        at, _, callback, subject = self._heap[0]
        if self._next_sample_at <= at or self._next_report_at <= at:
            self._observe(at)
            return
        heapq.heappop(self._heap)
        self._now = at
        callback(subject)

    def add_call(self, call: Call, at: float) -> None:
        """Let a call arrive that is none of the workload's."""
        self._num_scheduled_arrivals += 1
        self._schedule(at, self._on_call, call)

    def starts(self, now: float) -> dict[str, StartEstimate]:
        """How soon a request would begin that arrives now, by model, as the first router tells edges."""
        self._now = max(self._now, now)
        self._refresh_loads(self._links[0])
        return self._links[0].core.starts(now)

    def unfinished(self, now: float) -> list[tuple[Call, float, int]]:
        """(call, its arrival, the output tokens that it has) of each open call."""
        found: list[tuple[Call, float, int]] = []
        for name, (call, arrived_at) in self._open.items():
            sequence = self._sequences.get(name)
            num_tokens = 0 if sequence is None else sequence[0].num_output_tokens_of(sequence[1], now)
            found.append((call, arrived_at, num_tokens))
        return found

    def result(self) -> SimulationResult:
        if self._on_progress is not None:
            self._on_progress(len(self.outcomes))
        if self._scaled is not None:
            self._scaled.finish(self._now)
        return SimulationResult(
            self.outcomes,
            self._samples,
            sum(link.cpu_nanoseconds for link in self._links) / 1e9,
            sum(link.num_events for link in self._links),
            sum(waits.num_too_long for waits in self._idle_waits.values()),
            0.0 if self._scaled is None else self._scaled.shard_seconds,
            () if self._scaled is None else self._scaled.counts,
        )

    def _schedule(self, at: float, callback: Callable[[Any], None], subject: object) -> None:
        self._num_scheduled += 1
        heapq.heappush(self._heap, (at, self._num_scheduled, callback, subject))

    # -- calls ----------------------------------------------------------------------------------------------------

    def _schedule_next_arrival(self) -> None:
        entry = next(self._arrivals, None)
        if entry is not None:
            self._num_scheduled_arrivals += 1
            self._schedule(max(entry[0], self._now), self._on_first_call, entry[1])

    def _on_first_call(self, call: Call) -> None:
        self._on_call(call)
        self._schedule_next_arrival()

    def _on_call(self, call: Call) -> None:
        self._num_scheduled_arrivals -= 1
        now = self._now
        link = self._links[call.call_id % len(self._links)]
        self._refresh_loads(link)
        request_id = str(call.call_id)
        self._open[request_id] = (call, now)
        request = Request(
            request_id=request_id,
            client_id="trace",
            model=call.model if self._options.models else MODEL,
            prompt_token_ids=range(call.num_prompt_tokens),
            prompt_text="",
            choices=(ChoiceSpec(call.call_id, 0),),
            max_tokens=call.num_output_tokens if self._limits is None else call.max_tokens,
            session_key=call.session_key,
            tenant=call.tenant if self._options.has_tenants else "",
            key_id=call.key_id,
            tier=TierRank.BATCH if call.is_batch and self._options.has_classes else TierRank.INTERACTIVE,
            block_hashes={self._block_size: tuple(call.block_hashes)},
        )
        if not (call.is_batch and self._options.has_classes):  # those may be left waiting for others
            self._idle_waits[request.model].note_arrival(request_id, now)
        self._deliver(link, ev.RequestArrived(request))
        self._schedule_tick(link)

    def _on_request_ended(self, link: SimulatedRouter, ended: RequestEnded) -> None:
        call, arrived_at = self._open.pop(ended.request_id)
        self._sequences.pop(ended.request_id, None)
        now = self._now
        if self._limits is not None:
            self._limits.record(link.name, ended)
        self._idle_waits[call.model if self._options.models else MODEL].note_end(ended.request_id)
        failed = ended.reason not in (FinishReason.FINISH_REASON_LENGTH, FinishReason.FINISH_REASON_STOP)
        self.outcomes.append(
            Outcome(
                call,
                arrived_at,
                self._index_of.get(ended.shard_id, 0),
                ended.num_cached_tokens,
                now - arrived_at if ended.ttft_seconds is None else ended.ttft_seconds,
                now,
                failed,
                ended.judged_prediction,
                ended.error_reason,
                ended.num_output_tokens,
            )
        )
        if self._on_progress is not None and len(self.outcomes) % 64 == 0:
            self._on_progress(len(self.outcomes))
        for at, following in self._workload.next_calls(call, now):
            self._num_scheduled_arrivals += 1
            self._schedule(max(at, now), self._on_call, following)

    # -- routers --------------------------------------------------------------------------------------------------

    def _connect(self, index: int) -> None:
        shard, part = self._shards[index], self._part_of[index]
        description = ShardDescription(
            shard_id=shard.shard_id,
            incarnation_id=f"{1 + self._now:g}",
            model=part.name,
            block_size=self._block_size,
            num_blocks=shard.cache.num_blocks,
            max_batch=part.profile.max_batch,
            max_model_len=self._options.max_model_len,
            yield_tokens=part.profile.chunk_tokens,
            reserves_output=self._limits is None,
        )
        for link in self._links:
            self._deliver(link, ev.ShardUp(description))
            self._deliver(link, ev.KvSnapshotArrived(shard.shard_id, 0, ()))

    def _deliver(self, link: SimulatedRouter, event: ev.Event) -> None:
        """Deliver an event to a router and carry out its actions."""
        on_action = self._options.on_action
        for action in link.handle(event, self._now):
            if on_action is not None:
                on_action(action, self._now)
            handler = _ACTION_HANDLERS.get(type(action))
            if handler is not None:
                handler(self, link, action)
        if self._options.models:
            # So that the calls of one model do not wake the router earlier for another. A fleet of one model does this
            # only after calls and ticks, which its published figures depend on.
            self._schedule_tick(link)

    def _refresh_loads(self, link: SimulatedRouter) -> None:
        """Deliver load reports before a placement. Without staleness they are needed, and made, only then."""
        if not self._options.staleness_seconds:
            for report in link.take_reports(self._now):
                self._deliver(link, report)

    def _deliver_later(self, subject: tuple[SimulatedRouter, ev.Event]) -> None:
        self._deliver(*subject)

    def _deliver_delayed(self, link: SimulatedRouter, event: ev.Event) -> None:
        """Deliver an event of the control plane after the staleness in the options."""
        if self._options.staleness_seconds:
            self._schedule(self._now + self._options.staleness_seconds, self._deliver_later, (link, event))
        else:
            self._deliver(link, event)

    def _schedule_tick(self, link: SimulatedRouter) -> None:
        deadline = link.core.next_deadline()
        if deadline is not None and (link.tick_at is None or deadline < link.tick_at):
            link.tick_at = deadline
            self._schedule(max(deadline, self._now), self._on_tick, link)

    def _on_tick(self, link: SimulatedRouter) -> None:
        if link.tick_at is not None and link.tick_at <= self._now:
            link.tick_at = None
        if link.core.num_queued_requests:
            self._refresh_loads(link)
        self._deliver(link, ev.Tick())
        self._schedule_tick(link)

    def _on_submit(self, link: SimulatedRouter, action: SubmitAttempt) -> None:
        index = self._index_of[action.shard_id]
        shard = self._shards[index]
        request = action.request
        num_prompt_tokens = len(request.prompt_token_ids)
        assert request.block_hashes is not None
        profile, slowness = self._part_of[index].profile, max(self._options.speed_factors, default=1.0)
        cold_seconds = slowness * prefill_seconds(profile, num_prompt_tokens, 0)
        self._idle_waits[request.model].note_begin(action.prepares or request.request_id, cold_seconds, self._now)
        open_call = self._open.get(request.request_id)
        num_output_tokens = min(action.max_tokens, open_call[0].num_output_tokens) if open_call else action.max_tokens
        for choice in action.choices:
            if not shard.can_hold(num_prompt_tokens, num_output_tokens):
                self._schedule(self._now, self._deliver_later, (link, too_long(shard.shard_id, choice.slot)))
                continue
            sequence = ShardSequence(
                slot=choice.slot,
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=num_output_tokens,
                hashes=request.block_hashes[self._block_size],
                num_expected_cached_tokens=action.num_expected_cached_tokens,
                router_index=link.index,
                class_rank=class_of(request).rank,
                tenant=request.tenant,
            )
            self._sequences[request.request_id] = shard, sequence
            shard.submit(sequence, self._now)
        self._schedule_shard(shard)

    def _on_cancel(self, link: SimulatedRouter, action: CancelOnShard) -> None:
        shard = self._shards[self._index_of[action.shard_id]]
        for slot in action.slots:
            shard.cancel(link.index, slot, self._now)
        self._schedule_shard(shard)

    def _on_want_snapshot(self, link: SimulatedRouter, action: WantKvSnapshot) -> None:
        shard = self._shards[self._index_of[action.shard_id]]
        snapshot = ev.KvSnapshotArrived(
            shard.shard_id, self._num_kv_events[shard.shard_id], shard.cache.cached_hashes()
        )
        self._deliver_delayed(link, snapshot)

    def _on_leases_wanted(self, link: SimulatedRouter, action: LeasesWanted) -> None:
        assert self._limits is not None
        granted = self._limits.grant(link.name, action, len(self._links), self._now)
        self._schedule(self._now, self._deliver_later, (link, granted))

    # -- shards ---------------------------------------------------------------------------------------------------

    def _schedule_shard(self, shard: SimShard) -> None:
        """Schedule `_on_shard_due` for the end of the current steps. A later event in the heap becomes void."""
        index = self._index_of[shard.shard_id]
        self._idle_waits[self._part_of[index].name].note_shard(index, self._now, is_idle=not shard.num_sequences)
        if shard.busy_until < self._due_at[shard.shard_id]:
            self._due_at[shard.shard_id] = shard.busy_until
            self._schedule(shard.busy_until, self._on_shard_due, shard)

    def _on_shard_due(self, shard: SimShard) -> None:
        if self._due_at[shard.shard_id] != self._now:
            return
        self._due_at[shard.shard_id] = -math.inf  # submissions during the following calls are handled below
        self._publish(shard, shard.end_steps(self._now))
        shard.begin_steps(self._now)
        self._due_at[shard.shard_id] = math.inf
        self._schedule_shard(shard)

    def _publish(self, shard: SimShard, result: StepResult) -> None:
        """Send the results of a shard's steps to the routers."""
        if result.stored or result.removed:
            self._num_kv_events[shard.shard_id] += 1
            changes = (KvChange(stored=result.stored, removed=result.removed),)
            event = ev.KvEventsArrived(shard.shard_id, self._num_kv_events[shard.shard_id], changes)
            for link in self._links:
                self._deliver_delayed(link, event)
        if result.starts or result.ends:
            for link in self._links:
                step = step_of(result, link.index)
                if step:
                    if link.core.num_queued_requests:
                        self._refresh_loads(link)
                    self._deliver(link, ev.StepArrived(shard.shard_id, step))

    # -- scaling --------------------------------------------------------------------------------------------------

    def _on_scale(self, scaled: ScaledFleet) -> None:
        num_queued = sum(link.core.num_queued_requests for link in self._links)
        queues = [queue for link in self._links for queue in link.core.queued_by_model().values()] if num_queued else []
        num_tokens = sum(tokens for _, tokens in queues)
        self._end_idle(scaled)
        begun, draining = scaled.decide(self._now, self.outcomes, num_queued, num_tokens)
        for index in begun:
            self._schedule(self._now + scaled.scaler.start_seconds, self._on_started, index)
        for index in draining:
            shard = self._shards[index]
            for link in self._links:
                self._deliver(link, ev.LoadReported(shard.shard_id, shard.load(link.index, self._now)))
        self._schedule(self._now + scaled.scaler.interval_seconds, self._on_scale, scaled)

    def _on_started(self, index: int) -> None:
        assert self._scaled is not None
        if self._scaled.start(index, self._now):
            for link in self._links:
                link.forget_reports(index)
            self._num_kv_events[self._shards[index].shard_id] = 0
            self._connect(index)
            self._idle_waits[self._part_of[index].name].note_shard(index, self._now, is_idle=True)
            for link in self._links:
                self._schedule_tick(link)

    def _end_idle(self, scaled: ScaledFleet) -> None:
        for index in scaled.end_idle(self._now):
            self._idle_waits[self._part_of[index].name].note_shard(index, self._now, is_idle=False)
            for link in self._links:
                self._deliver(link, ev.ShardDown(self._shards[index].shard_id))

    # -- observation ----------------------------------------------------------------------------------------------

    def _observe(self, before: float) -> None:
        """Take the samples and load reports that are due next, not after `before`."""
        at = min(self._next_sample_at, self._next_report_at)
        if at == self._next_report_at:
            for link in self._links:
                for report in link.take_reports(at):
                    self._schedule(at + self._options.staleness_seconds, self._deliver_later, (link, report))
            self._next_report_at = self._following(at, self._report_interval_seconds, before)
        if at == self._next_sample_at:
            self._samples.extend(
                ShardSample(
                    at,
                    index,
                    shard.num_running,
                    shard.num_waiting,
                    shard.num_queued_prefill_tokens,
                    shard.num_used_blocks,
                )
                for index, shard in enumerate(self._shards)
                if shard.is_connected
            )
            self._next_sample_at = self._following(at, self._options.sample_interval_seconds, before)

    def _following(self, at: float, interval_seconds: float, before: float) -> float:
        """The time of the next observation. Idle times are skipped."""
        if self._open:
            return at + interval_seconds
        return at + interval_seconds * max(1, math.ceil((before - at) / interval_seconds))


_ACTION_HANDLERS: Final[dict[type, Callable[[FleetWorld, SimulatedRouter, Any], None]]] = {
    SubmitAttempt: FleetWorld._on_submit,
    CancelOnShard: FleetWorld._on_cancel,
    WantKvSnapshot: FleetWorld._on_want_snapshot,
    LeasesWanted: FleetWorld._on_leases_wanted,
    RequestEnded: FleetWorld._on_request_ended,
}
"""RequestEnded has everything about an answer, so that SendStep is not needed. Other actions have no receiver here."""
