"""The rules of a policy file as they are written there."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from safety_svc.judge_formats import FormatName
from safety_svc.rule_modes import Mode, OnFailure
from safety_svc.rule_plugins import MAX_LENGTH

DEFAULT_MAX_LENGTH: Final = 64

Target = Literal["prompt", "answer"]
Name = Annotated[str, Meta(min_length=1, max_length=128)]


class CommonFields(msgspec.Struct, kw_only=True):
    """The fields that every rule has."""

    name: Name
    message: Name = "This content is not allowed here."
    category: Annotated[str, Meta(max_length=128)] = ""
    """The name that moderations give to a text that breaks the rule; "": the rule's own name."""
    applies_to: Annotated[tuple[Target, ...], Meta(min_length=1)] = ("prompt", "answer")
    mode: Mode = "gate"
    tenants: dict[str, Mode] = {}
    """The modes of tenants that have another one."""
    on_request: bool | tuple[Name, ...] = False
    """The rule holds only for requests that name it (`guardrails`). A list: for those of these tenants."""
    on_failure: OnFailure = ""


class RuleFields(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """A rule of kvloom's own kind as written in the file."""

    kind: Literal["text"] = "text"
    phrases: tuple[str, ...] = ()
    whole_words: bool = True
    confusables: bool = False
    """Texts that look like a phrase are forbidden, too."""
    spaced: bool = False
    """Texts with a phrase's letters are forbidden, too, whatever up to MAX_GAP characters stand between two of them."""
    patterns: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    max_length: Annotated[int, Meta(ge=1, le=MAX_LENGTH)] = DEFAULT_MAX_LENGTH


class KindFields(CommonFields, kw_only=True):
    """A rule of another package's kind; the fields that are not named here are the kind's own."""

    kind: Name
    rule_kind: Any
    """The plugin's RuleKind."""


class GuardrailFields(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """A rule that asks a service of others (guardrails.py)."""

    kind: Literal["guardrail"]
    url: Annotated[str, Meta(pattern=r"^https?://[^\s/]+(/\S*)?$", max_length=2048)]
    api_key_file: str = ""
    timeout_seconds: Annotated[float, Meta(gt=0, le=60)] = 1.0


class JudgeFields(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """A rule that asks a model of the fabric (judge_formats.py)."""

    kind: Literal["judge"]
    model: Name
    """The name by which requests name it."""
    format: FormatName
    """The form in which the model is asked and answers."""
    policy: Annotated[str, Meta(max_length=65_536)] = ""
    """The text that tells a model what is forbidden."""
    categories: tuple[Name, ...] = ()
    """Only texts of these categories of the model are forbidden; empty: those of all. Of granite_guardian it is the
    criterion by which it judges."""
    strict: bool = False
    """True forbids texts that the model calls controversial, too."""
    timeout_seconds: Annotated[float, Meta(gt=0, le=60)] = 5.0


class InjectionFields(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """A rule that looks for prompt injections by a prompt's embedding (injections.py)."""

    kind: Literal["injection"]
    mode: Mode = "monitor"
    applies_to: Annotated[tuple[Target, ...], Meta(min_length=1)] = ("prompt",)
    model: Name = "all-MiniLM-L6-v2"
    """The encoder, by the name by which requests name it."""
    timeout_seconds: Annotated[float, Meta(gt=0, le=60)] = 5.0


OutsideFields = GuardrailFields | JudgeFields | InjectionFields
AnyFields = RuleFields | KindFields | OutsideFields


class PolicyFields(msgspec.Struct, forbid_unknown_fields=True):
    rules: tuple[dict[str, Any], ...] = ()
