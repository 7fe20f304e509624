"""The rule kind that looks for prompt injections and jailbreaks, by the embedding of a prompt's last turn.

A model of the fabric embeds it, and logistic regression says how much it looks like an attack. An attacker who appends
harmless sentences gets past it (docs/notes/reliability/red-team.md), so such a rule only notes what it finds.

[[rules]]
name = "injections"
kind = "injection"
mode = "monitor"                       # the default; or "review"
model = "all-MiniLM-L6-v2"             # the default; the one that it was trained for
applies_to = ["prompt"]
"""

from __future__ import annotations

import functools
import operator
import re
import struct
from pathlib import Path
from typing import Final

import msgspec

MAX_CHARS: Final = 1000
"""So much of the end of a turn is embedded: about the window in which the encoder was trained."""
WEIGHTS: Final = Path(__file__).with_name("injection_weights.json")
_MARKER: Final = re.compile(r"<\|[^|<>]{1,32}\|>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]")
"""Marks the turns of a conversation in the chat templates of most models. Texts of the training have none."""
_ROLE: Final = re.compile(r"\s*(?:system|developer|user|assistant|model|tool)\b\s*")
"""Begins a turn behind its marker."""


class InjectionWeights(msgspec.Struct, frozen=True):
    """The weights that `kvloom-lab bench injections --write-weights` has trained."""

    model: str
    """The encoder whose embeddings they are for."""
    weights: tuple[float, ...]
    """One for each dimension, and the constant."""
    threshold: float
    """Texts with a higher score look like attacks."""

    def looks_like_an_attack(self, embedding: bytes) -> bool | None:
        """Judge an embedding, little-endian float32; None: it is of another encoder."""
        *weights, constant = self.weights
        if len(embedding) != 4 * len(weights):
            return None
        values = struct.unpack(f"<{len(weights)}f", embedding)
        return sum(map(operator.mul, weights, values), constant) > self.threshold


@functools.cache
def injection_weights() -> InjectionWeights:
    """Read the weights that the package brings."""
    return msgspec.json.decode(WEIGHTS.read_bytes(), type=InjectionWeights)


def embedded_part(text: str) -> str:
    """The part of a prompt that is judged: its last turn with a text. What came before was judged when it was the
    last, and a system prompt ("You are ...") looks like an attack."""
    first, *turns = _MARKER.split(text)
    for turn in reversed(turns):
        if said := _ROLE.sub("", turn, count=1).strip():
            return said[-MAX_CHARS:]
    return first.strip()[-MAX_CHARS:]
