"""The last release, and distributions as pip makes them."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD = "import sys; from hatchling import build; build.build_{0}(sys.argv[1])"


def export_last_release(folder: Path, *paths: str) -> None:
    """Writes these paths of the last release to the folder. Skips the test where git does not know it, as in a shallow
    clone."""
    found = subprocess.run(
        [REPOSITORY / ".ci" / "last-release"], capture_output=True, text=True, timeout=60.0, check=True
    )
    release = found.stdout.strip()
    if not release:
        pytest.skip("the history of this checkout does not reach the last release")
    archive = subprocess.run(
        ["git", "archive", release, *paths], cwd=REPOSITORY, capture_output=True, timeout=60.0, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")


def build(kind: str, project: Path, folder: Path) -> Path:
    """A distribution of a project ("wheel" or "sdist"), as pip and `python -m build` make it."""
    before = set(folder.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(kind), str(folder)],
        cwd=project, capture_output=True, text=True, timeout=120.0, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (built,) = set(folder.iterdir()) - before
    return built
