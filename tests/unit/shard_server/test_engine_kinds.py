"""What others know of an engine: they ask what it needs and can share, never what it is called."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom_common.config import ShardConfig, SimConfig, TorchConfig
from shard_server.engines.engine_kinds import BUILT_IN, engine_kind, imported, shards_per_process

ROOT = Path(__file__).parents[3]
FOLDERS = ("kvloom", "kvloom_common", "edge_http", "router", "shard_server", "safety_svc", "control", "tools")
OWN = ("shard_server/engines", "kvloom_common/config")
"""The engines themselves, and the keys of their configuration."""


def names_asked(source: str) -> Iterator[int]:
    """The lines that compare something called an engine with a name of one, or look it up by the name."""
    if not any(f'"{name}"' in source for name in BUILT_IN):
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left=left, comparators=[right]):
                sides = (left, right)
            case ast.Subscript(value=left, slice=right):
                sides = (left, right)
            case ast.Match(subject=subject, cases=cases):
                sides = (subject, *(case.pattern for case in cases))
            case _:
                continue
        constants = {
            inner.value for side in sides for inner in ast.walk(side) if isinstance(inner, ast.Constant)
        }.intersection(BUILT_IN)
        words = {
            name
            for side in sides
            for inner in ast.walk(side)
            for name in [getattr(inner, "attr", getattr(inner, "id", ""))]
        }
        if constants and any("engine" in word.lower() for word in words):
            yield node.lineno


def test_names_of_engines_are_asked_nowhere() -> None:
    """An engine that a name in the supervisor or the doctor knows is one that a plugin cannot be."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(OWN)
        for line in names_asked(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        'if settings.engine == "sim" and x: ...',
        'x = engine in ("sim", "torch")',
        'match shard.engine:\n    case "torch": ...',
        'x = BY_ENGINE["tensorrt_llm"]',
    ],
)
def test_each_way_to_ask_a_name_is_found(source: str) -> None:
    assert list(names_asked(source))


def test_a_package_or_a_kernel_of_that_name_is_none() -> None:
    assert not list(names_asked('x = wanted.kernels == "torch"; y = versions["torch"]'))


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_a_kind_refers_to_exists(name: str) -> None:
    kind = engine_kind(name)
    assert callable(imported(kind.factory))
    assert not kind.library_rows or callable(imported(kind.library_rows))


def test_a_plugins_engine_may_need_a_gpu_of_its_own() -> None:
    """What is not known of it: a second one beside it could find its device full."""
    assert not engine_kind("acme").is_on_cpu(ShardConfig(engine="acme"))
    assert engine_kind("acme").reads_weights


def test_what_a_kind_says_follows_from_its_settings() -> None:
    assert engine_kind("torch").is_on_cpu(ShardConfig())
    assert not engine_kind("torch").is_on_cpu(ShardConfig(torch=TorchConfig(device="cuda")))
    several = SimConfig(shards_per_process=4)
    assert shards_per_process(ShardConfig(engine="sim", sim=several)) == 4
    assert shards_per_process(ShardConfig(engine="torch", sim=several)) == 1
