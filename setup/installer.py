"""Installs packages into a virtual environment: by uv, or by pip where uv cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from setup.pip_settings import UntranslatableError, for_uv, parse_settings
from setup.steps import say

_PIP: Final = ("-m", "pip", "--no-input", "--disable-pip-version-check")


class Installer:
    """`choice`: "auto", "uv" or "pip"; `constraints`: the files with the exact versions."""

    def __init__(self, python: Path, choice: str, constraints: Sequence[Path]) -> None:
        self._python = python
        self._choice = choice
        self._constraints = [argument for file in constraints for argument in ("-c", str(file))]
        self._command: list[str] = []
        self._index_flag = "--index-url"
        self._environment: Mapping[str, str] = os.environ
        self._settings: dict[str, str] | None = None

    @property
    def settings(self) -> dict[str, str]:
        """pip's settings, from its configuration files and the environment."""
        if self._settings is None:
            command = [self._python, "-m", "pip", "config", "list"]
            listed = subprocess.run(command, capture_output=True, text=True, check=False)
            self._settings = parse_settings(listed.stdout) if listed.returncode == 0 else {}
        return self._settings

    def install(self, *arguments: str, index: str | None = None) -> None:
        """`index`: the URL of one to use instead of the configured default. Raises CalledProcessError; what is wrong is
        on stderr then."""
        if not self._command:
            self._command = self._by_uv() or self._by_pip()
        chosen = [] if index is None else [self._index_flag, index]
        subprocess.run([*self._command, *self._constraints, *chosen, *arguments], env=self._environment, check=True)

    def _by_pip(self) -> list[str]:
        return [str(self._python), *_PIP, "install", "--quiet"]

    def _by_uv(self) -> list[str] | None:
        """None: it is not wanted, or cannot be had."""
        if self._choice == "pip":
            return None
        try:
            wanted = for_uv(self.settings)
        except UntranslatableError as error:
            return self._without_uv(str(error))
        uv = self._python.with_name("uv")
        if not _runs(uv):
            pip = subprocess.run([*self._by_pip(), *self._constraints, "uv"], check=False)
            if pip.returncode or not _runs(uv):
                return self._without_uv("uv cannot be installed here")
        set_by_user = {name: value for name, value in os.environ.items() if name.startswith("UV_")}
        if "UV_INDEX_URL" in set_by_user:  # the older name of this variable, which would be weaker
            set_by_user.setdefault("UV_DEFAULT_INDEX", set_by_user["UV_INDEX_URL"])
        self._environment = {**os.environ, **wanted.environment, **set_by_user}
        self._index_flag = "--default-index"
        progress = [] if sys.stderr.isatty() else ["--quiet"]
        return [str(uv), "pip", "install", "--python", str(self._python), *progress, *wanted.flags]

    def _without_uv(self, reason: str) -> None:
        if self._choice == "uv":
            sys.exit(f"setup: {reason} (INSTALLER=uv)")
        say(f"{reason}: pip installs the packages, which takes some minutes")


def _runs(command: Path) -> bool:
    try:
        return subprocess.run([command, "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
