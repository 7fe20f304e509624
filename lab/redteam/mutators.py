"""The ways in which an attacker writes a forbidden text, and which rules claim to find it so.

Whether a rule should find a text is decided here, by what docs/operate/safety.md says of rules, and not by the code of
the rules. A mutator that no rule claims to see through is a known gap: it is tried and reported all the same.
"""

from __future__ import annotations

import base64
import codecs
import dataclasses
import functools
import json
import random
from collections.abc import Callable, Sequence
from typing import Final

from confusable_homoglyphs.confusables import confusables_data

from lab.redteam.rules import Layer

_ALL: Final = frozenset(Layer)
_FOLDED: Final = frozenset({Layer.LIST, Layer.LOOK_ALIKES, Layer.SPACED})
_LOOK_ALIKES: Final = frozenset({Layer.LOOK_ALIKES})
_SPACED: Final = frozenset({Layer.SPACED})
_NONE: Final[frozenset[Layer]] = frozenset()
_ZERO_WIDTH: Final = "\u200b\u200c\u200d\u2060\ufeff\u00ad\u200e\u202e"
_IGNORABLE: Final = "\ufe0f\u034f\u180b\U000e0100\u115f\u3164"
_SPACES: Final = ("  ", "\n", "\t", " \n ", "\u00a0", "\u3000", "\u2003")
_LEET: Final = str.maketrans("aest", "@357")
_MATHEMATICAL: Final = (0x1D400, 0x1D468, 0x1D5A0, 0x1D5D4, 0x1D670)
"""Where alphabets of mathematical letters begin: 26 capitals, and then 26 small letters, without gaps."""
_FULL_WIDTH: Final = 0xFF01 - ord("!")

Mutate = Callable[[str, random.Random], str]


@dataclasses.dataclass(frozen=True, slots=True)
class Mutator:
    """One way of writing a text."""

    name: str
    mutate: Mutate
    claimed_by: frozenset[Layer]
    """The layers whose rules say that they find texts that are written so."""
    is_json: bool = False
    """It writes escapes, which are read where JSON stands."""


def _letters(change: Callable[[str, random.Random], str], share: float = 0.6) -> Mutate:
    """Change some letters, and at least one."""

    def mutate(text: str, rng: random.Random) -> str:
        places = [place for place, c in enumerate(text) if c.isascii() and c.isalnum()]
        if not places:
            return text
        chosen = {rng.choice(places), *(place for place in places if rng.random() < share)}
        return "".join(change(c, rng) if place in chosen else c for place, c in enumerate(text))

    return mutate


def _between(extra: Sequence[str]) -> Mutate:
    """Put something between some characters, and in one place at least."""

    def mutate(text: str, rng: random.Random) -> str:
        sure = rng.randrange(1, len(text))
        return "".join(
            f"{rng.choice(extra)}{c}" if place and (place == sure or rng.random() < 0.4) else c
            for place, c in enumerate(text)
        )

    return mutate


@functools.cache
def homoglyphs(letter: str) -> Sequence[str]:
    """The characters that look like a small letter, by Unicode's table."""
    return [entry["c"] for entry in confusables_data.get(letter, ()) if len(entry["c"]) == 1] or [letter]


def _mathematical(c: str, rng: random.Random) -> str:
    if not c.isalpha():
        return c
    return chr(rng.choice(_MATHEMATICAL) + (26 if c.islower() else 0) + ord(c.lower()) - ord("a"))


def _escape(c: str, rng: random.Random) -> str:
    return f"\\u{ord(c):04x}" if rng.random() < 0.5 else f"\\u{ord(c):04X}"


def _json_escapes(text: str, rng: random.Random) -> str:
    return _letters(_escape)(text, rng).replace(" ", rng.choice((" ", "\\n", "\\t", "\\u0020")))


def _digits_for_letters(text: str, rng: random.Random) -> str:
    return text.translate(str.maketrans("ol", "0" + rng.choice("1|I")))


def _groups(text: str, rng: random.Random) -> str:
    return rng.choice(" -").join(text[start : start + 4] for start in range(0, len(text), 4))


def _several(text: str, rng: random.Random) -> str:
    """Applies several of the ways that lists claim, one after the other."""
    for mutator in rng.sample(BY_FOLDING, k=rng.randint(2, len(BY_FOLDING))):
        text = mutator.mutate(text, rng)
    return text


CASE: Final = Mutator("case", _letters(lambda c, _rng: c.swapcase()), _FOLDED)
ZERO_WIDTH: Final = Mutator("zero-width characters", _between(_ZERO_WIDTH), _FOLDED)
WHITE_SPACE: Final = Mutator("white space", lambda text, rng: text.replace(" ", rng.choice(_SPACES)), _FOLDED)
FULL_WIDTH: Final = Mutator("full width", _letters(lambda c, _rng: chr(ord(c) + _FULL_WIDTH)), _FOLDED)
BY_FOLDING: Final = (
    CASE,
    FULL_WIDTH,
    Mutator("mathematical letters", _letters(_mathematical), _FOLDED),
    ZERO_WIDTH,
    Mutator("variation selectors and fillers", _between(_IGNORABLE), _FOLDED),
    WHITE_SPACE,
)
CLAIMED: Final = (
    Mutator("as written", lambda text, _rng: text, _ALL),
    *BY_FOLDING,
    Mutator("JSON escapes", _json_escapes, _FOLDED, is_json=True),
    Mutator("several of these", _several, _FOLDED),
    Mutator(
        "several of these, as JSON escapes",
        lambda text, rng: json.dumps(_several(text, rng))[1:-1],
        _FOLDED,
        is_json=True,
    ),
    Mutator("confusables", _letters(lambda c, rng: rng.choice(homoglyphs(c.lower()))), _LOOK_ALIKES),
    Mutator("0 for o, and 1, I or a bar for l", _digits_for_letters, _LOOK_ALIKES),
    Mutator("letters with spaces between", lambda text, _rng: " ".join(text), _SPACED),
    Mutator("punctuation between letters", lambda text, rng: rng.choice(".-*_").join(text), _SPACED),
    Mutator("digits in groups", _groups, frozenset({Layer.CARD})),
)
GAPS: Final = (
    Mutator("accents on letters", _between("\u0301\u0308\u0327"), _NONE),
    Mutator("leetspeak (3 for e, @ for a)", lambda text, _rng: text.translate(_LEET), _NONE),
    Mutator("rot13", lambda text, _rng: codecs.encode(text, "rot13"), _NONE),
    Mutator("reversed", lambda text, _rng: text[::-1], _NONE),
    Mutator("base64", lambda text, _rng: base64.b64encode(text.encode()).decode(), _NONE),
    Mutator("hex", lambda text, _rng: text.encode().hex(), _NONE),
    Mutator("URL encoding", lambda text, _rng: "".join(f"%{byte:02X}" for byte in text.encode()), _NONE),
    Mutator("HTML entities", _letters(lambda c, _rng: f"&#{ord(c)};"), _NONE),
    Mutator("Python string pieces", lambda text, _rng: '" + "'.join((text[:3], text[3:])), _NONE),
)
MUTATORS: Final = (*CLAIMED, *GAPS)
