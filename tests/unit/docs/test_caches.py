"""docs/reference/caches.md lists every cache of the services with its key: a cache that all tenants share tells one of
them what another has sent."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from edge_http.openai import logprobs
from edge_http.wire import sse
from kvloom.text import token_ids
from kvloom_common.access.kv_shares import CacheSalts, KvShares
from kvloom_common.parsers import registry
from kvloom_common.text import block_hash
from router.core.expected_output import ExpectedOutput
from safety_svc import folding
from shard_server.engines import sim_tokens
from tests.conftest import REPOSITORY

SERVICES: Final = (
    "kvloom",
    "kvloom_common",
    "edge_http",
    "router",
    "safety_svc",
    "shard_server",
    "control",
    "orchestrator",
    "fabric",
)
_ROW: Final = re.compile(r"^\| (?!what is kept|---).*\|$", re.MULTILINE)


def section() -> str:
    return (REPOSITORY / "docs/reference/caches.md").read_text()


def has_cache(path: Path) -> bool:
    """Whether a module remembers results by decorators, or has a dictionary from which it evicts in order."""
    source = path.read_text()
    if not any(name in source for name in ("lru_cache", "OrderedDict", "functools.cache", "Cache")):
        return False  # parsing takes milliseconds
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            is_cache = name == "cache" and ast.unparse(node) == "functools.cache"
            if name in ("lru_cache", "OrderedDict", "ScopedCache") or is_cache:
                return True
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Cache", "Caches")):
            return True
    return False


def modules() -> Iterator[Path]:
    for service in SERVICES:
        yield from (path for path in (REPOSITORY / service).rglob("*.py") if not path.name.endswith("_pb2.py"))


NO_CACHES: Final = {
    "edge_http/metrics.py",
    "kvloom_common/config/keys.py",  # the definition of the settings
    "kvloom_common/config/router.py",  # settings
    "kvloom_common/limits/fair_threads.py",  # a queue
    "kvloom_common/limits/scoped_cache.py",  # how its users, which count, keep things
    "router/features/result_cache/cache.py",  # keeps nothing itself: see memory.py
    "shard_server/engines/torch_engine/kv_cache.py",  # the KV's tensors: see block_pool.py
}


def test_the_page_lists_every_cache() -> None:
    """A new cache must be asked who shares it."""
    listed = re.findall(r"`([\w./]+)`", section())
    folders = tuple(path for path in listed if path.endswith("/"))
    found = {str(path.relative_to(REPOSITORY)) for path in modules() if has_cache(path)} - NO_CACHES
    assert not sorted(path for path in found if path not in listed and not path.startswith(folders))
    assert not [path for path in listed if "/" in path and not (REPOSITORY / path).exists()]


def test_every_row_names_a_test_that_exists() -> None:
    """A claim without one is a hope."""
    defined = "\n".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
    rows = _ROW.findall(section())
    assert len(rows) > 8
    for row in rows:
        named = re.findall(r"`([\w./]+)`", row.split("|")[-2])
        assert named, row
        for name in named:
            assert (REPOSITORY / name).exists() if "/" in name else f"def {name}(" in defined, name


def test_every_fact_is_kept_for_its_caller() -> None:
    """What is remembered of one caller is not found by another one."""
    salts = CacheSalts(b"k" * 32, lambda caller: "shared" if caller.startswith("acme/") else "")
    assert salts.of("a/b") != salts.of("a/c")
    assert salts.of("acme/x") == salts.of("acme/y") != salts.of("shared")
    shares = KvShares(b"k" * 32, lambda caller: (caller, 10))
    assert shares.of("a/b") != shares.of("a/c")
    expected = ExpectedOutput()
    before = expected.tokens("key-2", "model")
    for _ in range(50):
        expected.learn("key-1", "model", 4000.0)
    assert expected.tokens("key-2", "model") == before != expected.tokens("key-1", "model")


def parameters_of(cached: functools._lru_cache_wrapper[object]) -> list[str]:
    annotations = dict(cached.__wrapped__.__annotations__)
    return [str(annotations[name]) for name in annotations if name != "return"]


@pytest.mark.parametrize(
    "cached",
    [logprobs._around_logprob, folding.fold_character, sim_tokens._token_vector],
    ids=lambda cached: cached.__name__,
)
def test_only_single_tokens_and_characters_are_common(cached: functools._lru_cache_wrapper[object]) -> None:
    """Their results depend on one token's id or one character, and they are bounded."""
    assert set(parameters_of(cached)) <= {"ModelTokenizer", "int", "str"}
    assert cached.cache_parameters()["maxsize"] is not None
    if cached is folding.fold_character:
        before = cached.cache_info().currsize
        folding.fold("ǅungle ﬁve 4711 secret")
        assert cached.cache_info().currsize - before <= len("ǅungle ﬁve 4711 secret"), "by character, not by text"


@pytest.mark.parametrize(
    ("cached", "kinds"),
    [
        (token_ids._offsets, ["int"]),  # the size of a vocabulary
        (block_hash._block_of, ["int"]),  # the size of a block
        (registry.tool_family, ["str"]),  # names that model cards have
        (registry.reasoning_family, ["str"]),
        (sse._date_line, ["int"]),  # the second of the clock
    ],
)
def test_what_is_common_takes_nothing_of_a_request(
    cached: functools._lru_cache_wrapper[object], kinds: list[str]
) -> None:
    """Its arguments are sizes, names and times."""
    assert parameters_of(cached) == kinds
