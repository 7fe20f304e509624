"""deploy/: what images copy exists, versions are pinned and agree, nothing runs as root or writes to its root."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.conftest import REPOSITORY

DEPLOY: Final = REPOSITORY / "deploy"
IMAGES: Final = sorted((DEPLOY / "images").glob("*.Dockerfile"))
COMPOSE: Final[dict[str, Any]] = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
CHART: Final = DEPLOY / "helm" / "kvloom"
OURS: Final = {name: one for name, one in COMPOSE["services"].items() if one["image"].startswith("kvloom-")}


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    lines = [line for line in dockerfile.read_text().splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("dockerfile", IMAGES, ids=lambda path: path.stem)
class TestDockerfile:
    def test_what_is_copied_exists_and_is_not_ignored(self, dockerfile: Path) -> None:
        """A renamed folder would only be noticed by whoever builds the image."""
        allowed = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
        copied = [path for name, rest in instructions(dockerfile) if name == "COPY" for path in rest.split()[:-1]]
        own = [path for path in copied if not path.startswith(("--from", "/"))]
        assert len(own) >= 15
        for path in own:
            assert (REPOSITORY / path).exists(), path
            assert path in allowed, path

    def test_every_folder_of_the_wheel_is_copied(self, dockerfile: Path) -> None:
        """The fabric's wheel lists its folders; one that is missing in the image fails its build."""
        shipped = re.findall(r'"(\w+)"', re.findall(r"SERVICES[^\n]*= \((.*?)\)", _fabric_main(), re.DOTALL)[0])
        copied = {rest.split()[0] for name, rest in instructions(dockerfile) if name == "COPY"}
        assert {*shipped, "kvloom", "kvloom_common", "tools", "fabric", "protos"} <= copied

    def test_versions_are_pinned_as_they_are_elsewhere(self, dockerfile: Path) -> None:
        """Two builds of one commit have the same packages, and stubs fit the runtime."""
        text = dockerfile.read_text()
        assert all(re.search(r":\d+\.\d+\.\d+-slim", image) for image in re.findall(r"^FROM (\S+)", text, re.MULTILINE))
        pins = dict(re.findall(r"([\w-]+)==([\d.]+)", text))
        required = dict(re.findall(r'"([\w-]+)==([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text()))
        assert {name: pins[name] for name in required} == required
        assert "--constraint constraints.txt" in text
        assert f"cyclonedx-bom=={pins['cyclonedx-bom']}" in (REPOSITORY / "Makefile").read_text()

    def test_it_does_not_run_as_root_and_says_how_it_is(self, dockerfile: Path) -> None:
        """A process that is taken over must not own its image."""
        found = dict(instructions(dockerfile))
        assert found["USER"] == "10001:10001"
        assert "kvloom" in found["HEALTHCHECK"]
        assert found["STOPSIGNAL"] == "SIGTERM"
        assert "/opt/kvloom/sbom.json" in dockerfile.read_text()


def _fabric_main() -> str:
    return (REPOSITORY / "fabric" / "kvloom_fabric" / "__main__.py").read_text()


def test_the_compose_file_names_images_that_there_are() -> None:
    """One command starts PostgreSQL, Redis, the services and a shard."""
    assert set(COMPOSE["services"]) == {"front", "shard", "redis", "postgres"}
    for one in OURS.values():
        assert (DEPLOY / "compose" / one["build"]["context"] / one["build"]["dockerfile"]).resolve() in IMAGES
        assert one["read_only"]
        assert one["user"] == "10001:10001"
        assert one["cap_drop"] == ["ALL"]
    for name in ("redis", "postgres"):
        assert re.search(r":\d+\.\d+", COMPOSE["services"][name]["image"]), "pinned"
        assert "healthcheck" in COMPOSE["services"][name]
    variables = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose" / "compose.yaml").read_text()))
    assert variables == set(re.findall(r"^(\w+)=$", (DEPLOY / "compose" / "example.env").read_text(), re.MULTILINE))


def test_the_commands_of_compose_and_chart_have_flags_that_there_are() -> None:
    """A flag that was renamed must not be found out by a container that does not start."""
    import tools.cli.up
    import tools.scaler.command

    known = {
        "up": {name for option in tools.cli.up.up.params for name in option.opts},
        "scaler": {name for option in tools.scaler.command.scaler.params for name in option.opts},
    }
    commands = [one["command"] for one in OURS.values()]
    for template in (CHART / "templates").glob("*.yaml"):
        found = re.findall(r"^ +args: \[(.*)\]$", template.read_text(), re.MULTILINE)
        commands += [[word.strip() for word in re.sub(r"\{\{.*?\}\}", "", args).split(",")] for args in found]
    assert len(commands) == 6
    for command, *words in commands:
        assert {word for word in words if word.startswith("--")} <= known[command], command


def test_the_chart_has_the_version_of_the_package() -> None:
    """`helm upgrade` names the version that runs."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.findall(r'^version = "(.+)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)[0]
    assert (chart["version"], chart["appVersion"]) == (version, version)
    images = yaml.safe_load((CHART / "values.yaml").read_text())["images"]
    assert {images["services"], images["torch"]} == {f"kvloom-services:{version}", f"kvloom-torch:{version}"}
