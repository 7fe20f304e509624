"""Harmless texts that look like forbidden ones: near misses of each rule, and ordinary writing in many scripts."""

from __future__ import annotations

import base64
import json
import random
import string
from collections.abc import Callable, Sequence
from typing import Final

from stdnum import luhn

from lab.redteam.mutators import BY_FOLDING, MUTATORS, Mutator
from lab.redteam.rules import PHRASES, Layer, forbidden_text

_OTHER_LETTERS: Final = "xkqw"
"""Letters that no phrase has, and that look like none of theirs."""
_WORDS: Final = (
    *("please", "the", "of", "report", "a", "for", "weather", "in", "Lyon", "garden", "seven", "books", "and", "then"),
    *("launch", "code", "agent", "silver", "falcon", "vault", "open", "lotus", "file", "zebra", "AKIA", "protocol"),
    *("naïve", "Straße", "日本語", "привет", "γειά", "שלום", "🙂", "\u200bcafé", "ﬁne", "x\\n", "C:\\new", '\\"so\\"'),
)
_NUMBERS: Final = ("2026-11-28", "12:30:59", "+1-555-0100", "978-3-16-148410-0", "3.14159265358979", "192.168.0.1:8080")

Draw = Callable[[random.Random], str]


def _phrase(rng: random.Random) -> str:
    return rng.choice(PHRASES[rng.choice(tuple(PHRASES))])


def _one_letter_changed(rng: random.Random) -> str:
    text = _phrase(rng)
    place = rng.choice([place for place, c in enumerate(text) if c != " "])
    return text[:place] + rng.choice(_OTHER_LETTERS.replace(text[place], "")) + text[place + 1 :]


def _longer_word(rng: random.Random) -> str:
    text = _phrase(rng)
    longer = (f"{text}x", f"un{text}", f"{text}2", f"x{text}x")
    return rng.choice(longer if text in PHRASES[Layer.SPACED] else (*longer, f"{text}_"))


def _beginning(rng: random.Random) -> str:
    text = _phrase(rng)
    return text[: rng.randrange(2, len(text))]


def _words_in_another_order(rng: random.Random) -> str:
    words = _phrase(rng).split()
    return " ".join(reversed(words)) if len(words) > 1 else f"{words[0][4:]} {words[0][:4]}"


def _words_apart(rng: random.Random) -> str:
    """To a rule with `spaced`, punctuation between words is no difference."""
    text = _phrase(rng)
    between = (
        (" of the ", " and a ") if text in PHRASES[Layer.SPACED] else (" of the ", "-", ". ", ", ", " / ", "\u3001")
    )
    return rng.choice(between).join(text.split()) if " " in text else f"{text}x"


def _near_key(rng: random.Random) -> str:
    key = forbidden_text(Layer.PATTERN, rng)
    return rng.choice((key[:-1], f"akia{key[4:]}", f"{key[:9]}-{key[9:]}", f"AKIO{key[4:]}", key[1:]))


def _near_card(rng: random.Random) -> str:
    digits = "".join(rng.choices(string.digits[1:], k=15))
    wrong = digits + rng.choice([digit for digit in string.digits if digit != luhn.calc_check_digit(digits)])
    return rng.choice(
        (wrong, " ".join(wrong[start : start + 4] for start in range(0, 16, 4)), digits[:12], f"#{digits[:9]}")
    )


def _number(rng: random.Random) -> str:
    return rng.choice(_NUMBERS)


def _encoded(rng: random.Random) -> str:
    text = " ".join(rng.choices(_WORDS[:14], k=4)).encode()
    return rng.choice((base64.b64encode(text).decode(), f"0x{text[:6].hex()}", json.dumps({"q": text.decode()})))


def _sentence(rng: random.Random) -> str:
    """Words in any order, which may not form a phrase."""
    words = rng.choices(_WORDS, k=rng.randint(4, 12))
    return " and ".join(words)


KINDS: Final[Sequence[tuple[str, Draw]]] = (
    ("one letter changed", _one_letter_changed),
    ("part of a longer word", _longer_word),
    ("beginning of a phrase", _beginning),
    ("words in another order", _words_in_another_order),
    ("words apart", _words_apart),
    ("almost a key", _near_key),
    ("almost a card", _near_card),
    ("other numbers", _number),
    ("encoded sentence", _encoded),
    ("sentence in several scripts", _sentence),
)


def mutators_for(name: str) -> Sequence[Mutator]:
    """How such a text may be written without becoming a forbidden one. Numbers and keys stay as they are: written in
    another way they would be less like what is forbidden."""
    of_words = {draw_name for draw_name, _ in KINDS[:5]}
    return (MUTATORS[0], *BY_FOLDING) if name in of_words else (MUTATORS[0],)
