"""Chooses the kernel family that a shard computes with: measured once per machine, and kept, so that all shards choose
alike."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from kvloom_common.private_file import write_private_file
from shard_server.engines.torch_engine.checkpoint.converted_model import locked
from shard_server.engines.torch_engine.checkpoint.weights import OnProgress
from shard_server.engines.torch_engine.kernels.families import FAMILIES, GENERIC, Family, why_missing
from shard_server.engines.torch_engine.kernels.program import cache_dir, digest_of_sources

_PROBE: Final = "shard_server.engines.torch_engine.kernels.probe"
_PROBE_TIMEOUT_SECONDS: Final = 30.0
"""Compilation takes one or two of them; an emulated instruction set would take minutes."""
_LATE: Final = f"the trial took more than {_PROBE_TIMEOUT_SECONDS:.0f} s"
KEPT_DOUBT_SECONDS: Final = 300.0
"""How long a choice counts of which a trial was late: long enough for shards that start together to choose alike, and
no longer, since the machine may only have been busy."""
_MEASURED_TOGETHER: Final = 2
PROMPT_ROWS, ANSWER_ROWS = 512, 128
"""The request that the families are compared by: rows that are multiplied together, and rows one by one."""

Probe = Callable[[Family], dict[str, float]]
"""Returns what `probe.measure` does. Raises ProbeError."""


class ProbeError(Exception):
    """A family cannot be used here; the message is the reason."""


def choose_family(wanted: str, on_progress: OnProgress) -> Family | None:
    """The family named `wanted`, or for "auto" the fastest on this machine; None if there is none. `on_progress` is
    called with the reason for every family that is left out."""
    if wanted != "auto":
        family = FAMILIES[wanted]
        reason = why_missing(family)
        if reason is not None:
            on_progress(f"kernels {wanted}: {reason}")
        return family if reason is None else None
    return _kept_choice(cache_dir() / f"kernels-{machine_digest()}.json", on_progress)


def fastest(
    probe: Probe, on_progress: OnProgress, why_missing: Callable[[Family], str | None] = why_missing
) -> Family | None:
    """Measure families two by two, in the order of their expected speed, until one works."""
    candidates = [family for family in FAMILIES.values() if why_missing(family) is None]
    while candidates:
        # The slowest is not worth trying beside another one.
        pair = [family for family in candidates[:_MEASURED_TOGETHER] if family is not GENERIC] or candidates[:1]
        candidates = candidates[len(pair) :]
        with ThreadPoolExecutor(len(pair)) as threads:
            costs = dict(zip(pair, threads.map(functools.partial(_cost, probe), pair), strict=True))
        for family, cost in costs.items():
            if isinstance(cost, str):
                on_progress(f"{family.label} kernels are left out: {cost}")
        working = {family: cost for family, cost in costs.items() if not isinstance(cost, str)}
        if working:
            return min(working, key=working.__getitem__)
    return None


def _cost(probe: Probe, family: Family) -> float | str:
    """The seconds of a request's products, or the reason why the family cannot be used."""
    try:
        found = probe(family)
    except ProbeError as error:
        return str(error)
    if not found["error"] <= 1:  # NaN, too
        return "their products are wrong on this machine"
    return PROMPT_ROWS * found["seconds_of_many_rows"] + ANSWER_ROWS * found["seconds_of_one_row"]


def probe_in_process(family: Family) -> dict[str, float]:
    """Run probe.py. Raises ProbeError."""
    root = Path(__file__).parents[4]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(
            (sys.executable, "-P", "-m", _PROBE, family.name),
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_SECONDS,
            check=False,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()
            reason = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
            raise ProbeError(f"the trial ended with {reason}{': ' + said[-1][:200] if said else ''}")
        found: Any = json.loads(done.stdout)
        return {name: float(value) for name, value in found.items()}
    except subprocess.TimeoutExpired as error:
        raise ProbeError(_LATE) from error
    except (OSError, ValueError, AttributeError) as error:
        raise ProbeError(f"the trial failed: {error}") from error


def _kept_choice(path: Path, on_progress: OnProgress) -> Family | None:
    """Returns the kept choice. When several shards start together, one measures and the others wait for its choice."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # nowhere to keep it: every start measures
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path.with_suffix(".lock")))
        return _kept_or_measured(path, on_progress)


def _kept_or_measured(path: Path, on_progress: OnProgress) -> Family | None:
    try:
        kept = json.loads(path.read_bytes())
        family = FAMILIES[kept["family"]] if kept["family"] else None
        left_out = [str(line) for line in kept["left_out"]]
        is_old = time.time() - path.stat().st_mtime > KEPT_DOUBT_SECONDS
    except (OSError, ValueError, KeyError, TypeError):
        pass
    else:
        counts = not is_old or not any(_LATE in line for line in left_out)
        # Asked again, because each process needs Linux's permission to use AMX.
        if counts and (family is None or why_missing(family) is None):
            for line in left_out:
                on_progress(line)
            return family
    on_progress("trying out which kernels are the fastest here (some seconds, once)")
    left_out = []

    def report(line: str) -> None:
        left_out.append(line)
        on_progress(line)

    family = fastest(probe_in_process, report)
    with contextlib.suppress(OSError):
        content = json.dumps({"family": family.name if family else None, "left_out": left_out})
        write_private_file(path, content.encode())
    return family


@functools.cache
def machine_digest() -> str:
    """A digest of what the choice depends on: the CPU, the instruction sets that may be used, and our code."""
    from shard_server.engines.torch_engine.kernels.codegen.cpu import features

    cpu = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line for line in lines if line.startswith(("model name", "CPU part"))), "")
    parts = cpu, *sorted(features()), str(digest_of_sources())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
