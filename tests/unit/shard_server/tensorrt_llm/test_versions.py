"""The table of releases: names, and what becomes of a release that it does not have."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping

import pytest

from kvloom_common.config import TensorRtLlmConfig
from shard_server.engines.base import Capability
from shard_server.engines.tensorrt_llm import known_names
from shard_server.engines.tensorrt_llm.api import TensorRtLlm
from shard_server.engines.tensorrt_llm.llm_options import LORA
from shard_server.engines.tensorrt_llm.versions import NEWEST, RELEASE_1_2, Release, release_of
from tests.conformance.engine_driver import prompt_of, request_of
from tests.fakes import fake_tensorrt_llm as fake
from tests.fakes.fake_tensorrt_llm import IN_NEWEST, LibraryRelease, RequestError, Variant, installed_tensorrt_llm
from tests.fakes.fake_tensorrt_llm.releases import Alias, Deprecated
from tests.fakes.tensorrt_llm_engine import running_tensorrt_llm

TRANSCEIVER = "CacheTransceiverConfig"
PAIRS = pytest.mark.parametrize(
    ("release", "library"),
    [(RELEASE_1_2, fake.RELEASE_1_2), (NEWEST, fake.NEWEST)],
    ids=lambda release: release.name,
)
"""The adapter's table of a release, and that which was written from the library."""


@PAIRS
def test_the_table_agrees_with_the_library(release: Release, library: LibraryRelease):
    """The two were written apart: a name that only one of them has is wrong in one of them."""
    assert release.name == library.name
    names = {
        "LLM": library.classes["TorchLlmArgs"],
        "LLM.generate_async": library.generate,
        "SamplingParams": library.sampling,
        "DisaggregatedParams": library.handoff,
        **library.classes,
    }
    checked = 0
    for name in known_names.ARGUMENTS.keys() & names.keys():
        fields = names[name]
        defaults = fields if isinstance(fields, Mapping) else dict.fromkeys(fields)
        aliases = {default.name for default in defaults.values() if isinstance(default, Alias)}
        assert release.arguments(name) == known_names.ARGUMENTS[name] & {*fields, *aliases}, name
        deprecated = {key for key, default in defaults.items() if isinstance(default, Deprecated)}
        assert release.ignores.get(name, frozenset()) == deprecated, name
        checked += 1
    assert checked > 12
    assert release.transceivers == set(library.transceivers)
    assert release.hands_over_serially == library.context_only_needs_serial_scheduler
    one_model = {name.upper().replace("_", "") for name in library.one_model}
    assert not release.logprobs_beside & one_model
    applied = {
        Capability.MIN_P: "min_p",
        Capability.LOGIT_BIAS: "embedding_bias",
        Capability.PENALTIES: "presence_penalty",
        Capability.REPETITION_PENALTY: "repetition_penalty",
    }
    assert release.sampler == {one for one, name in applied.items() if name in library.sampler_applies}


@PAIRS
def test_every_symbol_that_is_always_used_is_there(release: Release, library: LibraryRelease):
    """The others are looked for before they are used."""
    optional = {"Eagle3DecodingConfig", "PARDDecodingConfig", "SADecodingConfig", "DFlashDecodingConfig", "LoraConfig"}
    with installed_tensorrt_llm(Variant(release=library)):
        installed = TensorRtLlm(release.name, RequestError)
        for symbol in known_names.SYMBOLS:
            path = symbol.removeprefix("tensorrt_llm.")
            assert installed.find(path) is not None or path.rpartition(".")[2] in optional, path
        assert any(installed.find(path) is not None for path in LORA)


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("1.2.1", RELEASE_1_2),
        ("1.2.7", RELEASE_1_2),
        ("1.0.0", RELEASE_1_2),
        ("a build", RELEASE_1_2),
        ("1.3.0rc21", NEWEST),
        ("1.4.0rc4", NEWEST),
        ("2.0", NEWEST),
    ],
)
def test_a_version_behaves_like_the_newest_known_one_before_it(version: str, release: Release):
    """Also one that did not exist when this was written."""
    assert release_of(version) is release


async def test_an_unknown_newer_release_is_used_by_what_it_has():
    """An operator who updates the library must not have to wait for an update of kvloom."""
    classes = {name: dict(fields) for name, fields in fake.NEWEST.classes.items()}
    del classes[TRANSCEIVER]["max_tokens_in_buffer"]
    unknown = dataclasses.replace(fake.NEWEST, name="2.7.0", classes=classes)
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
