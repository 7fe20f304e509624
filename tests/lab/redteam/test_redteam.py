"""The red team's attacks do not pass, what only looks like them does, and the red team notices a policy that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab.redteam.campaign import run_cases
from lab.redteam.cases import CASES_PER_SEED, RedTeamCase, cases_of, cases_of_seeds, num_leaked_chars
from lab.redteam.clients import AskedStream
from lab.redteam.fabric import echo_fabric
from lab.redteam.faults import GARBLES, HUNG, KILLED
from lab.redteam.latency import latency_by_layer
from lab.redteam.mutators import MUTATORS
from lab.redteam.outages import run_outages
from lab.redteam.places import PLACES
from lab.redteam.processes import JudgedText
from lab.redteam.report import RedTeamReport
from lab.redteam.rules import policy_text
from router.core.relay import verdicts
from tests.lab.dst.planted_bugs.surroundings import shows_what_was_held_when_safety_returns

pytest_plugins = ("tests.fakes.router_fixtures",)

NUM_QUICK = 80
NUM_SEEDS = 6
NUM_LONG_SEEDS = 12
NUM_STREAMS = 40
NUM_LONG_STREAMS = 10_000
CLEARS_TOO_MUCH_FIRST = 4
"""A seed whose first fault does this."""
MOST_FALSE_POSITIVES = 0.001


def believes_any_number(patch: pytest.MonkeyPatch) -> None:
    """The router clears as much as the service says, also text that is still to come."""
    patch.setattr(verdicts, "_num_screened_chars", lambda _choice: 10**6)


async def report_on(redis_url: str, folder: Path, policy: str, cases: list[RedTeamCase]) -> RedTeamReport:
    path = folder / "policy.toml"
    path.write_text(policy, encoding="utf-8")
    async with echo_fabric(redis_url, path) as fabric:
        return RedTeamReport(await run_cases(fabric, cases), {})


async def test_no_claimed_attack_passes_and_no_harmless_text_is_refused(router_redis_url: str, tmp_path: Path) -> None:
    """A part of one seed's cases, through every API; `kvloom-lab redteam` tries thousands."""
    cases = list(cases_of(1))
    quick = cases[:: len(cases) // NUM_QUICK]
    report = await report_on(router_redis_url, tmp_path, policy_text(), quick)
    assert not report.failures, "\n".join(map(str, report.failures))
    assert report.num_leaked_chars == report.num_passed == report.num_false_positives == 0
    assert {result.fate for result in report.claimed} == {"refused", "cut"}


async def test_a_policy_that_only_watches_is_found_out(router_redis_url: str, tmp_path: Path) -> None:
    """A red team that never fails would prove nothing: here it must see every attack pass, and whole texts leak."""
    attacks = [case for case in cases_of(2) if case.is_claimed][:20]
    watching = policy_text().replace("message =", 'mode = "monitor"\nmessage =')
    report = await report_on(router_redis_url, tmp_path, watching, attacks)
    assert len(report.failures) == report.num_passed == len(attacks)
    assert report.num_leaked_chars == sum(len(case.text) for case in attacks if case.place.is_answer) > 0


@pytest.mark.long
async def test_thousands_of_cases(router_redis_url: str, tmp_path: Path) -> None:
    """The whole campaign, which docs/notes/reliability/red-team.md reports."""
    cases = list(cases_of_seeds(NUM_LONG_SEEDS))
    report = await report_on(router_redis_url, tmp_path, policy_text(), cases)
    assert len(report.claimed) >= 1000
    assert len(report.harmless) >= 2000
    assert not [result for result in report.failures if result.case.layer is not None], report.summary
    assert report.num_false_positives < MOST_FALSE_POSITIVES * len(report.harmless), report.summary


async def test_nothing_is_shown_without_a_verdict_while_the_service_fails(
    router_redis_url: str, tmp_path: Path
) -> None:
    """It is killed, hangs and sends garbage, and still each answer ends as it does without that: whole, cut or
    refused."""
    report = await run_outages(router_redis_url, tmp_path, NUM_STREAMS)
    seen = report.seen
    assert not seen.wrong, "\n".join(seen.wrong)
    assert seen.num_unjudged_chars == seen.num_leaked_chars == 0
    assert seen.fates.keys() == {"whole", "cut", "refused"}
    assert report.faults


@pytest.mark.long
async def test_thousands_of_streams_while_the_service_fails(router_redis_url: str, tmp_path: Path) -> None:
    """As many at once as a large router has, so that frames are large, and every kind of fault strikes them."""
    report = await run_outages(router_redis_url, tmp_path, NUM_LONG_STREAMS)
    assert not report.seen.wrong, report.summary
    assert report.seen.num_unjudged_chars == report.seen.num_leaked_chars == 0
    assert report.faults.keys() == {KILLED, HUNG, *GARBLES}


@pytest.mark.long
@pytest.mark.parametrize("bug", [believes_any_number, shows_what_was_held_when_safety_returns])
async def test_text_without_a_verdict_is_found(
    router_redis_url: str, tmp_path: Path, bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count of 0 would prove nothing if it were always 0."""
    bug(monkeypatch)
    report = await run_outages(router_redis_url, tmp_path, NUM_STREAMS, seed=CLEARS_TOO_MUCH_FIRST)
    assert report.seen.num_unjudged_chars > 0


def test_a_client_counts_what_it_sees_before_its_verdict() -> None:
    """The verdicts are those of another process, which notes them before it sends them."""
    judged = JudgedText(2)
    stream = AskedStream(1, next(case for case in cases_of(0) if case.layer is None), judged)
    judged.clear(1, 3)
    stream.on_tokens(0, "ab", [1, 2], ())
    assert stream.num_unjudged_chars == 2  # the prompt is not allowed yet
    judged.allow(1)
    stream.on_tokens(0, "c", [3], ())
    assert stream.num_unjudged_chars == 2
    stream.on_tokens(0, "defg", [4], ())
    assert stream.num_unjudged_chars == 4
    assert not stream.is_as_wanted


def test_a_seed_gives_the_same_cases_and_all_seeds_everything_there_is() -> None:
    """A failure is found again by its number, and no mutator or place is forgotten."""
    assert list(map(str, cases_of(3))) == list(map(str, cases_of(3)))
    cases = cases_of_seeds(NUM_SEEDS)
    assert [case.number for case in cases] == list(range(NUM_SEEDS * CASES_PER_SEED))
    assert {case.place for case in cases} == set(PLACES)
    assert {mutator.name for mutator in MUTATORS} <= {case.kind for case in cases}


def test_characters_behind_the_marker_are_leaks_wherever_a_client_sees_them() -> None:
    """What comes in parts is put together, and text before the marker is no leak."""
    case = next(case for case in cases_of(0) if case.is_claimed and case.place.is_answer)
    assert num_leaked_chars(case, [case.before, f"{case.before} {case.marker}"]) == 0
    assert num_leaked_chars(case, ["other", f"{case.marker}{case.text[:2]}"]) == 2
    assert num_leaked_chars(case, [case.written]) == len(case.text)


def test_each_layer_is_timed() -> None:
    """Layers are told apart, so that a slow one is seen."""
    times = latency_by_layer([case for case in cases_of(0) if case.layer is None][:3])
    assert list(times) == ["list", "look-alikes", "spaced", "pattern", "card", "all of them"]
    assert all(0 < each.prompt.p50 <= each.prompt.p99 for each in times.values())
