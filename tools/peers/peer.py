"""Other gateways, as `kvloom bench data-plane --peers` runs them: what to install, and how to start it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """Where a gateway is to serve, and what stands behind it."""

    bin_dir: Path
    """Of its virtualenv."""
    work_dir: Path
    """For files that it needs; its own."""
    port: int
    metrics_port: int
    worker_urls: Sequence[str]
    """OpenAI-compatible, e.g. http://127.0.0.1:9101"""
    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """One gateway in one mode."""

    name: str
    about: str
    requirement: str
    """What pip installs; "" for a program of the system, named by `program`."""
    argv: Callable[[Site], Sequence[str]]
    program: str = ""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    max_share: float = 1.0
    """Of a workload's requests: a slow one would otherwise take minutes for each."""
    start_timeout_seconds: float = 120.0
