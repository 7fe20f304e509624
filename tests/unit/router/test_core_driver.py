"""The driver keeps events in one order whatever sinks do, and ticks when the core has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvloom.errors import KvloomError
from router.core.actions import (
    Action,
    AnswerCompleted,
    AnswerResampled,
    BrownoutStepChanged,
    FleetChanged,
    PlacementDecided,
    PrefillLegCounted,
    RequestDegraded,
    RequestEnded,
    RequestsMoved,
    SendStep,
    SequencesPreempted,
    ShardHealthChanged,
)
from router.core.events import (
    ClientGone,
    DrainEnded,
    DrainStarted,
    Event,
    Request,
    RequestArrived,
    RequestCancelled,
    ShardDown,
    SlotsCancelled,
    Tick,
)
from router.core.frames import Step
from router.core_driver import CoreDriver
from router.usage_records import Credit


class ScriptedCore:
    """A core with a scripted answer for each kind of event, which records the order of the events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.answers: dict[type, Callable[[], list[Action]]] = {}
        self.deadline: float | None = None
        self.fleet = FleetChanged((), draining=False)
        self.ticked = asyncio.Event()

    def handle(self, event: Event, now: float) -> list[Action]:
        self.events.append(event)
        if isinstance(event, Tick) and self.deadline is not None and now >= self.deadline:
            self.deadline = None
            self.ticked.set()
        return self.answers.get(type(event), list)()

    def has_request(self, request_id: str) -> bool:
        return False

    def next_deadline(self) -> float | None:
        return self.deadline

    @property
    def deadlines_stand(self) -> bool:
        return False


class Silent:
    def placement_decided(self, decision: PlacementDecided) -> None: ...

    def request_ended(self, ended: RequestEnded) -> None: ...

    def request_refused(self, error: KvloomError) -> None: ...

    def tokens_credited(self, credit: Credit) -> None: ...

    def fleet_changed(self) -> None: ...

    def shard_health_changed(self, change: ShardHealthChanged) -> None: ...

    def requests_moved(self, moved: RequestsMoved) -> None: ...

    def sequences_preempted(self, preempted: SequencesPreempted) -> None: ...

    def prefill_leg_counted(self, counted: PrefillLegCounted) -> None: ...

    def answer_resampled(self, change: AnswerResampled) -> None: ...

    def brownout_step_changed(self, change: BrownoutStepChanged) -> None: ...

    def request_degraded(self, degraded: RequestDegraded) -> None: ...


class Reacting:
    """A client that reacts to a step with a nested event."""

    def __init__(self, driver: CoreDriver) -> None:
        self.driver = driver
        self.steps: list[Step] = []

    def send_step(self, step: Step) -> None:
        self.steps.append(step)
        self.driver.dispatch(ClientGone("c"))

    def send_fleet(self, fleet: FleetChanged) -> None: ...


async def test_a_nested_event_is_handled_after_the_current_one() -> None:
    """The core is not re-entrant: all actions of one event come before the next event."""
    core = ScriptedCore()
    driver = CoreDriver(core, Silent())
    client = Reacting(driver)
    driver.add_client("c", client)
    core.answers[DrainStarted] = lambda: [SendStep("c", Step(slots=[1])), SendStep("c", Step(slots=[2]))]
    driver.dispatch(DrainStarted())
    assert [step.slots for step in client.steps] == [[1], [2]]
    assert [type(event) for event in core.events] == [DrainStarted, ClientGone, ClientGone]


async def test_a_fault_breaks_its_peer_and_not_the_driver() -> None:
    """The caller that dispatched the event gets the error, and queued events of others are handled all the same."""
    core = ScriptedCore()
    driver = CoreDriver(core, Silent())
    client = Reacting(driver)
    driver.add_client("c", client)

    def fail() -> list[Action]:
        raise ArithmeticError("a bug")

    core.answers[DrainStarted] = lambda: [SendStep("c", Step(slots=[1]))]
    core.answers[ShardDown] = fail
    with pytest.raises(ArithmeticError):
        driver.dispatch(ShardDown("s"))
    driver.dispatch(DrainStarted())
    assert [type(event) for event in core.events] == [ShardDown, DrainStarted, ClientGone]


async def test_clients_are_known_by_one_id() -> None:
    """Steps for a client that has gone are dropped because its ClientGone is on its way; a present client keeps its
    id."""
    core = ScriptedCore()
    driver = CoreDriver(core, Silent())
    core.answers[DrainStarted] = lambda: [SendStep("gone", Step(slots=[1]))]
    driver.dispatch(DrainStarted())
    driver.add_client("twin", Reacting(driver))
    with pytest.raises(ValueError, match="in use"):
        driver.add_client("twin", Reacting(driver))


async def test_it_ticks_once_the_deadline_has_come() -> None:
    """Deadlines expire although no event arrives, and an earlier deadline is not missed because of a later timer."""
    core = ScriptedCore()
    driver = CoreDriver(core, Silent())
    core.deadline = driver.now() + 60
    driver.dispatch(DrainStarted())
    core.deadline = driver.now() + 0.02
    driver.dispatch(DrainStarted())
    async with asyncio.timeout(5):
        await core.ticked.wait()
    assert sum(isinstance(event, Tick) for event in core.events) <= 3, "it must not spin"
    driver.close()


class HoldingKeeper:
    """Holds every request until something else happens."""

    def __init__(self, driver: CoreDriver) -> None:
        self._driver = driver
        self._held: list[Request] = []

    def arrived(self, request: Request) -> RequestArrived | None:
        self._held.append(request)
        return None

    def release(self) -> None:
        held, self._held = self._held, []
        for request in held:
            self._driver.pass_on(RequestArrived(request))

    def completed(self, completed: AnswerCompleted) -> None: ...


@pytest.mark.parametrize("later", [SlotsCancelled("c", [1]), RequestCancelled("r"), ClientGone("c"), DrainEnded()])
async def test_what_ends_a_request_does_not_overtake_it(later: Event) -> None:
    """The core ignores a cancellation of what it does not know: the request would then run for nobody."""
    core = ScriptedCore()
    driver = CoreDriver(core, Silent())
    driver.set_keeper(HoldingKeeper(driver))
    driver.dispatch(RequestArrived(Request("r", "c", "m", [1], "", [])))
    assert (core.events, driver.num_live_requests) == ([], 1)
    driver.dispatch(later)
    kinds = [type(event) for event in core.events if not isinstance(event, Tick)]
    assert kinds == [RequestArrived, type(later)]
    driver.close()
