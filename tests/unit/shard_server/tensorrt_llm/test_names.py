"""The library is not installed where this is written: every name of it that the adapter uses must be a real one."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom_common.config import ShardConfig, TensorRtLlmConfig
from shard_server.engines.base import EngineRequest, Sampling
from shard_server.engines.tensorrt_llm import api, known_names
from shard_server.engines.tensorrt_llm.api import load_tensorrt_llm
from shard_server.engines.tensorrt_llm.llm_options import llm_options
from shard_server.engines.tensorrt_llm.requests import sampling_params
from tests.conftest import REPOSITORY
from tests.fakes.fake_tensorrt_llm import NEWEST, RELEASE_1_2, Variant, configs, installed_tensorrt_llm
from tests.fakes.fake_tensorrt_llm.llm import FakeLlm
from tests.fakes.fake_tensorrt_llm.outputs import Aborter, CompletionOutput, Logprob, RequestOutput
from tests.unit.shard_server.tensorrt_llm import library_names
from tests.unit.shard_server.tensorrt_llm.test_sampling import INFO

PACKAGE = REPOSITORY / "shard_server" / "engines" / "tensorrt_llm"
PROTOCOLS = {
    "LLM": api.Llm,
    "RequestOutput": api.RequestOutput,
    "CompletionOutput": api.CompletionOutput,
    "Logprob": api.Logprob,
}


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name not in ("known_names.py", "versions.py"):
            yield path, ast.parse(path.read_text())


def public(names: set[str] | frozenset[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_protocols_list_only_real_attributes(name: str):
    """The type checker lets the adapter use nothing else of these objects."""
    protocol = PROTOCOLS[name]
    members = public(
        set(protocol.__annotations__) | {key for key in vars(protocol) if inspect.isfunction(vars(protocol)[key])}
    )
    assert members
    assert members <= library_names.OBJECTS[name]


OBJECTS_BY_VARIABLE = {
    "llm": library_names.OBJECTS["LLM"],
    "output": library_names.OBJECTS["RequestOutput"],
    "completion": library_names.OBJECTS["CompletionOutput"],
    "params": known_names.ARGUMENTS["DisaggregatedParams"],
}
OTHER_OUTPUTS = {"engine.py", "output_buffer.py"}
"""Where `output` is a StepOutput of ours."""


def test_every_attribute_of_the_librarys_objects_is_a_real_one():
    """By the variables that hold them: `llm`, `output`, `completion`, and what ends in `.output` or `._llm`."""
    found: dict[str, set[str]] = {}
    for path, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            holder = node.value
            name = (
                holder.id if isinstance(holder, ast.Name) else holder.attr if isinstance(holder, ast.Attribute) else ""
            )
            name = name.removeprefix("_")
            if name in OBJECTS_BY_VARIABLE and not (name == "output" and path.name in OTHER_OUTPUTS):
                found.setdefault(name, set()).add(node.attr)
    assert found.keys() == OBJECTS_BY_VARIABLE.keys()
    for name, attributes in found.items():
        assert attributes <= OBJECTS_BY_VARIABLE[name], name


def test_no_attribute_of_the_library_is_reached_untyped():
    """`getattr` with a made-up name would pass the type checker."""
    allowed = {
        "adapter",
        "model_fields",
        "json_schema_extra",
        "init",
        "validation_alias",
        "choices",
    }  # EngineRequest's future field, and pydantic's
    allowed |= known_names.ARGUMENTS["DisaggregatedParams"] | library_names.OBJECTS["LLM"]
    for path, tree in modules():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
            ):
                name = node.args[1]
                if isinstance(name, ast.Constant):
                    assert name.value in allowed | {"LLM"}, f"{path.name}: {name.value}"


def test_every_symbol_is_a_real_one():
    """`library.symbol("llmapi.KvCacheConfg")` would only fail on a machine with the library."""
    found: set[str] = set()
    for _, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                head = node.value.split(".")[0]
                if (
                    head in ("llmapi", "executor", "lora_helper")
                    and node.value[-1] != "."
                    and "." in node.value
                    and " " not in node.value
                ):
                    found.add(f"tensorrt_llm.{node.value}")
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("symbol", "find", "arguments_of", "knows")
                and isinstance(node.args[0], ast.Constant)
                and node.args[0].value not in known_names.ARGUMENTS
            ):
                found.add(f"tensorrt_llm.{node.args[0].value}")
    assert len(found) > 10
    assert found <= known_names.SYMBOLS


@pytest.mark.parametrize(
    ("module", "known"),
    [
        ("kv_cache/kv_records.py", library_names.EVENT_KEYS | library_names.EVENT_TYPES),
        ("kv_cache/kv_events.py", library_names.EVENT_KEYS | library_names.EVENT_TYPES),
        ("stats.py", library_names.STATS_KEYS),
    ],
)
def test_every_key_of_events_and_statistics_is_a_real_one(module: str, known: frozenset[str]):
    """A misspelt key reads as "nothing", for ever."""
    tree = ast.parse((PACKAGE / module).read_text())
    keys: set[str] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Constant)
            and isinstance(node.slice.value, str)
        ):
            keys.add(node.slice.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            keys |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
        if isinstance(node, ast.Compare):
            keys |= {
                item.value
                for item in node.comparators
                if isinstance(item, ast.Constant) and isinstance(item.value, str)
            }
    assert keys
    assert keys <= known


def test_every_argument_of_the_constructors_is_a_real_one(tmp_path: Path):
    """What kvloom adds of its own, with everything switched on: the fake's classes, which were written from the
    library, refuse others."""
    for release in (RELEASE_1_2, NEWEST):
        for decoding_type in ("NGram", "Eagle3", "MTP", "Draft_Target"):
            speculation = {"decoding_type": decoding_type, "max_draft_len": 3, "speculative_model": "draft"}
            given = {
                "speculative_config": speculation,
                "guided_decoding_backend": "xgrammar",
                "lora_config": {"lora_target_modules": ["attn_q"]},
                "cache_transceiver_config": {"backend": "UCX"},
                "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
            }
            shard = ShardConfig(tensorrt_llm=TensorRtLlmConfig(options=given), num_blocks=9, role="both")
            with installed_tensorrt_llm(Variant(release=release)):
                options = llm_options(load_tensorrt_llm(), tmp_path, shard, 512)
            assert options.keys() <= release.classes["TorchLlmArgs"].keys()
            assert options.keys() <= known_names.ARGUMENTS["LLM"]
    request = EngineRequest("a", [1], Sampling(1.0, 0.9, 5, 3, 0.5, 0.5, 2), 9, frozenset({2, 7}))
    arguments = sampling_params.sampling_arguments(request, INFO)
    assert arguments.keys() <= known_names.ARGUMENTS["SamplingParams"]


def test_every_keyword_of_a_call_to_the_library_is_a_real_one():
    """Of `library.build("llmapi.X", ...)`, and of the LLM's methods."""
    known = known_names.ARGUMENTS
    methods = {"generate_async": "LLM.generate_async", "get_stats": "LLM.get_stats"}
    checked = 0
    for path, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            keywords = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
            if node.func.attr == "build" and isinstance(node.args[0], ast.Constant):
                assert keywords <= known[str(node.args[0].value).split(".")[-1]], path.name
                checked += 1
            elif node.func.attr in methods:
                assert keywords <= known[methods[node.func.attr]], path.name
                checked += 1
    assert checked >= 3


def test_every_argument_that_is_looked_for_is_a_real_one():
    """`library.knows(path, "misspelt")` would be no for ever."""
    checked = 0
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "knows":
                argument = node.args[1]
                if isinstance(argument, ast.Constant):
                    assert any(argument.value in known for known in known_names.ARGUMENTS.values()), path.name
                    checked += 1
    assert checked >= 5


def test_the_fake_knows_nothing_of_the_adapter():
    """A fake that shares a table with what it is a test of would be wrong wherever that is."""
    package = REPOSITORY / "tests" / "fakes" / "fake_tensorrt_llm"
    for path in package.glob("*.py"):
        assert not re.search(r"^(from|import) shard_server", path.read_text(), re.MULTILINE), path.name


def test_the_outputs_of_the_fake_have_the_librarys_names():
    """They are in no table of releases."""
    request_output = RequestOutput(1, [1], configs.SamplingParams(), Aborter(None))
    assert (
        public(set(vars(request_output)) | set(vars(RequestOutput))) - {"misused", "responses", "abort_called"}
        <= (library_names.OBJECTS["RequestOutput"])
    )
    for fake, name in ((CompletionOutput, "CompletionOutput"), (Logprob, "Logprob")):
        assert {field.name for field in dataclasses.fields(fake)} <= library_names.OBJECTS[name]
    arguments = public(set(inspect.signature(FakeLlm.generate_async).parameters) - {"self"})
    assert arguments == set(NEWEST.generate)
