"""A shard computes with the fastest kernels that work on its machine, and all shards of a machine with the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.kernel_threads import family_params

choice = pytest.importorskip("shard_server.engines.torch_engine.kernels.choice")
families = pytest.importorskip("shard_server.engines.torch_engine.kernels.families")
Found = dict[str, float]
NOTHING: Found = {}


def probe_of(**found: Found | str) -> Callable[..., Found]:
    """What each family measures; a text: why it fails."""

    def probe(family) -> Found:
        answer = found[family.name]
        if isinstance(answer, str):
            raise choice.ProbeError(answer)
        return answer

    return probe


def cost(seconds: float, error: float = 0.1) -> Found:
    return {"seconds_of_one_row": seconds, "seconds_of_many_rows": seconds, "error": error}


def everything(_family) -> None:
    return None


def chosen(probe: Callable[..., Found], told: list[str], why_missing: Callable[..., str | None] = everything) -> str:
    family = choice.fastest(probe, told.append, why_missing)
    return "" if family is None else family.name


def test_the_fastest_of_those_that_should_be_fast_wins():
    """Dot products in bf16 are slower than float32 on some CPUs that have tiles. Slower families are not tried."""
    told: list[str] = []
    assert chosen(probe_of(amx=cost(1), avx512_bf16=cost(2)), told) == "amx"
    assert chosen(probe_of(amx=cost(2), avx512_bf16=cost(1)), told) == "avx512_bf16"
    assert not told


@pytest.mark.parametrize(
    ("found", "reason"),
    [("signal 4", "signal 4"), (cost(1, error=1.5), "wrong"), (cost(1, error=float("nan")), "wrong")],
    ids=["died", "wrong", "nan"],
)
def test_a_family_that_does_not_work_is_left_out_with_a_reason(found: Found | str, reason: str):
    """Also if it is the fastest, and if all that should be fast fail."""
    told: list[str] = []
    assert chosen(probe_of(amx=found, avx512_bf16=cost(2)), told) == "avx512_bf16"
    assert len(told) == 1
    assert reason in told[0]
    slow = probe_of(amx=found, avx512_bf16=found, avx512=found, avx2=found, generic=cost(9))
    assert chosen(slow, told) == "generic"
    none = probe_of(amx=found, avx512_bf16=found, avx512=found, avx2=found, generic=found)
    assert chosen(none, told) == ""


def test_families_that_the_cpu_lacks_are_not_tried():
    """They would only cost time, or end the process."""

    def why_missing(family) -> str | None:
        return None if family.name in ("avx2", "generic") else "no"

    assert chosen(probe_of(avx2=cost(5)), [], why_missing) == "avx2"


def test_a_family_that_is_asked_for_and_missing_is_none(monkeypatch: pytest.MonkeyPatch):
    """The engine then refuses to start, instead of computing with other bits than its operator wanted."""
    monkeypatch.setattr(choice, "why_missing", lambda _family: "this CPU has no AMX")
    told: list[str] = []
    assert choice.choose_family("amx", told.append) is None
    assert told == ["kernels amx: this CPU has no AMX"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The families that were measured; all choices are kept in a new directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names: list[str] = []

    def probe(family) -> Found:
        names.append(family.name)
        return cost(1 if family.name == "avx2" else 2)

    monkeypatch.setattr(choice, "probe_in_process", probe)
    return names


def test_shards_that_start_together_measure_once_and_choose_alike(measured: list[str]):
    """Each would otherwise take seconds of all cores, and noise could make them differ."""
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(choice.choose_family("auto", lambda _line: None)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(measured) == len(set(measured)) <= 2


@pytest.mark.parametrize("content", ["", "{", '{"family": "none of ours", "left_out": []}', "[]"])
def test_a_damaged_choice_is_measured_again(measured: list[str], tmp_path: Path, content: str):
    """A machine that lost power must not lose its kernels."""
    first = choice.choose_family("auto", lambda _line: None)
    [path] = (tmp_path / "kvloom").glob("kernels-*.json")
    assert json.loads(path.read_text())["family"] == first.name
    path.write_text(content)
    measured.clear()
    assert choice.choose_family("auto", lambda _line: None) is first
    assert measured


@pytest.mark.parametrize(("age_seconds", "is_measured_again"), [(5.0, False), (3600.0, True)])
def test_a_choice_that_a_busy_machine_made_counts_for_minutes_only(
    measured: list[str], tmp_path: Path, age_seconds: float, is_measured_again: bool
):
    """All trials were too late once, and the shards of that machine computed with the slowest kernels from then on.
    Those that start at the same time must choose alike all the same."""
    choice.choose_family("auto", lambda _line: None)
    [path] = (tmp_path / "kvloom").glob("kernels-*.json")
    late = ["AVX2 kernels are left out: the trial took more than 30 s"]
    path.write_text(json.dumps({"family": "generic", "left_out": late}))
    written_at = path.stat().st_mtime - age_seconds
    os.utime(path, (written_at, written_at))
    measured.clear()
    family = choice.choose_family("auto", lambda _line: None)
    assert bool(measured) is is_measured_again
    assert (family is families.GENERIC) is not is_measured_again


def test_where_nothing_can_be_kept_every_start_measures(measured: list[str], monkeypatch: pytest.MonkeyPatch):
    """A read-only home must not keep a shard from starting."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert choice.choose_family("auto", lambda _line: None) is not None
    num_measured = len(measured)
    assert choice.choose_family("auto", lambda _line: None) is not None
    assert len(measured) == 2 * num_measured


def test_a_process_that_dies_of_an_instruction_is_a_reason_and_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Hypervisors report instructions that they do not run."""
    (tmp_path / "dying_probe.py").write_text(f"import os; os.kill(os.getpid(), {int(signal.SIGILL)})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(choice, "_PROBE", "dying_probe")
    with pytest.raises(choice.ProbeError, match=f"signal {int(signal.SIGILL)}"):
        choice.probe_in_process(families.GENERIC)


@pytest.mark.parametrize(("name", "expected"), [("haswell", {"avx2", "generic"}), ("x86-64", {"generic"})])
@pytest.mark.skipif(families.is_arm64(), reason="these are CPUs of the x86 kind")
def test_a_lesser_cpu_can_be_played(name: str, expected: set[str]):
    """So that its kernels can be measured on a better one."""
    module = "shard_server.engines.torch_engine.kernels.families"
    code = f"from {module} import runnable_families; print(*(family.name for family in runnable_families()))"
    environment = {**os.environ, "NUMBA_CPU_NAME": name}
    done = subprocess.run((sys.executable, "-c", code), env=environment, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == expected


@pytest.mark.parametrize("name", family_params())
def test_every_family_of_this_cpu_passes_its_trial(name: str):
    """Compiled, run and compared with float64 in a process of its own."""
    found = choice.probe_in_process(families.FAMILIES[name])
    assert found["error"] <= 1
    assert 0 < found["seconds_of_many_rows"] < found["seconds_of_one_row"]
