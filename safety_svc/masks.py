"""Finds what rules in mode `mask` hide, and names the placeholders.

A placeholder follows from the tenant, the conversation and the hidden text: the same text has the same placeholder in
all turns, so that the cached prefix of a conversation stays the same, and nobody without the fabric's secret can tell
what it stands for, or try out what it may be.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvloom.v1.safety_service_pb2 import Mask, MaskWish
from safety_svc.policy import Pattern, SafetyPolicy

_TAG_CHARS: Final = 12
"""60 bits: no two texts of a conversation get one tag."""
_UNSAFE: Final = re.compile(r"[\"\\\x00-\x1f]")
"""A hidden text with one of these cannot be put back into the arguments of a call."""


class HiddenPassage(NamedTuple):
    """A passage of a text that the model is not to read."""

    start: int
    end: int
    rule: str


def masks_of(policy: SafetyPolicy, text: str, wish: MaskWish, key: bytes) -> list[Mask]:
    """The passages to be hidden, in order, and their placeholders. Raises RuleFailedError."""
    passages = hidden_passages(policy, text, wish.tenant, wish.guardrails)
    return [
        Mask(start=start, end=end, placeholder=_placeholder(name, text[start:end], wish, key))
        for start, end, name in passages
    ]


def hidden_passages(policy: SafetyPolicy, text: str, tenant: str, guardrails: Sequence[str]) -> Sequence[HiddenPassage]:
    """The passages that are hidden in a text of this tenant's request, in order. Raises RuleFailedError."""
    modes = policy.scopes.of(tenant, guardrails).modes
    found: list[HiddenPassage] = []
    for pattern in policy.prompt.patterns:
        name = pattern.rule.name
        if modes.get(name) == "mask":
            found += (HiddenPassage(start, end, name) for start, end in _passages(pattern, text))
    hidden: list[HiddenPassage] = []
    covered = 0
    for passage in sorted(found, key=lambda each: (each.start, -each.end)):
        if passage.start >= covered and not _UNSAFE.search(text[passage.start : passage.end]):
            covered = passage.end
            hidden.append(passage)
    return hidden


def _passages(pattern: Pattern, text: str) -> Iterator[tuple[int, int]]:
    start = 0
    while (match := pattern.expression.search(text, start)) is not None:
        yield match.start(), match.end()
        start = match.end()


def _placeholder(name: str, hidden: str, wish: MaskWish, key: bytes) -> str:
    said = "\0".join((wish.tenant, wish.conversation, name, hidden)).encode("utf-8", "surrogatepass")
    tag = base64.b32encode(hmac.digest(key, said, hashlib.sha256))[:_TAG_CHARS].decode().lower()
    return f"[{re.sub('[^A-Z0-9]', '_', name.upper())[:32]}-{tag}]"
