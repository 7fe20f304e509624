"""UsageRecord is what is known of a request once it has ended: the unit of metering.

A router writes one record for each request that ends there, numbered without a gap. A request that continues at another
router has a record of each, and each says how far the whole answer had come. The router where it continued begins
behind the tokens that had been delivered, so its record counts for all of them (see `counting`): it also covers what a
router lost when it died, and it leaves out what was lost in transit.

Which records are of one answer: those with the same `request_id` and `answer_id`. Edges draw ids that are unique. Other
clients choose theirs, and could use one for any number of requests; so routers draw an answer id for each of these, and
what it computes counts by itself. Two of them have the same id only if a ticket proves that they are the same answer
(router/continuation_tickets.py). Where it was continued only its client says, so each run that computed a part again
counts by itself (`counting`).

A record of an answer that reached nobody names its tenant after its tier (UNBILLED_TIERS): it is on no bill.

Finds which runs of one answer continue each other, where a client outside the fabric says where each begins. Pure.

A run is what one router has computed of the answer: from the token behind which it began to its last one. An honest
client begins the next run where the one before had ended. A client that begins one earlier has had a part computed
twice, so that run counts as an answer of its own, from its first token on. But what a router computed that was killed
may be computed again once: it has died with the router, as far as the client knows, and no client can kill one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

MAX_LOST_TOKENS: Final = 16
"""So many tokens of one answer may be computed again without being counted again: they were on their way when a
connection broke. Without this, honest clients would be charged for what they never got."""


class AnswerRun(NamedTuple):
    """Positions are numbers of tokens, those of all choices together."""

    begin: int
    end: int
    name: tuple[str, int]
    """Unique."""
    is_lost: bool = False
    """Its router was killed meanwhile."""


def last_runs(runs: Iterable[AnswerRun]) -> list[AnswerRun]:
    """The runs that count, each for the whole chain that it ends: the one that came furthest. Any order gives the same.
    They count at least what all runs together have computed, but for MAX_LOST_TOKENS and for lost runs."""
    lasts: list[AnswerRun] = []
    num_left = MAX_LOST_TOKENS
    for run in sorted(runs):
        before = max((last for last in lasts if last.end <= run.begin), key=_end, default=None)
        if before is None and run.begin > 0 and lasts:
            nearest = min(lasts, key=_end)
            num_lost = min(nearest.end, run.end) - run.begin
            if num_lost <= num_left:
                before, num_left = nearest, num_left - num_lost
            else:
                before = min((last for last in lasts if last.is_lost), key=_end, default=None)
        if before is None:
            lasts.append(run)
        elif run.end >= before.end:
            lasts[lasts.index(before)] = run
        else:  # what was lost is computed again once, also where the second run did not come as far
            lasts[lasts.index(before)] = before._replace(is_lost=False)
    return lasts


def _end(run: AnswerRun) -> int:
    return run.end


TIER_SHADOW: Final = "shadow"
"""A request of shadow traffic: a router's own."""
TIER_JUDGE: Final = "judge"
"""A question to a model that judges a text: a router's own, too."""
TIER_DISCARDED: Final = "discarded"
"""A cascade has discarded the answer."""
OWN_TIERS: Final = (TIER_SHADOW, TIER_JUDGE)
"""Those of the routers' own requests."""
UNBILLED_TIERS: Final = frozenset({*OWN_TIERS, TIER_DISCARDED})

OUTCOME_EVICTED: Final = "evicted"
"""The outcome in the record of a request that was admitted and never sent to a shard."""
OUTCOME_LOST: Final = "lost"
"""The outcome in the record of a request that ran when its router was killed."""


OUTCOME_VOID: Final = "void"
"""A number whose record is lost: it was only in the memory of a router that was killed while its disk was full."""


class Charge(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of an account's hard budget that a request has used."""

    account: str
    unit: int
    """A BudgetUnit of control_service.proto."""
    period: str
    own: int
    """The amount that the router has taken from its lease for it."""
    total: int
    """The amount for the whole answer, with what earlier routers have taken."""


class UsageRecord(msgspec.Struct, frozen=True, omit_defaults=True, array_like=False, gc=False):
    """Times are seconds since 1970, durations are seconds, costs are billionths of the currency."""

    producer: str
    """The router and its incarnation: "ROUTER/INCARNATION"."""
    number: int
    """From 1 on, without a gap, for each producer."""
    request_id: str
    """The id inside the fabric, which an answer keeps when it continues at another router."""
    tenant: str
    ended_at: float
    model: str
    adapter: str = ""
    key_id: str = ""
    tier: str = "interactive"
    outcome: str = "stop"
    """How it ended: a finish reason in lower case, OUTCOME_EVICTED or OUTCOME_LOST."""
    error_reason: str = ""
    """The name of an ErrorReason, without its prefix."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    """Delivered output tokens of the whole answer, with those that earlier routers have delivered."""
    num_reasoning_tokens: int = 0
    """A part of these."""
    num_attempts: int = 0
    block_seconds: float = 0.0
    """KV blocks times the seconds for which they were held, as the router's reservations say."""
    ttft_seconds: float = 0.0
    """0: there was no token."""
    duration_seconds: float = 0.0
    """Since it arrived at this router."""
    is_result_cache_hit: bool = False
    price_id: str = ""
    cost_nanos: int = 0
    client_request_id: str = ""
    answer_id: str = ""
    num_resumed_tokens: int = 0
    """The part of `num_output_tokens` that earlier routers have delivered."""
    corrects: int = 0
    """The number of an earlier record of the same producer, which this one replaces: some of its tokens were lost in
    transit (docs/adr/0011). 0: none."""
    charges: tuple[Charge, ...] = ()
    """The amounts of hard budgets that the request has used."""
    num_preemptions: int = 0
    """The number of times that one of its sequences left its shard so that another tenant was served."""
    num_migrations: int = 0
    """It was taken off a shard that was suspected, drained or handed over its work."""
    num_failovers: int = 0
    """Its shard had failed."""
    priority_class: str = ""
    """The class with which it was served (docs/concepts/scheduling.md); "" in records of routers that did not say
    it."""

    @property
    def answer(self) -> tuple[str, str]:
        """The same for all records of one answer."""
        return self.request_id, self.answer_id

    @property
    def served_class(self) -> str:
        """Without declared classes, and in records that do not say it, it is that of the tier."""
        return self.priority_class or self.tier

    @property
    def is_billed(self) -> bool:
        return self.tier not in UNBILLED_TIERS

    @property
    def began_at(self) -> float:
        """When it arrived at this router."""
        return self.ended_at - self.duration_seconds

    @property
    def priced_model(self) -> str:
        return f"{self.model}:{self.adapter}" if self.adapter else self.model


def counting(records: Iterable[UsageRecord]) -> list[UsageRecord]:
    """The records that count, of all records with the same `answer`; any order gives the same. Usually one: that of the
    router which had the answer last, since it began behind what had been delivered."""
    found = list(records)
    corrected = {(record.producer, record.corrects) for record in found if record.corrects}
    found = [record for record in found if (record.producer, record.number) not in corrected]
    if len(found) < 2 or not found[0].answer_id:
        return [max(found, key=_order)] if found else []
    computed = [record for record in found if record.num_attempts or record.is_result_cache_hit]
    if computed and not any(record.outcome == OUTCOME_LOST for record in computed):
        # A continuation for which nothing was computed, since no budget was left, knows no better than the router that
        # it continues, unless that was killed: otherwise what its client claims would be charged beyond the budget.
        found = computed
    by_name = {(record.producer, record.number): record for record in found}
    runs = (
        AnswerRun(one.num_resumed_tokens, one.num_output_tokens, name, one.outcome == OUTCOME_LOST)
        for name, one in by_name.items()
    )
    return [by_name[run.name] for run in last_runs(runs)]


def _order(record: UsageRecord) -> tuple[int, float, str, int]:
    return record.num_resumed_tokens, record.began_at, record.producer, record.number
