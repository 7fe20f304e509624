"""The course of a rollout, with models and routers that do as they are told."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import pytest

from kvloom_common.models import likelihood_gap
from tools.failures import CommandError
from tools.supervisor.rollout.judge import RolloutLimits
from tools.supervisor.rollout.measurements import REQUESTS, Increments
from tools.supervisor.rollout.plan import RolloutPlan, shard_settings
from tools.supervisor.rollout.rollout import Rollout
from tools.supervisor.rollout.rollouts import Rollouts, RunningRollout
from tools.supervisor.rollout.state import RolloutState


@dataclasses.dataclass
class FakeWorld:
    """Versions, shares and metering in one. Each reading brings requests by the present share."""

    error_type: str = ""
    """Of all requests of the new version."""
    gap: float | None = None
    """Of each answer of ten tokens that the new version scores, in nats per token; None: it scores none."""
    num_requests: int = 100
    load_error: str = ""
    lost: str = ""
    is_lost: bool = False
    log: list[str] = dataclasses.field(default_factory=list)
    increments: Increments = dataclasses.field(default_factory=Increments)
    share: float = 0.0
    answers: bool = True
    announced: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    async def load_new(self, on_step: Callable[[str], None]) -> None:
        self.log.append("load")
        if self.load_error:
            raise CommandError(self.load_error)

    async def unload_old(self, on_step: Callable[[str], None]) -> None:
        self.log.append("unload old")

    async def unload_new(self, on_step: Callable[[str], None]) -> None:
        self.log.append("unload new")

    def lost_shards(self) -> str:
        return self.lost

    async def announce(self, share: float) -> None:
        self.log.append(f"{share:g}")
        self.share = share
        self.announced.set()

    async def end(self, *, at_once: bool) -> None:
        self.log.append(f"end {at_once=}")

    async def read(self) -> bool:
        for model, share, error_type in (("m", 1 - self.share, ""), ("m@2", self.share, self.error_type)):
            labels = (("error_type", error_type), ("model", model), ("outcome", "error" if error_type else "stop"))
            series = f"{REQUESTS}_total", labels
            self.increments.total[series] = self.increments.total.get(series, 0.0) + round(self.num_requests * share)
        if self.gap is not None:
            self._score(self.gap)
        return self.answers

    def _score(self, gap: float) -> None:
        """What a router counts for an answer of ten tokens, each of one nat under the old version."""
        values = {
            (likelihood_gap.ANSWERS, ""): 1.0,
            (likelihood_gap.TOKENS, ""): 10.0,
            (likelihood_gap.SURPRISAL, "model"): 10.0,
            (likelihood_gap.SURPRISAL, "candidate"): 10 * (1 + gap),
            (likelihood_gap.SQUARED_TOKENS, ""): 100.0,
            (likelihood_gap.SURPRISAL_TOKENS, "model"): 100.0,
            (likelihood_gap.SURPRISAL_TOKENS, "candidate"): 100 * (1 + gap),
            (likelihood_gap.SQUARED_GAP, ""): (10 * gap) ** 2,
        }
        for (name, under), value in values.items():
            labels = {"candidate": "m@2", "model": "m"} | ({"under": under} if under else {})
            series = f"{name}_total", tuple(sorted(labels.items()))
            self.increments.total[series] = self.increments.total.get(series, 0.0) + value

    async def close(self) -> None:
        pass


PLAN = RolloutPlan("m@2", steps=(10, 100), hold_seconds=0.05)
SCORED = dataclasses.replace(PLAN, hold_seconds=0.3, limits=RolloutLimits(max_likelihood_gap=0.1))


async def roll_out(world: FakeWorld, plan: RolloutPlan = PLAN, back: str = "") -> RolloutState:
    state = RolloutState("m", "m@2", num_steps=len(plan.steps))
    rollout = Rollout(plan, state, world, world, world, lambda _: None, look_seconds=0.01, settle_seconds=0.0)
    if back:
        rollout.roll_back(back)
    await asyncio.wait_for(rollout.run(), 10)
    return state


async def test_a_good_version_gets_everything_and_the_old_one_is_unloaded_last() -> None:
    """The names stand for the new version only when all edges have noticed that the old one is gone: until then the
    shares hold."""
    world = FakeWorld()
    state = await roll_out(world)
    assert (state.phase, state.step) == ("done", 2)
    assert world.log == ["load", "0.1", "1", "unload old", "end at_once=False"]


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (FakeWorld(error_type="engine_failed"), "error rate is 100.0%"),
        (FakeWorld(lost="shard-0 has crashed"), "shard-0 has crashed"),
        (FakeWorld(is_lost=True), "registry cannot be reached"),
        (FakeWorld(num_requests=0), "had only 0 of at least 20 requests"),
        (FakeWorld(answers=False), "no router could be asked"),
    ],
    ids=["errors", "crash", "registry", "idle", "routers"],
)
async def test_a_version_that_cannot_stay_is_taken_back(world: FakeWorld, reason: str) -> None:
    """All sessions return to the old version before the new one is unloaded, whatever the reason is."""
    state = await roll_out(world)
    assert (state.phase, state.share) == ("rolled back", 0.0)
    assert reason in state.reason
    assert world.log[-3:] == ["0", "unload new", "end at_once=True"]
    assert "unload old" not in world.log


async def test_a_rollout_that_is_forgotten_before_the_old_version_goes_is_taken_back() -> None:
    """Edges have gone back to the old version, which must not be unloaded under them."""
    world, state = FakeWorld(), RolloutState("m", "m@2")

    def on_step(text: str) -> None:
        world.is_lost |= world.share == 1.0 and "verdict: continue" in text

    rollout = Rollout(PLAN, state, world, world, world, on_step, look_seconds=0.01, settle_seconds=0.0)
    await asyncio.wait_for(rollout.run(), 10)
    assert (state.phase, "registry cannot be reached" in state.reason) == ("rolled back", True)
    assert "unload old" not in world.log


async def test_a_version_that_would_answer_otherwise_is_taken_back() -> None:
    """It fails nothing and is as fast: only what it thinks of the old version's answers gives it away."""
    state = await roll_out(FakeWorld(gap=0.5), SCORED)
    assert state.phase == "rolled back"
    assert "less likely by 0.5 nats per token" in state.reason
    assert (await roll_out(FakeWorld(gap=0.05), SCORED)).phase == "done"


async def test_an_operator_may_take_it_back_while_it_is_loaded() -> None:
    """Not one session should see it then."""
    world = FakeWorld()
    assert (await roll_out(world, back="please")).reason == "please"
    assert world.log == ["load", "0", "unload new", "end at_once=True"]


async def test_a_load_that_fails_changes_nothing() -> None:
    """The old version serves on, and the reason is said."""
    world = FakeWorld(load_error="no such file")
    state = await roll_out(world)
    assert (state.phase, state.reason) == ("failed", "no such file")
    assert world.log == ["load", "end at_once=True"]


async def test_a_quiet_fabric_may_go_on_without_requests() -> None:
    """With --min-requests 0 the operator has said so."""
    plan = dataclasses.replace(PLAN, limits=RolloutLimits(min_requests=0))
    assert (await roll_out(FakeWorld(num_requests=0), plan)).phase == "done"


async def test_one_rollout_a_model_which_any_number_of_commands_follow() -> None:
    """A second one would set other shares. The steps are told from the beginning to whoever comes later."""
    rollouts, world, ended = Rollouts(), FakeWorld(), []
    state = RolloutState("m", "m@2")
    plan = dataclasses.replace(PLAN, hold_seconds=600.0)
    make = lambda on_step: Rollout(plan, state, world, world, world, on_step, settle_seconds=0.0)  # noqa: E731
    rollouts.start("m", lambda: RunningRollout(make, ended.append))
    for name in ("m", "m@2"):
        with pytest.raises(CommandError, match="is being rolled out in place of m"):
            rollouts.check_free(name)
    rollouts.check_free("other")
    lines: list[list[str]] = [[], []]
    following = [asyncio.create_task(rollouts.find("m").follow(found.append)) for found in lines]
    rollouts.roll_back("m@2", "enough")
    for task in following:
        with pytest.raises(CommandError, match="m@2 was rolled back: enough"):
            await asyncio.wait_for(task, 10)
    assert lines[0] == lines[1] != []
    assert ended == [state]
    with pytest.raises(CommandError, match="ended already"):
        rollouts.roll_back("m", "again")
    rollouts.check_free("m")
    await rollouts.close()


async def test_the_stop_of_the_fabric_ends_the_share_at_once() -> None:
    """Edges of other machines must not wait for a version that is about to disappear."""
    rollouts, world, ended = Rollouts(), FakeWorld(), []
    state = RolloutState("m", "m@2")
    plan = dataclasses.replace(PLAN, hold_seconds=600.0)
    make = lambda on_step: Rollout(plan, state, world, world, world, on_step)  # noqa: E731
    rollouts.start("m", lambda: RunningRollout(make, ended.append))
    await asyncio.wait_for(world.announced.wait(), 10)
    await rollouts.close()
    assert world.log[-1] == "end at_once=True"
    assert ended[0].reason == "the fabric stopped"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "m"}, "NAME@VERSION"),
        ({"version": "@2"}, "NAME@VERSION"),
        ({"steps": (10, 5, 100)}, "growing percentages"),
        ({"steps": (10, 50)}, "the last of which is 100"),
        ({"steps": ()}, "growing percentages"),
        ({"steps": (0, 100)}, "above 0"),
        ({"hold_seconds": float("nan")}, "hold: from 0"),
        ({"num_shards": 0}, "num_shards"),
        ({"limits": RolloutLimits(max_error_rate_increase=2)}, "max_error_rate_increase"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_by_the_name_of_its_field(
    changes: dict[str, object], message: str
) -> None:
    """Nothing may be loaded for a typing mistake."""
    with pytest.raises(CommandError, match=message):
        dataclasses.replace(PLAN, **changes).checked()


def test_settings_are_nested_and_typed() -> None:
    """`--set` says what a table in the configuration would say."""
    assert shard_settings(["sim.step_ms=5", "engine=sim", "sim.stamp_tokens=true"]) == {
        "sim": {"step_ms": 5, "stamp_tokens": True},
        "engine": "sim",
    }
    with pytest.raises(CommandError, match="KEY=VALUE"):
        shard_settings(["sim"])
