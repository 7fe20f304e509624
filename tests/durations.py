"""How long the tests take, and how long those of a folder may take: recorded durations, so that no clock is judged.

    make durations                           records the last `make test`
    python -m tests.durations record REPORT  records a report of pytest (`--junitxml`)
    python -m tests.durations show [OTHER]   prints seconds by folder, beside those of another record

A test compares the record with the budgets (tests/unit/docs/test_durations.py). Seconds are those of one process,
set-up and tear-down included, on the machine that the record names; three processes on two cores take a third of
their sum.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parent.parent
RECORD: Final = REPOSITORY / "tests" / "durations.json"
BUDGET_SECONDS: Final = {
    "tests/conformance": 51,
    "tests/e2e": 414,
    "tests/fuzz": 14,
    "tests/integration": 538,
    "tests/lab": 98,
    "tests/property": 64,
    "tests/unit": 142,
}
"""Of `make test`, for each folder. A folder that needs more gets it from another one, or leaves a part to
`make test-long`: the whole must end within a quarter of an hour on two slow cores."""


def seconds_by_file(report: ElementTree.Element) -> dict[str, float]:
    """The seconds of each file of tests in a JUnit report, which calls a file by its module, and a class below it."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in report.iter("testcase"):
        seconds[_file_of(case.get("classname", ""))] += float(case.get("time", "0"))
    return {file: round(seconds[file], 2) for file in sorted(seconds)}


def seconds_by_folder(files: Mapping[str, float]) -> dict[str, float]:
    """Likewise of each folder below tests/."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for file, own in files.items():
        seconds["/".join(file.split("/")[:2])] += own
    return dict(seconds)


def _file_of(module: str) -> str:
    """The path of `tests.unit.test_x` and of a class `tests.unit.test_x.TestY` inside."""
    path = Path(*module.split("."))
    while not (REPOSITORY / path.with_suffix(".py")).exists() and path.parent != path:
        path = path.parent
    return path.with_suffix(".py").as_posix()


def _machine() -> str:
    names = [line for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    model = names[0].partition(":")[2].strip() if names else platform.processor()
    return f"{os.cpu_count()} x {model or platform.machine()}, Python {platform.python_version()}"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _table(record: Mapping[str, float], other: Mapping[str, float]) -> Iterable[str]:
    folders, others = seconds_by_folder(record), seconds_by_folder(other)
    for folder in sorted(folders | others):
        beside = f"{others.get(folder, 0):10.0f}" if other else ""
        yield f"{folder:24}{folders.get(folder, 0):10.0f}{beside}  of {BUDGET_SECONDS.get(folder, 0)}"
    beside = f"{sum(others.values()):10.0f}" if other else ""
    yield f"{'all':24}{sum(folders.values()):10.0f}{beside}  of {sum(BUDGET_SECONDS.values())}"


def recorded(path: Path = RECORD) -> dict[str, float]:
    """The seconds of each file."""
    return json.loads(path.read_text())["seconds"]


def main(command: str = "", path: str | None = None) -> None:
    if command == "record" and path is not None:
        files = seconds_by_file(ElementTree.parse(path).getroot())
        RECORD.write_text(json.dumps({"machine": _machine(), "seconds": files}, indent=0) + "\n")
        print(*_table(files, {}), sep="\n")
    elif command == "show":
        print(*_table(recorded(), {} if path is None else recorded(Path(path))), sep="\n")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
