"""`python -m setup.pythons`: runs the quick tests with the oldest and the newest Python of this machine. Arguments are
passed on to pytest.

The version of `.venv` is tested there. Another one gets an environment of its own, `.venv-3.13` for example. The
embedded engine is part of it if PyTorch's index has a CPU build for that Python; the tests that need it are left out
otherwise, and pytest's first lines say so.
"""

from __future__ import annotations

import glob
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from setup.__main__ import REPOSITORY, version_of_environment
from setup.steps import say

OLDEST_PYTHON: Final = (3, 11)
NEWEST_PYTHON: Final = (3, 13)
"""For which the pinned packages have wheels."""
TESTS: Final = ("tests/unit", "tests/property")
_VERSION: Final = "import ensurepip, sys, venv; print(*sys.version_info[:2])"


def main() -> None:
    pythons = find_pythons()
    if not pythons:
        sys.exit("no Python from 3.11 to 3.13 was found")
    for version in sorted({min(pythons), max(pythons)}):
        name = ".".join(map(str, version))
        venv, python = f".venv-{name}", pythons[version]
        say(f"the quick tests with Python {name}")
        if version_of_environment(REPOSITORY / ".venv") == name:
            venv = ".venv"
        else:
            arguments = ("dev", "--venv", venv, "--torch", "cpu-or-none")
            subprocess.run([python, "-m", "setup", *arguments], cwd=REPOSITORY, check=True)
        command = (f"{venv}/bin/python", "-m", "pytest", "-q", *TESTS, *sys.argv[1:])
        if subprocess.run(command, cwd=REPOSITORY, check=False).returncode:
            sys.exit(f"the quick tests failed with Python {name}")


def find_pythons() -> dict[tuple[int, int], str]:
    """One interpreter of each version that the set-up can use: of those on the PATH and those that pyenv has."""
    candidates = [f"python3.{minor}" for minor in range(OLDEST_PYTHON[1], NEWEST_PYTHON[1] + 1)]
    candidates += sorted(glob.glob(str(Path.home() / ".pyenv/versions/3.*/bin/python")))
    found: dict[tuple[int, int], str] = {}
    for candidate in candidates:
        version = _version_of(candidate)
        if version is not None and OLDEST_PYTHON <= version <= NEWEST_PYTHON:
            found.setdefault(version, candidate)
    return found


def _version_of(python: str) -> tuple[int, int] | None:
    """None: it does not run, or cannot make virtual environments."""
    try:
        ran = subprocess.run([python, "-c", _VERSION], capture_output=True, text=True, check=False, env=_environment())
    except OSError:
        return None
    parts = ran.stdout.split()
    return (int(parts[0]), int(parts[1])) if ran.returncode == 0 and len(parts) == 2 else None


def _environment() -> dict[str, str]:
    """Without variables that send one Python to the modules of another one."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}


if __name__ == "__main__":
    main()
