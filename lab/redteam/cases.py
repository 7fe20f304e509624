"""Draws attacks and harmless texts from seeds: the same cases for the same seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Final

from lab.redteam.look_alikes import KINDS, mutators_for
from lab.redteam.mutators import CLAIMED, MUTATORS, Mutator
from lab.redteam.places import PLACES, STREAMING, Body, Place, body_at
from lab.redteam.rules import Layer, forbidden_text

ATTACKS_PER_SEED: Final = 100
"""Attacks that a rule claims to find."""
GAPS_PER_SEED: Final = 40
"""Attacks that no rule claims to find, or that stand where no model reads them."""
HARMLESS_PER_SEED: Final = 200
CASES_PER_SEED: Final = ATTACKS_PER_SEED + GAPS_PER_SEED + HARMLESS_PER_SEED
_AROUND: Final = ("So here is it", "What follows is for you", "Notes", "Über uns", "Said (twice)", "第一")
_AFTER: Final = ("", ".", " and so on.", "\nThat is all, until tomorrow.", ", and more of it; bye", "! 🙂")
_MAX_PART_CHARS: Final = (0, 1, 1, 3, 9)
"""0: the answer comes at once."""
_MOST_DRAWS: Final = 20
_READ: Final = tuple(place for place in PLACES if place.is_read)


@dataclasses.dataclass(frozen=True, slots=True)
class RedTeamCase:
    """One request."""

    number: int
    kind: str
    """The mutator, or the kind of harmless text."""
    layer: Layer | None
    """The rule that forbids the text; None: none does."""
    is_claimed: bool
    """The rule says that it finds texts that are written so, and a model reads this one."""
    place: Place
    before: str
    text: str
    """The forbidden text, or the harmless one."""
    after: str
    max_part_chars: int
    is_stream: bool

    @property
    def marker(self) -> str:
        """A word that stands directly before the text, and nowhere else."""
        return f"q{self.number}z: "

    @property
    def written(self) -> str:
        """All that is written in the place."""
        return f"{self.before} {self.marker}{self.text}{self.after}"

    @property
    def body(self) -> Body:
        return body_at(self.place, self.written, self.max_part_chars, is_stream=self.is_stream)

    def __str__(self) -> str:
        parts = f", parts of up to {self.max_part_chars or 'all'} characters" if self.place.is_answer else ""
        layer = f" of rule {self.layer}" if self.layer else ""
        return f"case {self.number}: {self.kind}{layer} in {self.place.api}, {self.place.where}{parts}: {self.text!r}"


def num_leaked_chars(case: RedTeamCase, seen: Sequence[str]) -> int:
    """How many characters follow the marker in any text that the client has seen, at most those of the case's text."""
    behind = (len(text.rpartition(case.marker)[2]) for text in seen if case.marker in text)
    return min(len(case.text), max(behind, default=0))


def cases_of(seed: int) -> Iterator[RedTeamCase]:
    """All cases of a seed. Mutators and places take turns, and everything else is drawn."""
    rng = random.Random(seed)
    number = seed * CASES_PER_SEED
    for turn in range(ATTACKS_PER_SEED):
        mutator = CLAIMED[(seed + turn) % len(CLAIMED)]
        place = _place_for(mutator, rng)
        yield _attack(number, mutator, rng.choice(sorted(mutator.claimed_by)), place, rng, is_claimed=True)
        number += 1
    for turn in range(GAPS_PER_SEED):
        mutator = MUTATORS[(seed + turn) % len(MUTATORS)]
        layers = [layer for layer in Layer if layer not in mutator.claimed_by]
        place = _place_for(mutator, rng)
        if not layers:
            place = rng.choice([place for place in PLACES if not place.is_read])
        yield _attack(number, mutator, rng.choice(layers or list(Layer)), place, rng, is_claimed=False)
        number += 1
    for turn in range(HARMLESS_PER_SEED):
        name, draw = KINDS[turn % len(KINDS)]
        mutator = rng.choice(mutators_for(name))
        yield _case(number, name, None, mutator.mutate(draw(rng), rng), mutator, rng.choice(_READ), rng)
        number += 1


def _place_for(mutator: Mutator, rng: random.Random) -> Place:
    """Escapes are read where the text stands in JSON or as it is, and not where they become escaped themselves."""
    return rng.choice([place for place in _READ if not (mutator.is_json and place.writing == "json value")])


def _attack(
    number: int, mutator: Mutator, layer: Layer, place: Place, rng: random.Random, *, is_claimed: bool
) -> RedTeamCase:
    """An attack with a text that the mutator changes, if there is such a text of this rule."""
    for _ in range(_MOST_DRAWS):
        plain = forbidden_text(layer, rng)
        text = mutator.mutate(plain, rng)
        if text != plain:
            return _case(number, mutator.name, layer, text, mutator, place, rng, is_claimed=is_claimed)
    as_written = MUTATORS[0]
    return _case(
        number, as_written.name, layer, forbidden_text(layer, rng), as_written, place, rng, is_claimed=place.is_read
    )


def _case(
    number: int,
    kind: str,
    layer: Layer | None,
    text: str,
    mutator: Mutator,
    place: Place,
    rng: random.Random,
    *,
    is_claimed: bool = False,
) -> RedTeamCase:
    return RedTeamCase(
        number=number,
        kind=kind,
        layer=layer,
        is_claimed=is_claimed,
        place=place,
        before=rng.choice(_AROUND),
        text=place.written(text, is_escaped=mutator.is_json),
        after=place.written(rng.choice(_AFTER), is_escaped=False),
        max_part_chars=rng.choice(_MAX_PART_CHARS),
        is_stream=place.api in STREAMING and rng.random() < 0.6,
    )


def case_of_number(number: int) -> RedTeamCase:
    """The case with this number, of whichever seed."""
    return next(case for case in cases_of(number // CASES_PER_SEED) if case.number == number)


def cases_of_seeds(num_seeds: int) -> Sequence[RedTeamCase]:
    """The cases of the first seeds."""
    return [case for seed in range(num_seeds) for case in cases_of(seed)]
