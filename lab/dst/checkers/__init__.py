"""The invariants of the router core. Each checker watches one of them from outside.

attempts.py    what may be dispatched to shards, and frames of attempts that are no longer current
classes.py     declared classes: none starves, floors hold, no answer ends because it has to wait
delivery.py    what clients read: tokens, text and frames, also from the result cache
ends.py        how requests end, and their deadlines
fairness.py    who may be preempted, and guaranteed shares of cached blocks
handoffs.py    prompts that one shard computes for the answer of another
health.py      hung and draining shards, and the bounds of suspicion
limits.py      budgets, rates, leases, charges and claims, in seeds with limits
models.py      shards of several models, and models that are loaded and unloaded
brownout.py    degraded requests
overload.py    rejections, service tiers, and patience with outages
queueing.py    queued requests: no needless waiting, no starvation, a bounded queue
registry.py    which processes are used as shards, and fleet reports
rollouts.py    which version requests get while a new one is rolled out, and that nobody suffers
quiescence.py  the core's own check, and what routers hold when nothing is in flight
safety.py      unsafe text is not delivered
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from lab.dst.checker import HOOK_NAMES, Checker, Hooks
from lab.dst.checkers.attempts import (
    AttemptsContinue,
    Fence,
    MovesCounted,
    PlacementsFit,
    PrefillChunksFit,
    SlotsExclusive,
    VariantsKept,
)
from lab.dst.checkers.brownout import BrownoutAtAdmission
from lab.dst.checkers.classes import ClassesAge, FloorsKept, SchedulingEndsNothing
from lab.dst.checkers.delivery import AnswersComplete, CachedAnswersOwn, FramesWellFormed, TextIntact, TokensExact
from lab.dst.checkers.ends import DeadlinesKept, EndsJustified, EndsOnce, MeteredIsDelivered
from lab.dst.checkers.fairness import KvSharesKept, PreemptionsJustified, ReserveKept
from lab.dst.checkers.handoffs import HandoffsCollected, HandoffsKept, LegsFit
from lab.dst.checkers.health import DrainedShardsEmpty, HungShardsAbandoned, SuspicionBounded
from lab.dst.checkers.limits import (
    BudgetsKept,
    ChargesExact,
    ClaimsMoveNoLimit,
    ComputedIsMetered,
    LeasesConserved,
    RatesKept,
)
from lab.dst.checkers.models import ModelsKeptApart, UnloadsHarmless, WithdrawalsKept
from lab.dst.checkers.overload import (
    DrainsEnd,
    NoRefusalBesideIdle,
    OutagePatience,
    RejectionsJustified,
    TiersKept,
)
from lab.dst.checkers.queueing import NoIdleWait, NoStarvation, NoWaitBesideIdle, QueueBound
from lab.dst.checkers.quiescence import IndexExact, Integrity, LoadExact
from lab.dst.checkers.registry import FleetReported, RecordsFollowed, ShardsFound
from lab.dst.checkers.rollouts import (
    RolloutsEnd,
    RolloutsHarmless,
    SessionsMoveOnce,
    SharesConverge,
    VersionsKept,
)
from lab.dst.checkers.safety import SafetyKept, VerdictsAwaited

CHECKERS: Final[tuple[type[Checker], ...]] = (
    EndsOnce,
    TokensExact,
    TextIntact,
    FramesWellFormed,
    AnswersComplete,
    MeteredIsDelivered,
    EndsJustified,
    Integrity,
    Fence,
    SlotsExclusive,
    AttemptsContinue,
    MovesCounted,
    PlacementsFit,
    VariantsKept,
    PrefillChunksFit,
    LegsFit,
    HandoffsKept,
    HandoffsCollected,
    NoIdleWait,
    NoWaitBesideIdle,
    NoStarvation,
    PreemptionsJustified,
    ReserveKept,
    ClassesAge,
    FloorsKept,
    SchedulingEndsNothing,
    QueueBound,
    DeadlinesKept,
    SafetyKept,
    VerdictsAwaited,
    FleetReported,
    ModelsKeptApart,
    WithdrawalsKept,
    UnloadsHarmless,
    VersionsKept,
    SessionsMoveOnce,
    SharesConverge,
    RolloutsHarmless,
    RolloutsEnd,
    ShardsFound,
    RecordsFollowed,
    HungShardsAbandoned,
    SuspicionBounded,
    DrainedShardsEmpty,
    DrainsEnd,
    RejectionsJustified,
    NoRefusalBesideIdle,
    BrownoutAtAdmission,
    TiersKept,
    OutagePatience,
    CachedAnswersOwn,
    KvSharesKept,
    IndexExact,
    LoadExact,
)

LIMIT_CHECKERS: Final[tuple[type[Checker], ...]] = (
    EndsOnce,
    TokensExact,
    TextIntact,
    FramesWellFormed,
    MeteredIsDelivered,
    Integrity,
    Fence,
    SlotsExclusive,
    LegsFit,
    HandoffsKept,
    HandoffsCollected,
    SafetyKept,
    VerdictsAwaited,
    BudgetsKept,
    RatesKept,
    LeasesConserved,
    ChargesExact,
    ClaimsMoveNoLimit,
    ComputedIsMetered,
)
"""The checkers of seeds with limits. The others expect that a request is queued or placed as soon as it has arrived."""


class Checks(Hooks):
    """Forwards every hook to the checkers of one world that override it, in the order of the checkers."""

    def __init__(self, checkers: Iterable[type[Checker]] = CHECKERS) -> None:
        instances = [checker() for checker in checkers]
        for name in HOOK_NAMES:
            overrides = [checker for checker in instances if getattr(type(checker), name) is not getattr(Hooks, name)]
            setattr(self, name, _fan_out([getattr(checker, name) for checker in overrides]))


def _fan_out(hooks: list[Callable[..., None]]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        for hook in hooks:
            hook(*args)

    return call
