"""Packages are installed from where pip's configuration says, by uv as well as by pip, into a virtual environment."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from setup.installer import Installer

UV = Path(sys.executable).with_name("uv")


def make_wheel(index: Path, name: str, version: str, script: str | None = None) -> None:
    """Adds a wheel with one empty module, or one command, to a package index in files."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    information = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "",
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if script is not None:
        files[f"{name}-{version}.data/scripts/{name}"] = script
    files[f"{information}/RECORD"] = "".join(f"{file},,\n" for file in files)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, content in files.items():
            entry = zipfile.ZipInfo(file)
            entry.external_attr = 0o100755 << 16  # a script that is not executable is installed as it is
            wheel.writestr(entry, content)
    links = "".join(f'<a href="{path.name}">{path.name}</a>\n' for path in sorted(folder.glob("*.whl")))
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of an empty virtual environment with pip, on a machine whose only settings are those of the test."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    pip = importlib.util.find_spec("pip")
    assert pip is not None
    assert pip.origin is not None
    (site / "pip").symlink_to(Path(pip.origin).parent)
    return tmp_path / "venv" / "bin" / "python"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index in files, which nothing names but pip's configuration file. It has uv, if there is one here."""
    index, extra, configuration = tmp_path / "index", tmp_path / "extra", tmp_path / "pip.conf"
    for version in ("1.0", "2.0"):
        make_wheel(index, "thing", version)
    make_wheel(extra, "thing", "1.5")
    make_wheel(extra, "other", "1.0")
    make_wheel(index, "torch", "2.13.0")
    if UV.exists():
        make_wheel(index, "uv", "1.0", f'#!/bin/sh\nexec "{UV}" "$@"\n')
    (tmp_path / "limits.txt").write_text("thing<2\n")
    lines = ("[global]", f"index-url = file://{index}", f"extra-index-url = file://{extra}", "timeout = 5")
    configuration.write_text("\n".join((*lines, "[install]", f"constraint = {tmp_path / 'limits.txt'}")))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    return index


def installed(python: Path) -> dict[str, str]:
    found = (path.name.removesuffix(".dist-info").split("-", 1) for path in python.parents[1].rglob("*.dist-info"))
    return {name: version for name, version in found if name != "pip"}


@pytest.mark.parametrize("choice", ["uv", "pip"])
def test_packages_come_from_the_index_of_pip_s_configuration(
    choice: str, python: Path, index: Path, tmp_path: Path
) -> None:
    """The configured index, the extra one, the best version of both and the configured constraint count for
    both installers. uv itself comes from there as well."""
    if choice == "uv" and not UV.exists():
        pytest.skip("uv is not installed here")
    pins = tmp_path / "pins.txt"
    pins.write_text("other==1.0\n")
    Installer(python, choice, [pins]).install("thing", "other")
    versions = installed(python)
    assert (versions["thing"], versions["other"]) == ("1.5", "1.0")
    assert ("uv" in versions) == (choice == "uv")


@pytest.mark.parametrize("choice", ["uv", "pip"])
def test_an_index_that_is_named_for_torch_comes_before_the_configured_one(
    choice: str, python: Path, index: Path, tmp_path: Path
) -> None:
    """The CPU build is a local version of the same release, on an index of its own."""
    if choice == "uv" and not UV.exists():
        pytest.skip("uv is not installed here")
    cpu = tmp_path / "cpu"
    make_wheel(cpu, "torch", "2.13.0+cpu")
    installer = Installer(python, choice, [])
    installer.install("--no-deps", "torch", index=f"file://{cpu}")
    installer.install("thing", "torch==2.13.0")  # leaves it as it is
    assert installed(python)["torch"] == "2.13.0+cpu"


def test_pip_takes_over_where_uv_cannot_be_had(
    python: Path, index: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror may lack uv. Who insists on uv gets an error instead."""
    shutil.rmtree(index / "uv", ignore_errors=True)
    Installer(python, "auto", []).install("thing")
    assert installed(python)["thing"] == "1.5"
    assert "uv cannot be installed here: pip installs the packages" in capfd.readouterr().out
    with pytest.raises(SystemExit, match="INSTALLER=uv"):
        Installer(python, "uv", []).install("thing")


def test_pip_takes_over_where_a_setting_has_no_counterpart(
    python: Path, index: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashes that somebody requires are not skipped for the sake of speed: pip refuses packages without them."""
    monkeypatch.setenv("PIP_REQUIRE_HASHES", "1")
    with pytest.raises(subprocess.CalledProcessError):
        Installer(python, "auto", []).install("thing")
    assert "uv has no counterpart of pip's setting 'require-hashes'" in capfd.readouterr().out
