"""One rollout, from the load of the new version to the end of one of the two versions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from kvloom_common.discovery.registry import POLL_SECONDS
from kvloom_common.models.likelihood_gap import GapSums
from tools.failures import CommandError
from tools.supervisor.rollout.announcement import Shares
from tools.supervisor.rollout.judge import Counts, Decision, Looks, RolloutVerdict, judge, too_unlikely
from tools.supervisor.rollout.measurements import RolloutMeasurements, Series, counts_of, gap_of
from tools.supervisor.rollout.plan import MAX_HOLDS, RolloutPlan
from tools.supervisor.rollout.state import RolloutState

LOOK_SECONDS: Final = 1.0
SETTLE_SECONDS: Final = POLL_SECONDS + 0.5
"""By then all edges and routers know the latest share, although a message may have been lost."""
BLIND_SECONDS: Final = 10.0
"""How long no router may answer."""

OnStep = Callable[[str], None]


class RolloutVersions(Protocol):
    """The two versions of the model on this machine. All methods raise CommandError."""

    async def load_new(self, on_step: OnStep) -> None: ...

    async def unload_old(self, on_step: OnStep) -> None: ...

    async def unload_new(self, on_step: OnStep) -> None: ...

    def lost_shards(self) -> str:
        """Why the new version has fewer shards than it began with; "" if it has all."""
        ...


class _RolledBackError(Exception):
    """The new version is to be taken back. The message says why."""


class Rollout:
    """Call `run` once."""

    def __init__(
        self,
        plan: RolloutPlan,
        state: RolloutState,
        versions: RolloutVersions,
        shares: Shares,
        metering: RolloutMeasurements,
        on_step: OnStep,
        *,
        look_seconds: float = LOOK_SECONDS,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        self.state = state
        self._plan = plan
        self._versions = versions
        self._shares = shares
        self._metering = metering
        self._on_step = on_step
        self._look_seconds = look_seconds
        self._settle_seconds = settle_seconds
        self._wanted_back = asyncio.Event()
        self._back_reason = ""

    def roll_back(self, reason: str) -> None:
        """Take the new version back as soon as possible."""
        if not self._wanted_back.is_set():
            self._back_reason = reason
            self._wanted_back.set()

    async def run(self) -> None:
        """`state` then has the outcome. When cancelled, the announcement ends at once, so that the old version has all
        requests of the fleet again; this machine's processes are about to stop."""
        state, holds_on = self.state, False
        try:
            try:
                await self._versions.load_new(self._on_step)
            except CommandError as error:
                state.phase, state.reason = "failed", error.message
                return
            try:
                await self._serve()
                state.phase = "finishing"
                await asyncio.sleep(self._settle_seconds)
                self._check_followed()
                await self._versions.unload_old(self._on_step)
                state.phase, holds_on = "done", True
            except (_RolledBackError, CommandError) as error:
                await self._take_back(error.message if isinstance(error, CommandError) else str(error))
        except asyncio.CancelledError:
            state.phase, state.reason = "rolled back", "the fabric stopped"
            raise
        finally:
            # The names stand for the new version once processes have noticed that the old one has gone.
            await self._shares.end(at_once=not holds_on)
            await self._metering.close()

    async def _take_back(self, reason: str) -> None:
        state = self.state
        state.phase, state.reason, state.share = "rolling back", reason, 0.0
        self._on_step(f"rolling back to {state.old}: {reason}")
        try:
            await self._shares.announce(0.0)
        except CommandError as error:
            self._on_step(error.message)  # then edges and routers forget the rollout by themselves
        await asyncio.sleep(self._settle_seconds)
        try:
            await self._versions.unload_new(self._on_step)
        except CommandError as error:
            self._on_step(f"{state.new} is still loaded: {error.message}")
        state.phase = "rolled back"

    async def _serve(self) -> None:
        """All steps. Raises _RolledBackError and CommandError."""
        state = self.state
        if not await self._metering.read():
            raise _RolledBackError("no router could be asked for its metrics")
        for number, share in enumerate(self._plan.steps, 1):
            if self._wanted_back.is_set():
                raise _RolledBackError(self._back_reason)
            await self._shares.announce(share / 100)
            state.phase, state.step, state.share = "serving", number, share
            self._on_step(
                f"step {number} of {len(self._plan.steps)}: {share:g}% of the sessions go to {state.new}, for at least "
                f"{self._plan.hold_seconds:g} s"
            )
            await self._hold()

    async def _hold(self) -> None:
        """One step. Raises _RolledBackError."""
        clock = asyncio.get_running_loop()
        began = read_at = clock.time()
        earlier: Mapping[Series, float] = dict(self._metering.increments.total)
        looks, verdict = Looks(), RolloutVerdict(Decision.WAIT)
        while True:
            await self._pause()
            now = clock.time()
            if await self._metering.read():
                read_at = now
            elif now - read_at > BLIND_SECONDS:
                raise _RolledBackError(f"no router has answered for {BLIND_SECONDS:g} s")
            self._check_followed()
            old, new = self._counts(earlier)
            is_over = now - began >= self._plan.hold_seconds
            gap = gap_of(self._metering.increments.total, self.state.old, self.state.new)
            if looks.take(new.num_requests, is_end=is_over):
                verdict = judge(old, new, self._plan.limits, looks.count, gap)
            elif reason := too_unlikely(gap, self._plan.limits):
                verdict = RolloutVerdict(Decision.ROLL_BACK, reason)
            if verdict.decision is Decision.ROLL_BACK:
                self._report(old, new, gap, verdict)
                raise _RolledBackError(verdict.reason)
            if is_over and verdict.decision is Decision.CONTINUE:
                self._report(old, new, gap, verdict)
                return
            if now - began >= MAX_HOLDS * self._plan.hold_seconds and is_over:
                self._report(old, new, gap, verdict)
                raise _RolledBackError(f"it had only {verdict.reason} in {now - began:.0f} s (--min-requests)")

    def _check_followed(self) -> None:
        """Raises _RolledBackError."""
        if self._shares.is_lost:
            raise _RolledBackError("the registry cannot be reached, so that no edge follows the rollout any more")

    async def _pause(self) -> None:
        """Raises _RolledBackError."""
        try:
            async with asyncio.timeout(min(self._look_seconds, max(self._plan.hold_seconds / 5, 0.05))):
                await self._wanted_back.wait()
        except TimeoutError:
            pass
        else:
            raise _RolledBackError(self._back_reason)
        if lost := self._versions.lost_shards():
            raise _RolledBackError(lost)

    def _counts(self, earlier: Mapping[Series, float]) -> tuple[Counts, Counts]:
        """Returns the counts of the old and the new version in this step. If the old one has hardly any requests left,
        what it has had since the rollout began is compared."""
        increments = self._metering.increments
        step = increments.since(earlier)
        old, new = counts_of(step, self.state.old), counts_of(step, self.state.new)
        if old.num_requests < max(self._plan.limits.min_requests, new.num_requests):
            old = counts_of(increments.total, self.state.old)
        return old, new

    def _report(self, old: Counts, new: Counts, gap: GapSums, verdict: RolloutVerdict) -> None:
        for name, counts in ((self.state.old, old), (self.state.new, new)):
            self._on_step(f"  {name}: {described(counts)}")
        if gap.num_answers:
            shown = f"{gap.gap_per_token:.3f} nats per token in {gap.num_answers:g} answers so far"
            self._on_step(f"  likelihood gap: {shown}")
        self._on_step(f"  verdict: {verdict.decision.value}")


def described(counts: Counts) -> str:
    """For people."""
    text = f"{counts.num_requests} requests, {counts.error_rate:.1%} errors"
    median, late = counts.ttft_quantile(0.5), counts.ttft_quantile(0.9)
    if median is None or late is None:
        return text
    return f"{text}, first token after {median * 1000:.0f} ms (median) and {late * 1000:.0f} ms (90%)"
