"""deploy/observe: alerts and dashboards ask for metrics that exist, and every alert has a runbook."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conftest import REPOSITORY

OBSERVE: Final = REPOSITORY / "deploy" / "observe"
RULES: Final = (OBSERVE / "rules.yml").read_text()
RUNBOOKS: Final = (REPOSITORY / "docs" / "operate" / "alerts.md").read_text()
METRIC: Final = re.compile(r"\b(?:kvloom_|vllm:|gen_ai_)[a-z_]+")
PROMTOOL: Final = os.pathsep.join([os.environ["PATH"], str(REPOSITORY / "build" / "prometheus" / "usr" / "bin")])


def dashboards() -> Any:
    spec = importlib.util.spec_from_file_location("dashboards", OBSERVE / "dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def queries() -> list[str]:
    found = re.findall(r"^ +expr: (.*)$", RULES, re.MULTILINE)
    for name in dashboards().DASHBOARDS:
        panels = json.loads((OBSERVE / "dashboards" / f"{name}.json").read_text())["panels"]
        found += [target["expr"] for panel in panels for target in panel["targets"]]
    return found


def test_every_metric_exists() -> None:
    """A renamed metric would make an alert silent and a panel empty."""
    page = (REPOSITORY / "docs" / "reference" / "metrics.md").read_text()
    known = set(re.findall(r"^\| `([\w:]+)` \|", page, re.MULTILINE))
    known |= {f"{name}{end}" for name in known if name.endswith("_seconds") for end in ("_bucket", "_count", "_sum")}
    asked = {name for query in queries() for name in METRIC.findall(query) if not name.endswith("_")}
    assert len(asked) > 30
    assert not asked - known


def test_the_dashboards_are_those_of_the_table() -> None:
    """`python deploy/observe/dashboards.py` writes them."""
    module = dashboards()
    for name in module.DASHBOARDS:
        assert (OBSERVE / "dashboards" / f"{name}.json").read_text() == module.text_of(name)


def test_every_alert_has_a_runbook_and_a_test() -> None:
    """Whoever is woken must know what to do."""
    alerts = re.findall(r"- alert: (\w+)", RULES)
    assert len(alerts) == len(set(alerts)) >= 12
    assert re.findall(r"^### (Kvloom\w+)$", RUNBOOKS, re.MULTILINE) == alerts
    tested = set(re.findall(r"alertname: (\w+)", (OBSERVE / "rules_test.yml").read_text()))
    assert tested == set(alerts)


@pytest.mark.skipif(shutil.which("promtool", path=PROMTOOL) is None, reason="`make observe` fetches promtool")
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """By Prometheus' own tool, with series that tests make up; it also reads the dashboards' queries."""
    promtool = str(shutil.which("promtool", path=PROMTOOL))

    def run(*arguments: str) -> str:
        done = subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("test", "rules", str(OBSERVE / "rules_test.yml"))
    rules = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(queries())]
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"{len(rules)} rules found" in run("check", "rules", str(file))
