"""The tables of a campaign."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lab.pages import markdown_table
from lab.redteam.campaign import NUM_AT_ONCE, CaseResult
from lab.redteam.latency import LayerLatency, quantiles

Key = Callable[[CaseResult], str]


class RedTeamReport:
    """The findings of a campaign."""

    def __init__(self, results: Sequence[CaseResult], latency: Mapping[str, LayerLatency]) -> None:
        self.claimed = [result for result in results if result.case.is_claimed]
        self.gaps = [result for result in results if result.case.layer and not result.case.is_claimed]
        self.harmless = [result for result in results if result.case.layer is None]
        self.failures = [result for result in results if not result.is_as_wanted]
        self.num_leaked_chars = sum(result.num_leaked_chars for result in self.claimed)
        self.num_passed = sum(result.fate not in ("refused", "cut") for result in self.claimed)
        self.num_false_positives = sum(not result.is_as_wanted for result in self.harmless)
        self.latency = latency

    @property
    def summary(self) -> str:
        """One paragraph."""
        share = self.num_false_positives / max(1, len(self.harmless))
        return (
            f"{len(self.claimed):,} attacks that rules claim to find: {self.num_passed} passed, "
            f"{self.num_leaked_chars} characters leaked. {len(self.harmless):,} harmless look-alikes: "
            f"{self.num_false_positives} refused, cut or changed ({share:.2%}). "
            f"{len(self.gaps):,} attacks in known gaps."
        )

    @property
    def attacks(self) -> str:
        """The claimed attacks by mutator."""
        heads = ("written", "attacks", "prompts refused", "answers cut", "passed", "characters leaked")
        rows = [
            [name, _num(rows), _fates(rows, "refused"), _fates(rows, "cut"), _others(rows), _leaked(rows)]
            for name, rows in _by(self.claimed, lambda result: result.case.kind).items()
        ]
        return markdown_table(heads, rows)

    @property
    def places(self) -> str:
        """The claimed attacks and the harmless texts by API and place."""
        heads = ("API", "place", "attacks", "refused or cut", "characters leaked", "harmless", "of these not passed")
        attacks = _by(self.claimed, _place)
        harmless = _by(self.harmless, _place)
        rows: list[list[str]] = []
        for name in sorted(attacks | harmless):
            own, others = attacks.get(name, []), harmless.get(name, [])
            stopped = sum(result.fate in ("refused", "cut") for result in own)
            wrong = sum(not result.is_as_wanted for result in others)
            rows.append([*name.split(" | "), _num(own), str(stopped), _leaked(own), _num(others), str(wrong)])
        return markdown_table(heads, rows)

    @property
    def known_gaps(self) -> str:
        """The other attacks, by mutator and rule."""
        heads = ("written", "rules", "attacks", "refused or cut", "passed")
        rows: list[list[str]] = []
        for name, own in _by(self.gaps, _gap).items():
            layers = ", ".join(sorted({str(result.case.layer) for result in own}))
            rows.append([name, layers, _num(own), str(len(own) - int(_others(own))), _others(own)])
        return markdown_table(heads, rows)

    @property
    def times(self) -> str:
        """The latency of each layer, and of whole requests."""
        heads = ("layer", "prompt, p50 µs", "p99 µs", "character of an answer, p50 µs", "p99 µs")
        rows = [
            [name, *(f"{value:.1f}" for value in (*each.prompt, *each.character))]
            for name, each in self.latency.items()
        ]
        return markdown_table(heads, rows)

    @property
    def request_times(self) -> str:
        """How long a harmless request took, with all that is around it."""
        p50, p99 = (micros / 1000 for micros in quantiles([result.seconds for result in self.harmless]))
        return f"With {NUM_AT_ONCE} at a time, a harmless request took {p50:.0f} ms (p50), {p99:.0f} ms (p99)."

    @property
    def markdown(self) -> str:
        """The whole report."""
        parts = (
            self.summary,
            self.attacks,
            "Known gaps:",
            self.known_gaps,
            "By place:",
            self.places,
            "Time in the service:",
            self.times,
            self.request_times,
        )
        return "\n\n".join(parts)


def _by(results: Sequence[CaseResult], key: Key) -> dict[str, list[CaseResult]]:
    """The results by key, in the order of their first appearance."""
    found: dict[str, list[CaseResult]] = {}
    for result in results:
        found.setdefault(key(result), []).append(result)
    return found


def _place(result: CaseResult) -> str:
    return f"{result.case.place.api} | {result.case.place.where}"


def _gap(result: CaseResult) -> str:
    case = result.case
    return case.kind if case.place.is_read else f"as a {case.place.where}, which no model reads"


def _num(results: Sequence[CaseResult]) -> str:
    return str(len(results))


def _fates(results: Sequence[CaseResult], fate: str) -> str:
    return str(sum(result.fate == fate for result in results))


def _others(results: Sequence[CaseResult]) -> str:
    return str(sum(result.fate not in ("refused", "cut") for result in results))


def _leaked(results: Sequence[CaseResult]) -> str:
    return str(sum(result.num_leaked_chars for result in results))
