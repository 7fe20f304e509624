"""Every command that asks or changes a running fabric works in every layout: plain, with control, co-located, and with
several models. (tests/e2e/test_fabric_fleet.py gives the same commands on the machines of a fleet.)"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.fabric import RunningFabric, eventually, run_kvloom

LAYOUTS: Final = ("sim", "control", "colocated", "models")
ASKING: Final[Sequence[Sequence[str]]] = (
    ("status",),
    ("status", "--json"),
    ("logs", "--lines", "3"),
    ("models", "list"),
    ("models", "history"),
    ("metrics", "targets"),
    ("doctor", "security"),
    ("secret", "show"),
    ("chat", "Hello", "--max-tokens", "2"),
    ("explain", "--prompt", "Hello"),
    ("cache", "clear"),
)
"""Commands that need no argument which depends on the layout."""


@pytest.fixture(
    params=[
        pytest.param(
            name, marks=[pytest.mark.xdist_group(name), *([pytest.mark.long] * (name in ("sim", "colocated")))]
        )
        for name in LAYOUTS
    ]
)
def fabric(request: pytest.FixtureRequest) -> RunningFabric:
    return request.getfixturevalue(f"{request.param}_fabric")


def test_each_command_that_asks_answers(fabric: RunningFabric) -> None:
    """A command that was only ever tried on a plain fabric fails with tenants, or beside a second model."""
    for command in ASKING:
        done = run_kvloom(*command, env=fabric.env)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def test_a_reload_of_an_unchanged_file_changes_nothing(fabric: RunningFabric) -> None:
    """With tenants it said that there would be other processes, and so no key could ever be reloaded."""
    before = fabric.pids()
    done = run_kvloom("reload", env=fabric.env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "reloaded\n"
    assert fabric.pids() == before


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.xdist_group(name), *([pytest.mark.long] * (name != "control"))])
        for name in LAYOUTS
    ],
)
def test_a_shard_is_drained_filled_and_restarted(request: pytest.FixtureRequest, layout: str) -> None:
    """These are the commands of a night shift, which must not depend on what else runs."""
    fabric: RunningFabric = request.getfixturevalue(f"{layout}_fabric")
    shard = fabric.processes("shard")[0]["name"]
    for command in (("drain", shard), ("undrain", shard), ("restart", shard), ("restart", "edge")):
        done = run_kvloom(*command, env=fabric.env)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def test_models_that_are_served_are_listed(fabric: RunningFabric) -> None:
    """It said that no models are registered while three were served."""
    shown = run_kvloom("models", "list", env=fabric.env).stdout
    _, _, served = shown.partition("served now:\n")
    models = {process["model"] for process in fabric.processes("shard")}
    assert {line.split()[0] for line in served.splitlines()} >= models
    assert "ready, generate" in served


@pytest.mark.xdist_group("control")
def test_the_operators_organisation_is_reloaded(control_fabric: RunningFabric) -> None:
    """With an edge to restart, an administrator who was the operator's stayed it until somebody did."""
    fabric = control_fabric
    file = Path(fabric.env["KVLOOM_DATA_DIR"]).parent / "kvloom.toml"
    before_it = file.read_text()
    made = run_kvloom("keys", "create", "--project", "staff/ops", "--create", "--scope", "admin", env=fabric.env)
    assert "it may: administer its organisation; it may not: use models" in made.stderr
    key = made.stdout.strip()

    def status() -> int:
        request = urllib.request.Request(f"{fabric.http_url}/metrics", headers={"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    eventually("the key is known", lambda: status() == 403)
    before = fabric.pids()
    file.write_text(f'{before_it}operator_organisation = "staff"\n')
    try:
        lines = run_kvloom("reload", env=fabric.env).stdout
        assert lines == "  control.operator_organisation: applied\nreloaded\n"
        eventually("the key is an operator's", lambda: status() == 200)
    finally:
        file.write_text(before_it)
        run_kvloom("reload", env=fabric.env)
    eventually("the key is an operator's no more", lambda: status() == 403)
    assert fabric.pids() == before


@pytest.mark.xdist_group("control")
def test_a_route_to_a_model_that_nothing_serves_is_told(control_fabric: RunningFabric) -> None:
    """It started without a word, and every request by it went to the fallback, or failed."""
    fabric = control_fabric
    file = Path(fabric.env["KVLOOM_DATA_DIR"]).parent / "kvloom.toml"
    before_it = file.read_text()
    warning = "warning: the route smart names the model nowhere, which nothing serves"
    file.write_text(
        f'{before_it}[[routes]]\nname = "smart"\ntargets = ["nowhere"]\nfallback = ["smollm2-135m-instruct"]\n'
    )
    try:
        assert warning in run_kvloom("reload", env=fabric.env).stdout
        shown = run_kvloom("status", env=fabric.env)
        assert (shown.returncode, warning in shown.stdout) == (0, True)
        assert len(fabric.status()["warnings"]) == 1
    finally:
        file.write_text(before_it)
        run_kvloom("reload", env=fabric.env)
    assert fabric.status()["warnings"] == []
