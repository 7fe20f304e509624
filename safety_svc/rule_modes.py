"""The rules of a policy that hold for a request, and their modes: by its tenant, and by the guardrails it names."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal, Protocol

Mode = Literal["gate", "monitor", "review", "mask", "async", "off"]
"""gate: forbidden text is not shown. async: an answer is shown at once, and ends at forbidden text. mask: prompts get
placeholders (pii.py), and what a model writes is noted. monitor: forbidden text is noted. review: it is noted, for a
person to decide about."""
OnFailure = Literal["", "refuse", "allow"]
"""The fate of a text to which a rule cannot be applied. "": `safety.on_unavailable` decides."""

IN_PROMPTS: Final[frozenset[Mode]] = frozenset(("gate", "async", "mask"))
"""Modes that refuse a prompt: edges have masked what they could."""
HOLDING: Final[frozenset[Mode]] = frozenset(("gate",))
ALL_MODES: Final[frozenset[Mode]] = frozenset(("gate", "monitor", "review", "mask", "async"))
WATCHING: Final[frozenset[Mode]] = frozenset(("async",))
_MAX_SCOPES: Final = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """The part of a rule that is reported when it blocks a text."""

    name: str
    message: str
    category: str = ""
    on_failure: OnFailure = ""


class NamedRule(Protocol):
    @property
    def name(self) -> str: ...


class UnknownGuardrailError(Exception):
    """A request names a guardrail that it may not name. The argument is its name."""


@dataclasses.dataclass(frozen=True, slots=True)
class RuleTerms:
    """For whom one rule holds."""

    name: str
    mode: Mode = "gate"
    by_tenant: Mapping[str, Mode] = dataclasses.field(default_factory=dict)
    on_request: bool | tuple[str, ...] = False
    """The rule holds only for requests that name it; a tuple: of these tenants."""

    @property
    def modes(self) -> frozenset[Mode]:
        """All modes in which it holds for anybody."""
        return frozenset((self.mode, *self.by_tenant.values())) - {"off"}

    def mode_for(self, tenant: str, guardrails: Collection[str]) -> Mode:
        if self.on_request and self.name not in guardrails:
            return "off"
        return self.by_tenant.get(tenant, self.mode)

    def may_be_named_by(self, tenant: str) -> bool:
        if self.on_request and self.on_request is not True and tenant not in self.on_request:
            return False
        return self.by_tenant.get(tenant, self.mode) != "off"


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """The rules that hold for some requests."""

    modes: Mapping[str, Mode]
    """By name; those that are off are not in it."""

    @property
    def names(self) -> Sequence[str]:
        return sorted(self.modes)


class Scopes:
    """The scopes of one policy."""

    def __init__(self, terms: Sequence[RuleTerms]) -> None:
        self._terms = {each.name: each for each in terms}
        self._tenants = {tenant for each in terms for tenant in each.by_tenant}
        self._known: dict[tuple[str, tuple[str, ...]], Scope] = {}

    @property
    def names(self) -> Sequence[str]:
        """The names of the rules that hold for anybody, in the order of the file."""
        return [name for name, terms in self._terms.items() if terms.modes]

    def check(self, tenant: str, guardrails: Sequence[str]) -> None:
        """Raises UnknownGuardrailError."""
        for name in guardrails:
            terms = self._terms.get(name)
            if terms is None or not terms.may_be_named_by(tenant):
                raise UnknownGuardrailError(name)

    def of(self, tenant: str, guardrails: Sequence[str]) -> Scope:
        """Names of guardrails that are unknown add nothing: see `check`."""
        key = (tenant if tenant in self._tenants or guardrails else "", tuple(guardrails))
        scope = self._known.get(key)
        if scope is None:
            modes: dict[str, Mode] = {name: terms.mode_for(tenant, guardrails) for name, terms in self._terms.items()}
            if len(self._known) >= _MAX_SCOPES:
                self._known.clear()
            scope = self._known[key] = Scope({name: mode for name, mode in modes.items() if mode != "off"})
        return scope


class Judge:
    """Says what becomes of the forbidden passages of one text."""

    __slots__ = ("_blocking", "_modes", "flagged", "unapplied")

    def __init__(self, scope: Scope, blocking: Collection[Mode], flagged: dict[str, Mode]) -> None:
        """A passage of a rule in one of the modes `blocking` ends the text; `flagged` gets the names and modes of rules
        that only note it."""
        self._modes = scope.modes
        self._blocking = blocking
        self.flagged = flagged
        self.unapplied: set[str] = set()
        """The names of rules that could not be applied to the text."""

    def forbids(self, rule: NamedRule) -> bool:
        """True when the text may not be shown from the passage on. Notes what is only noted."""
        mode = self._modes.get(rule.name)
        if mode in ("monitor", "review", "mask") and mode not in self._blocking:
            self.flagged[rule.name] = mode
        return mode in self._blocking

    def holds(self, rule: NamedRule) -> bool:
        """True when the rule is not off."""
        return rule.name in self._modes

    def fails(self, rule: Rule) -> bool:
        """Note that the rule cannot be applied. Returns True when the text may therefore not be shown."""
        self.unapplied.add(rule.name)
        return rule.on_failure != "allow" and self._modes.get(rule.name) in self._blocking
