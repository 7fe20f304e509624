"""Wall clocks that jump: processes are started under libfaketime, which reads the offset of each one from a file."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from lab.chaos.fabric.cluster import Cluster
from lab.chaos.fabric.faults import Fault
from tools.supervisor.child import ChildSpec

_JUMPS: Final = ("+2h", "-2h", "+400d", "-1d")
_NO_JUMP: Final = "+0"
_FOLDERS: Final = ("/usr/lib/*/faketime", "/usr/lib/faketime", "/usr/local/lib/faketime")


@functools.cache
def library() -> Path | None:
    """The library that Debian's package libfaketime installs; None without it."""
    for folder in _FOLDERS:
        for path in sorted(Path("/").glob(f"{folder[1:]}/libfaketimeMT.so.1")):
            return path
    return None


def with_own_clock(spec: ChildSpec, run_dir: Path) -> ChildSpec:
    """Have a process read its wall clock's offset from a file. Its monotonic clock stays true. Redis keeps the
    machine's clock: if that jumped, everything in it would expire, which is the loss of its data as by kill-redis."""
    path = library()
    if path is None or spec.role == "redis":
        return spec
    _clock_file(run_dir, spec.name).write_text(_NO_JUMP)
    settings = {
        "LD_PRELOAD": str(path),
        "FAKETIME_TIMESTAMP_FILE": str(_clock_file(run_dir, spec.name)),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    return dataclasses.replace(spec, env={**spec.env, **settings})


def _clock_file(run_dir: Path, name: str) -> Path:
    return run_dir / f"clock-{name}"


@contextlib.asynccontextmanager
async def clock_jump(cluster: Cluster, fault: Fault, rng: random.Random) -> AsyncIterator[str]:
    names = list(dict.fromkeys(status.name for status in cluster.statuses if status.role != "redis"))
    name = names[int(fault.choice * len(names))]
    path = _clock_file(cluster.folder.run_dir, name)
    try:
        path.write_text(rng.choice(_JUMPS))
        yield name
    finally:
        path.write_text(_NO_JUMP)
