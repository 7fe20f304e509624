"""The shard server's pure parts: submits, load reports."""

from __future__ import annotations

import pytest

from kvloom.v1.shard_service_pb2 import LoadReport
from shard_server.engines.base import Capability, EngineInfo, EngineLoad, EngineRequest, LoadShare, Sampling
from shard_server.load_reporter import LOAD_REPORT_SECONDS, LoadReporter
from shard_server.submits import choice_seed, resolve_submit
from tests.fakes.shard_world import submit_of

INFO = EngineInfo("e", "m", 16, 64, 8, 128, 1000, frozenset({2}), frozenset(Capability))


def test_choice_seeds_are_fixed_and_apart() -> None:
    """Any shard derives the same ones; these values must never change, or resumed answers would."""
    assert choice_seed(7, 0) == 7
    assert choice_seed(7, 1) == 7191089600892374487
    seeds = {choice_seed(seed, index) for seed in (0, 1, 7, 2**64 - 1) for index in range(16)}
    assert len(seeds) == 64
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_defaults_are_filled_in() -> None:
    """An absent field means what the proto's comment says, not zero."""
    submit = submit_of(1, [5, 6])
    submit.sampling.Clear()
    submit.stop.Clear()
    (request,) = resolve_submit(submit, INFO, 3)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, 0)
    assert request.sampling.num_logprobs is None
    assert request.max_tokens == 126
    assert request.stop_token_ids == {2}


def test_a_nucleus_of_nothing_is_the_likeliest_token() -> None:
    """Engines divide by it, or keep none: they get a form that each of them knows."""
    (request,) = resolve_submit(submit_of(1, [5], temperature=1.0, top_p=0.0, top_k=7), INFO, 3)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, 1)


def test_zero_is_not_absent() -> None:
    """Greedy is temperature 0, and logprobs 0 asks for the chosen token's alone."""
    (request,) = resolve_submit(submit_of(1, [5], seed=0, temperature=0.0, logprobs=0), INFO, 3)
    assert request.sampling.temperature == 0.0
    assert request.sampling.num_logprobs == 0
    assert request.sampling.seed == 0


def test_engine_names_are_unique_though_routers_repeat_themselves() -> None:
    """The engine may still hold a cancelled sequence when its router submits the request again."""
    names = {resolve_submit(submit_of(1, [5]), INFO, serial)[0].request_id for serial in range(3)}
    assert len(names) == 3


def test_load_is_reported_rarely_but_at_once_when_busy_or_idle() -> None:
    """A stale idle shard would get no work, a stale busy one too much."""
    reporter = LoadReporter(INFO)
    busy, idle = EngineLoad(num_running=1), EngineLoad()
    assert reporter.on_step(busy, 100.0)
    assert not reporter.on_step(busy, 100.01)
    assert reporter.on_step(idle, 100.02)
    assert reporter.on_step(busy, 100.03)
    assert reporter.on_step(busy, 100.04 + LOAD_REPORT_SECONDS)
    assert reporter.report().num_blocks == INFO.num_blocks


def test_every_stream_is_told_its_own_part_of_the_load() -> None:
    """What is left is what other routers have placed: that is what a router cannot know by itself."""
    reporter = LoadReporter(INFO)
    reporter.on_step(EngineLoad.of({1: LoadShare(1, 2, 30, 40), 2: LoadShare(5, 6, 70, 80)}), 100.0)
    first, second, anonymous = reporter.report(1), reporter.report(2), reporter.report()
    assert totals_of(first) == totals_of(second) == totals_of(anonymous) == (6, 8, 100, 120)
    assert (own_part_of(first), own_part_of(second)) == ((1, 2, 30, 40), (5, 6, 70, 80))
    assert own_part_of(anonymous) == own_part_of(reporter.report(3)) == (0, 0, 0, 0)


def test_a_submit_counts_before_the_engine_has_taken_it_in_and_never_twice() -> None:
    """A step may last long; in it the shard would look idle to the other routers."""
    reporter = LoadReporter(INFO)
    for origin, num_tokens in ((1, 20), (2, 30)):
        reporter.on_submit(EngineRequest("r", [5] * num_tokens, Sampling(), 8, origin=origin))
    assert totals_of(reporter.report(1)) == (0, 2, 50, 0)
    assert own_part_of(reporter.report(1)) == (0, 1, 20, 0)
    reporter.on_step(EngineLoad.of({1: LoadShare(num_running=1)}, num_submitted=1), 100.0)
    assert totals_of(reporter.report(2)) == (1, 1, 30, 0)
    assert own_part_of(reporter.report(2)) == (0, 1, 30, 0)
    reporter.on_step(EngineLoad.of({2: LoadShare(num_running=1)}, num_submitted=2), 100.0)
    assert totals_of(reporter.report(2)) == (1, 0, 0, 0)


def test_submits_are_told_without_a_step_but_not_more_often_than_others() -> None:
    """A burst of submits must not become a burst of reports; what a step has told is not told again."""
    reporter = LoadReporter(INFO)
    request = EngineRequest("r", [5], Sampling(), 8)
    assert not reporter.is_due_without_step(99.0)
    reporter.on_submit(request)
    assert reporter.seconds_to_next(100.0) == 0
    assert reporter.is_due_without_step(100.0)
    reporter.on_submit(request)
    assert reporter.seconds_to_next(100.0) == pytest.approx(LOAD_REPORT_SECONDS)
    assert reporter.on_step(EngineLoad(num_running=1, num_submitted=2), 101.0)
    assert not reporter.is_due_without_step(102.0)


def totals_of(report: LoadReport) -> tuple[int, int, int, int]:
    return (
        report.num_running,
        report.num_waiting,
        report.num_queued_prefill_tokens,
        report.num_decode_context_tokens,
    )


def own_part_of(report: LoadReport) -> tuple[int, int, int, int]:
    return (
        report.num_own_running,
        report.num_own_waiting,
        report.num_own_queued_prefill_tokens,
        report.num_own_decode_context_tokens,
    )
