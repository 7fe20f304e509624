"""The shard server's pure parts: submits, load reports."""

from __future__ import annotations

from shard_server.engines.base import Capability, EngineInfo, EngineLoad
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
    reporter = LoadReporter(num_blocks=10)
    busy, idle = EngineLoad(num_running=1), EngineLoad()
    assert reporter.on_step(busy, 100.0) is not None
    assert reporter.on_step(busy, 100.01) is None
    assert reporter.on_step(idle, 100.02) is not None
    assert reporter.on_step(busy, 100.03) is not None
    assert reporter.on_step(busy, 100.04 + LOAD_REPORT_SECONDS) is not None
    assert reporter.report().num_blocks == 10
