"""Finds which runs of one answer continue each other, where a client outside the fabric says where each begins. Pure.

A run is what one router has computed of the answer: from the token behind which it began to its last one. An honest
client begins the next run where the one before had ended. A client that begins one earlier has had a part computed
twice, so that run counts as an answer of its own, from its first token on. But what a router computed that was killed
may be computed again once: it has died with the router, as far as the client knows, and no client can kill one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

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
