"""Other gateways, as `kvloom bench data-plane --peers` runs them: what to install, and how to start it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


class PeerError(Exception):
    """A peer cannot be measured; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """Where a gateway is to serve, and what stands behind it."""

    bin_dir: Path
    """Of its virtualenv."""
    work_dir: Path
    """For files that it needs; its own."""
    port: int
    metrics_port: int
    engine_ports: Sequence[int]
    """Two free ones, for engines of its own kind."""
    worker_urls: Sequence[str]
    """OpenAI-compatible, e.g. http://127.0.0.1:9101"""
    model: str
    model_path: Path
    step_ms: float
    """How fast engines are to be; 0: as fast as they can."""
    decode_every: int = 1
    """A stream has a token in every so many-th step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """One gateway in one mode."""

    name: str
    about: str
    argv: Callable[[Site], Sequence[str]]
    requirements: Sequence[str] = ()
    """What pip installs; the first is the gateway itself. Empty for a program of the system."""
    bare_requirements: Sequence[str] = ()
    """Installed without what they depend on; the first is the gateway itself if there are any."""
    program: str = ""
    """Of the system, if it has it."""
    debian_package: str = ""
    """Else unpacked from here, where there is apt-get."""
    env: Callable[[Site], Mapping[str, str]] = lambda _: {}
    """On top of this process's environment, for the gateway and for its engines."""
    engines: Callable[[Site], Sequence[Sequence[str]]] | None = None
    """Commands that serve in place of the OpenAI-compatible workers."""
    has_stamps: bool = True
    """Its engines say when each token was made. Else only what it costs is measured."""
    max_share: float = 1.0
    """Of a workload's requests: a slow one would otherwise take minutes for each."""
    start_timeout_seconds: float = 120.0

    @property
    def packages(self) -> Sequence[str]:
        """All that pip installs, the gateway itself first."""
        return (*self.bare_requirements, *self.requirements)
