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
from collections.abc import Iterator
from typing import Final

from kvloom.v1.safety_service_pb2 import Mask, MaskWish
from safety_svc.policy import Pattern, SafetyPolicy

_TAG_CHARS: Final = 12
"""60 bits: no two texts of a conversation get one tag."""
_UNSAFE: Final = re.compile(r"[\"\\\x00-\x1f]")
"""A hidden text with one of these cannot be put back into the arguments of a call."""


def masks_of(policy: SafetyPolicy, text: str, wish: MaskWish, key: bytes) -> list[Mask]:
    """The passages to be hidden, in order. Raises RuleFailedError."""
    modes = policy.scopes.of(wish.tenant, wish.guardrails).modes
    found: list[tuple[int, int, str]] = []
    for pattern in policy.prompt.patterns:
        if modes.get(pattern.rule.name) == "mask":
            found += ((start, end, pattern.rule.name) for start, end in _passages(pattern, text))
    masks: list[Mask] = []
    covered = 0
    for start, end, name in sorted(found, key=lambda each: (each[0], -each[1])):
        hidden = text[start:end]
        if start >= covered and not _UNSAFE.search(hidden):
            covered = end
            masks.append(Mask(start=start, end=end, placeholder=_placeholder(name, hidden, wish, key)))
    return masks


def _passages(pattern: Pattern, text: str) -> Iterator[tuple[int, int]]:
    start = 0
    while (match := pattern.expression.search(text, start)) is not None:
        yield match.start(), match.end()
        start = match.end()


def _placeholder(name: str, hidden: str, wish: MaskWish, key: bytes) -> str:
    said = "\0".join((wish.tenant, wish.conversation, name, hidden)).encode("utf-8", "surrogatepass")
    tag = base64.b32encode(hmac.digest(key, said, hashlib.sha256))[:_TAG_CHARS].decode().lower()
    return f"[{re.sub('[^A-Z0-9]', '_', name.upper())[:32]}-{tag}]"
