"""Rollouts of new versions: which version requests get, and that nobody suffers from the change."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

import math
from typing import Final

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.discovery.records import RolloutRecord
from kvloom_common.discovery.registry import TTL_SECONDS
from lab.dst.checker import Checker
from lab.dst.told import Told
from lab.dst.views import AnswerView, EdgeView, ShardStreamView, ShardView, WorldView
from router.core.actions import SubmitAttempt
from router.core.events import ChoiceSpec
from tools.supervisor.rollout.judge import rate_at_least, rate_at_most
from tools.supervisor.rollout.rollout import SETTLE_SECONDS

FORGET_SECONDS: Final = TTL_SECONDS + SETTLE_SECONDS
"""After so long without an announcement every edge has forgotten the rollout, also one that cannot reach the
registry."""
MAX_LAPSE_SECONDS: Final = 1.0
"""A rollout that nobody has announced for so much longer than its record lives does not come back: sessions would go
back and forth."""
NUM_KEYS: Final = 1000
NUM_ASKED: Final = 50
_SURE: Final = 1e-9
_SHARD_AWAY: Final = (
    ErrorReason.ERROR_REASON_MODEL_NOT_FOUND,
    ErrorReason.ERROR_REASON_NO_SHARD_READY,
    ErrorReason.ERROR_REASON_SHARD_LOST,
    ErrorReason.ERROR_REASON_DRAINING,
)


class VersionsKept(Checker):
    """An answer, wherever it is continued, runs only on the version that its request was told, or where a request is
    repeated for the result cache, on one that either was told."""

    invariant = "versions_kept"

    def __init__(self) -> None:
        self._told: dict[str, set[str]] = {}
        """By the script key of the answer."""

    def on_version_told(self, edge: EdgeView, told: Told) -> None:
        self._told.setdefault(told.script_key, set()).add(told.models[0])

    def on_submit(self, shard: ShardView, stream: ShardStreamView, attempt: SubmitAttempt, spec: ChoiceSpec) -> None:
        told = self._told.get(getattr(attempt.request.sampling, "script_key", ""))
        if told is not None and shard.shape.model not in told:
            self.fail(f"{attempt.request.request_id} was told {sorted(told)}, and runs on {shard.shape.model}")


class SessionsMoveOnce(Checker):
    """A session that has been given to the new version stays there at every edge that knows the same share or a larger
    one. A rollout that all have forgotten does not come back."""

    invariant = "sessions_move_once"

    def __init__(self) -> None:
        self._moved: dict[tuple[str, str], float] = {}
        """By rollout and session: the smallest share at which it was given to the new version."""
        self._asked: set[tuple[str, str, float]] = set()

    def on_version_told(self, edge: EdgeView, told: Told) -> None:
        rollout = told.rollout
        if rollout is None or not told.is_chosen:
            return
        if (edge.name, rollout.incarnation_id, rollout.share) not in self._asked:
            self._asked.add((edge.name, rollout.incarnation_id, rollout.share))
            for session in self._known_sessions(rollout):
                self._check(edge, rollout, session, edge.versions_of(rollout.name, session)[0])
        self._check(edge, rollout, told.session, told.models[0])

    def _known_sessions(self, rollout: RolloutRecord) -> list[str]:
        """Those that have been given to the new version, and some that are only asked for."""
        moved = [session for incarnation_id, session in self._moved if incarnation_id == rollout.incarnation_id]
        return list(dict.fromkeys([*moved, *(f"a session {number}" for number in range(NUM_ASKED))]))

    def _check(self, edge: EdgeView, rollout: RolloutRecord, session: str, model: str) -> None:
        key = (rollout.incarnation_id, session)
        moved_at = self._moved.get(key, math.inf)
        if model == rollout.new:
            self._moved[key] = min(moved_at, rollout.share)
        elif rollout.share >= moved_at:
            self.fail(
                f"{edge.name} gives {session} to {model} at a share of {rollout.share:g}; it had {rollout.new} at "
                f"{moved_at:g}"
            )

    def on_announced(self, record: RolloutRecord, now: float, lapsed_seconds: float) -> None:
        if record.share and lapsed_seconds > MAX_LAPSE_SECONDS:
            self.fail(f"{record.new} is back at a share of {record.share:g}, {lapsed_seconds:.1f} s after it expired")


class SharesConverge(Checker):
    """Every edge that can reach the registry soon knows the latest share, and as many sessions as it says get the new
    version: of a thousand that are asked for, and of those that come."""

    invariant = "shares_converge"

    def __init__(self) -> None:
        self._latest: dict[str, RolloutRecord] = {}
        """By the name of the model."""
        self._set_at: dict[str, float] = {}
        self._announced_at: dict[str, float] = {}
        self._asked: set[tuple[str, str, float]] = set()
        self._seen: dict[tuple[str, float], dict[str, bool]] = {}
        """By rollout and share: the sessions that came, and whether they got the new version."""

    def on_announced(self, record: RolloutRecord, now: float, lapsed_seconds: float) -> None:
        if self._latest.get(record.name) != record or lapsed_seconds:
            self._set_at[record.name] = now
        self._latest[record.name] = record
        self._announced_at[record.name] = now

    def on_rollout_ended(self, name: str, standing: str, now: float) -> None:
        self._latest.pop(name, None)

    def on_version_told(self, edge: EdgeView, told: Told) -> None:
        self._check_known(edge, told.name)
        rollout = told.rollout
        if rollout is None or not told.is_chosen:
            return
        if (edge.name, rollout.name, rollout.share) not in self._asked:
            self._asked.add((edge.name, rollout.name, rollout.share))
            self._ask(edge, rollout)
        seen = self._seen.setdefault((rollout.incarnation_id, rollout.share), {})
        seen[told.session] = told.models[0] == rollout.new

    def _check_known(self, edge: EdgeView, name: str) -> None:
        latest, since = self._latest.get(name), edge.connected_since
        if latest is None or since is None or edge.now - self._announced_at[name] > TTL_SECONDS:
            return
        if edge.now - max(since, self._set_at[name]) > SETTLE_SECONDS and edge.rollouts.get(name) != latest:
            self.fail(f"{edge.name} knows {edge.rollouts.get(name)}, not {latest}")

    def _ask(self, edge: EdgeView, rollout: RolloutRecord) -> None:
        keys = (f"a key {number}" for number in range(NUM_KEYS))
        count = sum(edge.versions_of(rollout.name, key)[0] == rollout.new for key in keys)
        deviation = math.sqrt(NUM_KEYS * rollout.share * (1 - rollout.share))
        if abs(count - NUM_KEYS * rollout.share) > 4 * deviation:
            self.fail(f"{edge.name} gives {count} of {NUM_KEYS} sessions to {rollout.new} at {rollout.share:g}")

    def on_quiescence(self, world: WorldView) -> None:
        for (_, share), seen in self._seen.items():
            count, total = sum(seen.values()), len(seen)
            if not rate_at_least(count, total, _SURE) <= share <= rate_at_most(count, total, _SURE):
                self.fail(f"{count} of {total} sessions got the new version at a share of {share:g}")


class RolloutsHarmless(Checker):
    """No shard of a version is stopped while answers run there. While nothing happens to shards and routers, no request
    for a model of which there is or was a rollout is refused or broken off for want of a shard."""

    invariant = "rollouts_harmless"

    def __init__(self) -> None:
        self._names: set[str] = set()

    def on_announced(self, record: RolloutRecord, now: float, lapsed_seconds: float) -> None:
        self._names.add(record.name)

    def on_shard_stopped(self, shard: ShardView) -> None:
        if shard.engine.sequences:
            self.fail(f"{shard.shard_id} of {shard.shape.model} stops with {len(shard.engine.sequences)} sequences")

    def on_told_failed(self, edge: EdgeView, told: Told, answer: AnswerView, error: KvloomError) -> None:
        if edge.is_harmless and told.name in self._names and not told.is_continued and error.reason in _SHARD_AWAY:
            self.fail(
                f"{answer.request.request_id} for {told.name}, which was told {told.models[0]}, ended with "
                f"{ErrorReason.Name(error.reason)}"
            )


class RolloutsEnd(Checker):
    """A rollout that has ended, well or not, is not announced any more. Soon all requests for the model get the version
    that stays, and nothing is left of the other one."""

    invariant = "rollouts_end"

    def __init__(self) -> None:
        self._ended: dict[str, tuple[str, float]] = {}
        """By the name of a model: the version that stands for it, and since when."""
        self._latest: dict[str, str] = {}
        """By name: the rollout that was announced last."""
        self._over: set[str] = set()

    def on_announced(self, record: RolloutRecord, now: float, lapsed_seconds: float) -> None:
        if record.incarnation_id in self._over:
            self.fail(f"{record.new} is announced although its rollout has ended")
        self._latest[record.name] = record.incarnation_id
        self._ended.pop(record.name, None)

    def on_rollout_ended(self, name: str, standing: str, now: float) -> None:
        self._over.add(self._latest.pop(name, ""))
        self._ended[name] = (standing, now)

    def on_version_told(self, edge: EdgeView, told: Told) -> None:
        standing, since = self._ended.get(told.name, ("", math.inf))
        if edge.now - since > FORGET_SECONDS and told.is_chosen:
            self._check(edge, told.name, standing, {told.models[0]})

    def on_quiescence(self, world: WorldView) -> None:
        for name, (standing, _) in self._ended.items():
            loaded = {shard.shape.model for shard in world.shards if shard.shape.model.partition("@")[0] == name}
            if loaded != {standing}:
                self.fail(f"{name} is {standing}, but {sorted(loaded)} are loaded")
            for edge in world.rollouts.edges if world.rollouts is not None else ():
                self._check(
                    edge, name, standing, {edge.versions_of(name, f"a key {number}")[0] for number in range(20)}
                )

    def _check(self, edge: EdgeView, name: str, standing: str, told: set[str]) -> None:
        """Routers still report an unloaded version if they have not heard that its shards were withdrawn. Then the name
        may stand for it."""
        if name in edge.rollouts:
            self.fail(f"{edge.name} still knows {edge.rollouts[name]}, although {standing} has stayed")
        others = told - {standing}
        if edge.knows(standing) and any(edge.is_harmless or not edge.knows(model) for model in others):
            self.fail(f"{edge.name} tells {sorted(told)} for {name}, which is {standing}")
