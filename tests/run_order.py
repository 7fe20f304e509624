"""In which order, and in which process of pytest-xdist, tests run: what takes longest begins first, so that all
processes end together; fabrics, whose many processes take the cores from one another, run one after another as far as
that goes, beside other tests; and so do tests of compiled kernels, of which the first compiles what all others wait
for, in a minute or two on a slow machine."""

from __future__ import annotations

import functools
import math
import os
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from _pytest.nodeid import NodeId
from xdist.scheduler import LoadGroupScheduling

from tests.durations import recorded

COMPILED = re.compile("torch_engine|TorchEngine")
"""In the source of files whose tests compile kernels, or wait until another process has."""
HEAD_START = 0.06
"""The share of the run after which they begin: the first fabric has compiled most by then."""


class FilesAndGroups(LoadGroupScheduling):
    """Gives a process of pytest-xdist the tests of a group (marker `xdist_group`), which share a fabric, or else of a
    file."""

    def _split_scope(self, nodeid: str) -> str:
        scope = super()._split_scope(nodeid)
        return nodeid.partition("::")[0] if scope == nodeid else scope


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesAndGroups:
    return FilesAndGroups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A whole file or group at a time; all processes of pytest-xdist must agree on the order."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        begins = begin_of_groups(items)
        items.sort(key=lambda item: (begins[group_of(item)], group_of(item)))
        for item in items:
            _name_group(item)


def begin_of_groups(items: list[pytest.Item]) -> dict[str, float]:
    """After which share of the whole run a group begins. Groups with fabrics are one sequence, those with compiled
    kernels another, all others a third."""
    seconds = seconds_by_group(items)
    with_fabrics = {group_of(item) for item in items if "/e2e/" in _file_of(item)}
    with_kernels = {group_of(item) for item in items if compiles(item.path)} - with_fabrics
    begins: dict[str, float] = {}
    for groups in (with_fabrics, with_kernels, seconds.keys() - with_fabrics - with_kernels):
        own_seconds = math.fsum(seconds[group] for group in groups)  # which is the same in every order
        before = HEAD_START * own_seconds if groups is with_kernels else 0.0
        for group in sorted(groups, key=lambda group: (-seconds[group], group)):
            begins[group] = before / own_seconds if own_seconds else 0.0
            before += seconds[group]
    return begins


def seconds_by_group(items: list[pytest.Item]) -> dict[str, float]:
    """What is recorded of a file counts for its tests in equal parts, since they may belong to several groups."""
    record = recorded()
    num_tests = Counter(map(_file_of, items))
    seconds: defaultdict[str, float] = defaultdict(float)
    for item in items:
        seconds[group_of(item)] += record.get(_file_of(item), 0.0) / num_tests[_file_of(item)]
    return seconds


@functools.cache
def compiles(file: Path) -> bool:
    """Says if tests of the file need compiled kernels."""
    return bool(COMPILED.search(file.read_text()))


def group_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    return _file_of(item) if marker is None else marker.args[0]


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _name_group(item: pytest.Item) -> None:
    """The scheduler knows a test's group by the end of its id. pytest-xdist 3.8 appends it in a way that pytest 9.2
    takes no notice of."""
    group = item.get_closest_marker("xdist_group")
    if group is not None and not item.nodeid.endswith(f"@{group.args[0]}"):
        item._id = NodeId.parse(f"{item.nodeid}@{group.args[0]}")
