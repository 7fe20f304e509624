"""Other gateways, as `kvloom-lab bench data-plane --peers` installs and starts them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


class PeerError(Exception):
    """A peer cannot be measured; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """The addresses and folders at which a gateway is to serve, and the engines behind it."""

    bin_dir: Path
    """The `bin` folder of its virtualenv."""
    work_dir: Path
    """A folder of its own for the files that it needs."""
    port: int
    metrics_port: int
    engine_ports: Sequence[int]
    """Two free ports for engines of its own kind."""
    worker_urls: Sequence[str]
    """URLs of OpenAI-compatible engines, e.g. http://127.0.0.1:9101"""
    model: str
    model_path: Path
    step_ms: float
    """Length of an engine step; 0: as fast as possible."""
    decode_every: int = 1
    """A stream gets a token in every n-th step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """One gateway in one mode."""

    name: str
    about: str
    argv: Callable[[Site], Sequence[str]]
    requirements: Sequence[str] = ()
    """Packages that pip installs; the first is the gateway itself. Empty for a program of the system."""
    bare_requirements: Sequence[str] = ()
    """Packages that are installed without their dependencies; the first is the gateway itself if there are any."""
    program: str = ""
    """A program of the system, used if it is installed."""
    debian_package: str = ""
    """The package from which the program is unpacked otherwise, where there is apt-get."""
    env: Callable[[Site], Mapping[str, str]] = lambda _: {}
    """Variables added to this process's environment, for the gateway and for its engines."""
    engines: Callable[[Site], Sequence[Sequence[str]]] | None = None
    """Commands that serve in place of the OpenAI-compatible workers."""
    has_stamps: bool = True
    """True when its engines say when each token was made. Without that only costs are measured."""
    max_share: float = 1.0
    """Share of a workload's requests that is sent: with all of them a slow gateway would take minutes per run."""
    start_timeout_seconds: float = 120.0

    @property
    def packages(self) -> Sequence[str]:
        """All packages that pip installs, the gateway itself first."""
        return (*self.bare_requirements, *self.requirements)
