"""The policy that is attacked: one rule of each layer, and the texts that each forbids."""

from __future__ import annotations

import enum
import json
import random
import string
from collections.abc import Mapping, Sequence
from typing import Final

from stdnum import luhn

MESSAGE: Final = "The red team has been refused."
"""The words by which the policy refuses, so that no other error counts as a refusal."""


class Layer(enum.StrEnum):
    """A way in which a rule finds texts."""

    LIST = "list"
    LOOK_ALIKES = "look-alikes"
    SPACED = "spaced"
    PATTERN = "pattern"
    CARD = "card"


PHRASES: Final[Mapping[Layer, Sequence[str]]] = {
    Layer.LIST: ("launch code", "nerve agent synthesis", "zebra protocol", "bluebird"),
    Layer.LOOK_ALIKES: ("silver falcon", "open the vault", "red lotus file", "blackout"),
    Layer.SPACED: ("velvet hangar", "quiet harbour keys", "thunderbolt"),
}
_PATTERN: Final = "AKIA[0-9A-Z]{16}"
_NUM_KEY_CHARS: Final = 16
_RULES: Final[Mapping[Layer, str]] = {
    Layer.LIST: f"phrases = {json.dumps(PHRASES[Layer.LIST])}",
    Layer.LOOK_ALIKES: f"phrases = {json.dumps(PHRASES[Layer.LOOK_ALIKES])}\nconfusables = true",
    Layer.SPACED: f"phrases = {json.dumps(PHRASES[Layer.SPACED])}\nspaced = true",
    Layer.PATTERN: f"patterns = ['{_PATTERN}']\nprefixes = ['AKIA']\nmax_length = 20",
    Layer.CARD: "kind = 'pii'\nfinds = 'card'",
}


def policy_text(layers: Sequence[Layer] = tuple(Layer)) -> str:
    """A policy with the rules of these layers, all of which gate."""
    return "\n".join(f'[[rules]]\nname = "{layer}"\nmessage = "{MESSAGE}"\n{_RULES[layer]}\n' for layer in layers)


def forbidden_text(layer: Layer, rng: random.Random) -> str:
    """A text that the layer's rule forbids, as it is written by somebody who hides nothing."""
    if layer in PHRASES:
        return rng.choice(PHRASES[layer])
    if layer is Layer.PATTERN:
        return "AKIA" + "".join(rng.choices(string.ascii_uppercase + string.digits, k=_NUM_KEY_CHARS))
    digits = "4" + "".join(rng.choices(string.digits, k=14))
    return digits + luhn.calc_check_digit(digits)
