"""Rule kinds of other packages (docs/how-to/plugins.md): they find forbidden passages by code instead of a pattern."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

from kvloom_common.plugins import PluginError, PluginGroup
from kvloom_common.process.access_log import FailureLog, place_of
from safety_svc.pii import PiiKind

RULE_KINDS: Final = PluginGroup("kvloom.safety_rules", "kind of safety rule", ("text", "pii", "guardrail", "judge"))
MAX_LENGTH: Final = 4096


class RuleKind(Protocol):
    """A plugin makes one of these of a rule's own fields. It has no state, and is called from several threads.

    Whether `text[start:end]` is forbidden depends on these characters and on the one before and the one after them, on
    nothing else: answers arrive in pieces, and what was shown is not judged again.
    """

    max_length: int
    """The largest number of characters of a forbidden passage, and one more if the character after it matters. Of a
    streamed answer, so many are withheld."""

    def find(self, text: str, start: int) -> tuple[int, int] | None:
        """The first forbidden passage at or after `start`, as (start, end). The time must be proportional to the
        text's length."""
        ...

    # `prefixes: tuple[str, ...]` may be left out. Every forbidden passage begins with one of them. Then an answer's
    # text is withheld from the appearance of one only.


class RuleFailedError(Exception):
    """A plugin's rule could not be applied to a text."""


class Passage(NamedTuple):
    """A forbidden passage, with the methods of a match that are used of RE2's."""

    first: int
    behind: int

    def start(self) -> int:
        return self.first

    def end(self) -> int:
        return self.behind


class KindExpression:
    """A plugin's rule as if it were a compiled pattern."""

    def __init__(self, rule_name: str, kind: RuleKind) -> None:
        self._kind = kind
        self.prefixes: tuple[str, ...] = getattr(kind, "prefixes", ())
        self._failures = FailureLog("safety_rule_failed", rule=rule_name)

    def search(self, text: str, start: int = 0) -> Passage | None:
        """Raises RuleFailedError."""
        try:
            found = self._kind.find(text, start)
            if found is None:
                return None
            passage = Passage(*found)
            fault = self._fault_of(passage, text, start)
        except Exception as error:
            self._failures.note(place_of(error))
            raise RuleFailedError from error
        if fault:
            self._failures.note(fault)
            raise RuleFailedError
        return passage

    def _fault_of(self, passage: Passage, text: str, start: int) -> str:
        """Why the passage breaks the plugin's own promises; "" if it does not."""
        first, behind = passage
        if not start <= first < behind <= len(text):
            return f"find() returned {first}:{behind} of {start}:{len(text)}"
        if behind - first > self._kind.max_length:
            return f"find() returned {behind - first} characters, and max_length is {self._kind.max_length}"
        if self.prefixes and not text.startswith(self.prefixes, first):
            return "find() returned a passage that begins with none of the prefixes"
        return ""


def rule_kind(name: str, settings: Mapping[str, Any]) -> RuleKind:
    """The rule of a plugin. Raises PluginError."""
    factory = PiiKind if name == "pii" else RULE_KINDS.load(name)
    try:
        kind: RuleKind = factory(settings)
        is_empty_found = kind.find("", 0) is not None
        max_length: Any = kind.max_length
    except PluginError:
        raise
    except Exception as error:
        raise PluginError(f"{type(error).__name__}: {error}") from error
    if is_empty_found:
        raise PluginError(f"the kind {name!r} finds something in the empty text")
    if not isinstance(max_length, int) or not 1 <= max_length <= MAX_LENGTH:
        raise PluginError(f"max_length of the kind {name!r} is not a number from 1 to {MAX_LENGTH}: {max_length!r}")
    prefixes: Any = getattr(kind, "prefixes", ())
    if not isinstance(prefixes, tuple) or not all(isinstance(prefix, str) for prefix in prefixes):
        raise PluginError(f"prefixes of the kind {name!r} is not a tuple of texts: {prefixes!r}")
    return kind
