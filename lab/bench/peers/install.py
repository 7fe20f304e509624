"""Installs a peer's programs into a folder of ours, once: from PyPI into a virtualenv, or from a Debian package."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from lab.bench.peers.peer import Peer, PeerError
from tools.supervisor.child import bound_command

_TIMEOUT_SECONDS: Final = 900.0
_VERSION: Final = re.compile(r"\d+(?:\.\d+)+")


class Installed(NamedTuple):
    bin_dir: Path
    version: str
    """The gateway's version."""


async def install(peer: Peer, cache_dir: Path, on_progress: Callable[[str], None]) -> Installed:
    """Raises PeerError."""
    if not peer.packages:
        return await _program(peer, cache_dir, on_progress)
    package, _, version = peer.packages[0].partition("==")
    home = cache_dir / package.partition("[")[0]
    marker, wanted = home / "requirement", " ".join(peer.packages)
    if not (marker.is_file() and marker.read_text() == wanted):
        on_progress(f"installing {peer.packages[0]} into {home}")
        shutil.rmtree(home, ignore_errors=True)
        home.parent.mkdir(parents=True, exist_ok=True)
        await _run("", sys.executable, "-m", "venv", str(home))
        pip = (str(home / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check")
        if peer.requirements:
            await _run("", *pip, *peer.requirements)
        if peer.bare_requirements:
            await _run("", *pip, "--no-deps", *peer.bare_requirements)
        marker.write_text(wanted)
    return Installed(home / "bin", version)


async def _program(peer: Peer, cache_dir: Path, on_progress: Callable[[str], None]) -> Installed:
    """The system's program, or one unpacked from the system's package archive, which needs no right to install
    anything."""
    home = cache_dir / peer.program
    found = shutil.which(peer.program) or shutil.which(peer.program, path=str(home / "usr" / "sbin"))
    if found is None:
        apt_get, dpkg_deb = shutil.which("apt-get"), shutil.which("dpkg-deb")
        if not peer.debian_package or apt_get is None or dpkg_deb is None:
            raise PeerError(f"{peer.program} is not installed, and there is no apt-get to fetch it with")
        on_progress(f"fetching Debian's {peer.debian_package} into {home}")
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        await _run(str(home), apt_get, "download", "--quiet", peer.debian_package)
        for archive in sorted(home.glob("*.deb")):
            await _run("", dpkg_deb, "--extract", str(archive), str(home))
        found = shutil.which(peer.program, path=str(home / "usr" / "sbin"))
        if found is None:
            raise PeerError(f"Debian's {peer.debian_package} has no usr/sbin/{peer.program}")
    said = await _run("", found, "-v")
    version = _VERSION.search(said)
    return Installed(Path(found).parent, version[0] if version else "")


async def _run(directory: str, *argv: str) -> str:
    """Return what the command wrote to both outputs. Raises PeerError when it fails."""
    process = await asyncio.create_subprocess_exec(
        *bound_command(argv), stdin=DEVNULL, stdout=PIPE, stderr=asyncio.subprocess.STDOUT, cwd=directory or None
    )
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            said, _ = await process.communicate()
    except TimeoutError as error:
        raise PeerError(f"`{_shown(argv)}` took longer than {_TIMEOUT_SECONDS:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise PeerError(f"`{_shown(argv)}` failed: {last_words(said)}")
    return said.decode(errors="replace")


def last_words(said: bytes) -> str:
    """The line that names an error, otherwise the last one."""
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1][:200]


def _shown(argv: Sequence[str]) -> str:
    return " ".join((Path(argv[0]).name, *argv[1:]))[:120]
