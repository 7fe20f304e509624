"""Incidents in a bottle: what the core of a running router was given is given to another one, and it decides the
same."""

from __future__ import annotations

import functools
import gzip
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvloom_common.config import load_config
from lab.dst.command import dst
from lab.dst.nodes import router_node
from lab.dst.replay import replay
from lab.dst.run_seed import run_seed
from router.core.core import CoreConfig, RouterCore
from router.incidents import recorded_core
from router.incidents.bundle import read_runs
from router.incidents.checkpoint import restore
from router.incidents.recorded_core import RecordedCore, Recorder
from tests.lab.dst.planted_bugs import PLANTED_BUGS, PlantedBug
from tests.lab.dst.planted_bugs.known_seeds import read_known_seeds

SEEDS = [4, pytest.param(3, marks=pytest.mark.long)]
BUGS = (
    "floods_a_returning_shard",
    "forgets_legs_of_requests_that_end",
    "forgets_the_counts_of_tokens",
    "has_no_patience_after_a_notice",
    "leaves_kv_of_cancelled_answers",
    "meters_resumed_tokens_again",
    "places_requests_on_shards_of_any_model",
    "reports_the_end_of_every_choice",
    "sends_work_to_draining_shards",
    "serves_all_tiers_alike",
    "tells_attempts_apart_by_their_numbers",
    "withdraws_models_with_their_first_shard",
)


class Log:
    """The logs of the routers of a simulation, in memory."""

    def __init__(self) -> None:
        self.of_routers: list[list[bytes]] = []

    def core(self, config: CoreConfig, seed: int, limiter: Any = None) -> RouterCore:
        assert limiter is None, "seeds with limits are not recorded"
        lines: list[bytes] = []
        self.of_routers.append(lines)
        return RecordedCore(config, seed, Recorder(_Lines(lines), {"policy": config.policy}))


class _Lines:
    def __init__(self, lines: list[bytes]) -> None:
        self._lines = lines

    def put(self, header: bytes, line: bytes) -> bool:
        self._lines.append(header + line)
        return True


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[list[bytes]]]:
    """Runs a seed and returns the log of each of its routers."""

    def run(seed: int) -> list[list[bytes]]:
        log = Log()
        with monkeypatch.context() as patch:
            patch.setattr(router_node, "RouterCore", log.core)
            run_seed(seed, with_limits=False)
        return log.of_routers

    return run


def bundle_of(lines: list[bytes], path: Path) -> Path:
    path.write_bytes(gzip.compress(b"".join(lines)))
    return path


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bundle_decides_the_same_again(record: Callable[[int], list[list[bytes]]], seed: int) -> None:
    """The core is pure: whatever the faults of the seed, events without their content lead to the same decisions."""
    for lines in record(seed):
        (run,) = read_runs(lines)
        result = replay(run)
        assert (result.difference, result.broken) == (None, "")
        assert result.num_events == len(run.lines) == len(lines) - 1


@pytest.mark.parametrize("seed", SEEDS)
def test_it_goes_on_from_a_state_in_the_midst(
    record: Callable[[int], list[list[bytes]]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that has run for weeks has forgotten how it began: the log has its state every so often, with requests
    that run, wait and are screened."""
    monkeypatch.setattr(recorded_core, "CHECKPOINT_BYTES", 20_000)
    for lines in record(seed):
        states = [index for index, line in enumerate(lines) if not line.endswith(b"]]\n") and line.endswith(b'"]\n')]
        for index in states[:: max(1, len(states) // 4)]:
            (run,) = read_runs(lines[index:])
            assert (replay(run).difference, run.first) == (None, run.first)


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, id=bug.name, marks=() if bug.name in BUGS[:3] else pytest.mark.long)
        for bug in PLANTED_BUGS
        if bug.name in BUGS
    ],
)
def test_a_bug_is_reproduced_from_its_bundle(
    bug: PlantedBug, record: Callable[[int], list[list[bytes]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router with the bug decides again what it has decided, and the one without it names the first decision that
    the bug has changed: by one command."""
    seed = read_known_seeds()[bug.name][0]
    with monkeypatch.context() as patch:
        bug.plant(patch)
        runs = [lines for lines in record(seed) if read_runs(lines)]
        again = [replay(read_runs(lines)[-1]).difference for lines in runs]
    assert not any(again), "the bug is reproduced"
    bundles = [bundle_of(lines, tmp_path / f"{number}.bundle") for number, lines in enumerate(runs)]
    told = [CliRunner().invoke(dst, ["--replay", str(bundle)]) for bundle in bundles]
    found = [one for one in told if one.exit_code == 1]
    assert found, "a router without the bug decides otherwise"
    assert "the first decision that differs is at event" in found[0].output


def test_a_bundle_has_no_content(record: Callable[[int], list[list[bytes]]]) -> None:
    """It is sent to people who look for bugs. The texts of the simulation consist of words, which none of it has."""
    for lines in record(4):
        for line in lines:
            assert not any(field in line for field in (b'"prompt_token_ids":[1', b'"prompt_text":"w', b'"deltas":["'))


@pytest.mark.parametrize(
    "call", [functools.partial(os.system, "true"), functools.partial(load_config, Path("/etc/passwd"))]
)
def test_a_pickle_of_anything_else_is_refused(call: functools.partial[Any]) -> None:
    """A bundle comes from elsewhere: its state must not be able to run what it likes, nor what reads or writes files in
    the modules of a core's configuration."""
    with pytest.raises(pickle.UnpicklingError, match="not of a core"):
        restore(pickle.dumps(call))
