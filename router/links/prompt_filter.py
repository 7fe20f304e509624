"""Clears prompts that the safety service need not see, so that most prompts' text is never sent to it (see Prefilter in
safety_service.proto).

The filter is exact: a prompt that passes contains no beginning of anything forbidden, so no rule can match in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import re2

from kvloom.v1 import safety_service_pb2

MAX_CHARS: Final = 2**18
"""Searching takes about 1.5 ns per character. Longer prompts are left to the service, which interleaves them."""
MAX_PLAIN_BEGINNINGS: Final = 3
"""Up to this many plain strings are searched for one after the other, which is faster than an expression."""
_SPACES: Final = r"[\t-\r\x1c- ]+"
"""The white space of ASCII, as Python's str.isspace defines it."""


class PromptFilter:
    """Filters whole texts. For answers, whose text comes in pieces, see router/links/prefilter.py."""

    __slots__ = ("_any_text", "_expression", "_plain")

    def __init__(self, beginnings: Iterable[str], folded_beginnings: Iterable[str], *, any_text: bool) -> None:
        self._any_text = any_text
        plain, folded = sorted(beginnings), sorted(folded_beginnings)
        is_short = len(plain) <= MAX_PLAIN_BEGINNINGS and not folded
        self._plain = tuple(plain) if is_short else ()
        self._expression = None if is_short else _expression(plain, folded)

    @classmethod
    def from_policy(cls, policy: safety_service_pb2.PolicyState) -> PromptFilter | None:
        """Returns None if the policy has no prefilter, so that every prompt has to be checked."""
        if not policy.HasField("prompt_prefilter"):
            return None
        prefilter = policy.prompt_prefilter
        return cls(prefilter.beginnings, prefilter.folded_beginnings, any_text=prefilter.any_text)

    def is_suspicious(self, text: str) -> bool:
        if len(text) > MAX_CHARS or not (self._any_text or text.isascii()):
            return True
        for beginning in self._plain:
            if beginning in text:
                return True
        return self._expression is not None and self._expression.search(text) is not None


def _expression(plain: Iterable[str], folded: Iterable[str]) -> Any:
    """Returns an expression that finds any of these strings; if any are folded, in ASCII text only."""
    parts = [re2.escape(beginning) for beginning in plain]
    parts += [f"(?i:{_SPACES.join(map(re2.escape, beginning.split(' ')))})" for beginning in folded]
    options = re2.Options()
    options.never_capture = True
    return re2.compile("|".join(parts), options)
