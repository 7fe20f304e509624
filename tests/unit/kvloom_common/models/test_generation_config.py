"""Models say how their answers are best generated; vLLM's users expect that a server reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvloom_common.config import GenerationDefaults, ModelConfig
from kvloom_common.models.model_card import with_generation_config


def defaults(folder: Path, given: Any, **config: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(given))
    return with_generation_config(ModelConfig(**config), folder)


def test_its_sampling_counts(tmp_path: Path) -> None:
    """What is not about sampling is left out."""
    given = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "max_new_tokens": 2048,
        "do_sample": True,
        "eos_token_id": 2,
    }
    assert defaults(tmp_path, given) == GenerationDefaults(temperature=0.6, top_p=0.95, top_k=20, max_tokens=2048)


def test_the_configuration_has_precedence(tmp_path: Path) -> None:
    """The operator's word counts, and can switch the file off."""
    given = {"temperature": 0.6, "top_p": 0.95}
    own = GenerationDefaults(temperature=0.0)
    assert defaults(tmp_path, given, defaults=own) == GenerationDefaults(temperature=0.0, top_p=0.95)
    assert defaults(tmp_path, given, reads_generation_config=False) == GenerationDefaults()


@pytest.mark.parametrize("value", [None, "hot", -1, 99, [0.5]])
def test_values_that_no_request_may_have_are_absent(tmp_path: Path, value: Any) -> None:
    """A model whose file has one is served all the same."""
    assert defaults(tmp_path, {"temperature": value, "top_p": 0.5}) == GenerationDefaults(top_p=0.5)


def test_a_model_without_the_file(tmp_path: Path) -> None:
    """Many have none."""
    assert with_generation_config(ModelConfig(), tmp_path) == GenerationDefaults()


def test_the_built_in_model_has_those_of_its_card(model_dir: Path) -> None:
    """At OpenAI's default temperature of 1 a model of its size writes nonsense."""
    found = with_generation_config(ModelConfig(), model_dir)
    assert (found.temperature, found.top_p) == (0.2, 0.9)
