"""Clears prompts that the safety service need not see, so that most prompts' text is never sent to it (see Prefilter in
safety_service.proto).

The filter is exact: a prompt that passes contains no beginning of anything forbidden, so no rule can match in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import re2

from kvloom.v1 import safety_service_pb2
from kvloom_common.text.json_escapes import ESCAPE, unescaped

MAX_CHARS: Final = 2**18
"""Searching takes about 1.5 ns per character. Longer prompts are left to the service, which interleaves them."""
MAX_PLAIN_BEGINNINGS: Final = 3
"""Up to this many plain strings are searched for one after the other, which is faster than an expression."""
MAX_ESCAPES: Final = 1024
"""Reading a text as JSON takes about half a microsecond per escape. Texts with more are left to the service."""
_SPACES: Final = r"[\t-\r\x1c- ]+"
"""The white space of ASCII, as Python's str.isspace defines it."""
_GAPS: Final = "[^0-9A-Za-z]*"
"""Any number of characters that may stand between letters which are spaced out. The service counts them."""


class PromptFilter:
    """Filters whole texts. For answers, whose text comes in pieces, see router/links/prefilter.py."""

    __slots__ = ("_any_text", "_expression", "_look_alike", "_look_alikes", "_plain", "_reads_escapes")

    def __init__(self, prefilter: safety_service_pb2.Prefilter) -> None:
        self._any_text = prefilter.any_text
        self._reads_escapes = prefilter.reads_escapes
        plain, folded = sorted(prefilter.beginnings), sorted(prefilter.folded_beginnings)
        spaced = prefilter.spaced_beginnings
        is_short = len(plain) <= MAX_PLAIN_BEGINNINGS and not folded and not spaced
        self._plain = tuple(plain) if is_short else ()
        self._expression = None if is_short else _expression(plain, folded, spaced)
        look_alike, spaced = prefilter.look_alike_beginnings, prefilter.spaced_look_alike_beginnings
        self._look_alike = _expression((), look_alike, spaced) if look_alike or spaced else None
        self._look_alikes = str.maketrans(dict(prefilter.look_alikes))

    @classmethod
    def from_policy(cls, policy: safety_service_pb2.PolicyState) -> PromptFilter | None:
        """Returns None if the policy has no prefilter, so that every prompt has to be checked."""
        return cls(policy.prompt_prefilter) if policy.HasField("prompt_prefilter") else None

    def is_suspicious(self, text: str) -> bool:
        if len(text) > MAX_CHARS or not (self._any_text or text.isascii()):
            return True
        for beginning in self._plain:
            if beginning in text:
                return True
        if self._expression is not None and self._expression.search(text) is not None:
            return True
        if self._look_alike is not None and self._look_alike.search(text.lower().translate(self._look_alikes)):
            return True
        if self._reads_escapes and ESCAPE in text:
            return text.count(ESCAPE) > MAX_ESCAPES or self._is_suspicious_read(unescaped(text))
        return False

    def _is_suspicious_read(self, text: str) -> bool:
        if not text.isascii() or (self._expression is not None and self._expression.search(text) is not None):
            return True
        look_alike = self._look_alike
        return look_alike is not None and look_alike.search(text.lower().translate(self._look_alikes)) is not None


def _expression(plain: Iterable[str], folded: Iterable[str], spaced: Iterable[str]) -> Any:
    """Returns an expression that finds any of these strings; if any are folded or spaced, in ASCII text only."""
    parts = [re2.escape(beginning) for beginning in plain]
    parts += [f"(?i:{_SPACES.join(map(re2.escape, beginning.split(' ')))})" for beginning in folded]
    parts += [f"(?i:{_GAPS.join(map(re2.escape, beginning))})" for beginning in spaced]
    options = re2.Options()
    options.never_capture = True
    return re2.compile("|".join(parts), options)
