"""The table of releases: names, and what becomes of a release that it does not have."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from kvloom_common.config import TensorRtLlmConfig
from shard_server.engines.tensorrt_llm import known_names
from shard_server.engines.tensorrt_llm.api import TensorRtLlm, argument_names
from shard_server.engines.tensorrt_llm.versions import NEWEST, RELEASE_1_2, RELEASES, Release, release_of
from tests.conformance.engine_driver import prompt_of, request_of
from tests.fakes.fake_tensorrt_llm import IN_1_2, IN_NEWEST, RequestError, Variant, installed_tensorrt_llm
from tests.fakes.tensorrt_llm_engine import running_tensorrt_llm

TRANSCEIVER = "CacheTransceiverConfig"


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_a_release_lacks_and_ignores_only_known_names(release: Release):
    """A misspelt name in the table would mean that the release has everything."""
    for name, lacking in release.lacks.items():
        assert lacking <= known_names.ARGUMENTS[name]
    for name, ignored in release.ignores.items():
        assert ignored <= release.arguments(name)
    for name, lacking in release.lacks_attributes.items():
        assert lacking <= known_names.OBJECTS[name]
    for name, defaults in release.defaults.items():
        assert defaults.keys() <= release.arguments(name)
    assert {f"tensorrt_llm.{symbol}" for symbol in release.lacks_symbols} <= known_names.SYMBOLS


@pytest.mark.parametrize("variant", [IN_1_2, IN_NEWEST], ids=["1.2.1", "newest"])
def test_the_fake_has_the_fields_of_its_release(variant: Variant):
    """A field that only another release has would let the adapter pass it here and fail on a GPU machine."""
    with installed_tensorrt_llm(variant):
        library = TensorRtLlm(variant.release.name, RequestError)
        for symbol in known_names.SYMBOLS:
            path = symbol.removeprefix("tensorrt_llm.")
            name = path.split(".")[-1]
            found = library.find(path)
            assert (found is not None) == variant.release.has_symbol(path), path
            if found is not None and path.startswith("llmapi.") and name in known_names.ARGUMENTS:
                arguments = argument_names(found)
                assert arguments is not None
                assert arguments <= variant.release.arguments(name), path


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("1.2.1", RELEASE_1_2),
        ("1.2.7", RELEASE_1_2),
        ("1.0.0", RELEASE_1_2),
        ("a build", RELEASE_1_2),
        ("1.3.0rc21", NEWEST),
        ("1.4.0rc1", NEWEST),
        ("2.0", NEWEST),
    ],
)
def test_a_version_behaves_like_the_newest_known_one_before_it(version: str, release: Release):
    """Also one that did not exist when this was written."""
    assert release_of(version) is release


async def test_an_unknown_newer_release_is_used_by_what_it_has():
    """An operator who updates the library must not have to wait for an update of kvloom."""
    without = {TRANSCEIVER: frozenset({"max_tokens_in_buffer"}), "KvCacheConfig": frozenset({"disk_cache_size"})}
    unknown = dataclasses.replace(NEWEST, name="2.7.0", version=(2, 7), lacks={**NEWEST.lacks, **without})
    async with running_tensorrt_llm(Variant(release=unknown), TensorRtLlmConfig()) as (driver, _):
        (tokens,) = await driver.run(request_of("a", prompt_of(1, 40), 5))
        assert len(tokens) == 5
    with installed_tensorrt_llm(Variant(release=unknown)):
        library = TensorRtLlm("2.7.0", RequestError)
        assert not library.knows(f"llmapi.{TRANSCEIVER}", "max_tokens_in_buffer")
        assert not library.knows("llmapi.MTPDecodingConfig", "allow_advanced_sampling")
        assert library.knows("llmapi.MTPDecodingConfig", "max_draft_len")


def test_what_cannot_be_looked_at_is_as_in_the_nearest_release(monkeypatch: pytest.MonkeyPatch):
    """A class that takes any arguments shows nothing of what it knows."""

    class Opaque:
        def __init__(self, **arguments: object) -> None:
            pass

    with installed_tensorrt_llm(IN_NEWEST):
        monkeypatch.setattr(sys.modules["tensorrt_llm.llmapi"], "MTPDecodingConfig", Opaque)
        path = "llmapi.MTPDecodingConfig"
        assert TensorRtLlm("1.2.1", RequestError).knows(path, "num_nextn_predict_layers")
        assert not TensorRtLlm("1.3.0", RequestError).knows(path, "num_nextn_predict_layers")
        connector = "llmapi.llm_args.KvCacheConnectorConfig"
        monkeypatch.setattr(sys.modules["tensorrt_llm.llmapi.llm_args"], "KvCacheConnectorConfig", Opaque)
        assert not TensorRtLlm("1.2.1", RequestError).knows(connector, "connector")
        assert TensorRtLlm("1.3.0", RequestError).knows(connector, "connector")


def test_a_method_is_looked_at_like_a_class():
    """Without salts tenants would share their cached prefixes."""
    for takes_salt in (True, False):
        with installed_tensorrt_llm(Variant(takes_cache_salt=takes_salt)):
            library = TensorRtLlm("1.2.1", RequestError)
            assert library.knows("LLM.generate_async", "cache_salt") == takes_salt
            assert not library.knows("LLM.no_such_method", "cache_salt")
            assert not library.knows("no_such_module.Thing", "cache_salt")
