"""The policy file: rules in TOML, which are validated and compiled once when they are loaded.

    [[rules]]
    name = "no-launch-codes"
    applies_to = ["prompt", "answer"]      # default: both
    message = "Launch codes are not discussed here."
    category = "weapons"                   # how moderations call it; default: the name
    phrases = ["launch code"]              # deny list, compared after folding (see folding.py)
    whole_words = true                     # default: "code" does not match in "codec"
    confusables = true                     # default: false; also what looks like a phrase (see look_alikes.py)
    spaced = true                          # default: false; also with other characters between the letters
    mode = "gate"                          # the default; monitor, mask, async, off (see rule_modes.py)
    tenants = {acme = "monitor"}           # tenants that have another mode
    on_request = true                      # default: false; only for requests that name it as a guardrail
    on_failure = "refuse"                  # or "allow"; default: what safety.on_unavailable says

    [[rules]]
    name = "private-key"
    applies_to = ["answer"]
    message = "The answer would have held a private key."
    patterns = ['-----BEGIN [A-Z ]{0,30}PRIVATE KEY']   # RE2 syntax, linear time whatever the text; compared as written
    prefixes = ["-----BEGIN "]             # every match begins with one of these
    max_length = 64                        # characters of a match at most

    [[rules]]
    name = "card-number"
    kind = "acme_cards"                    # a kind of another package (docs/how-to/plugins.md) with its own fields
    issuers = ["visa"]

`prefixes` and `max_length` determine how much of a streamed answer must be withheld: nothing until a prefix (or its
beginning) appears, then at most `max_length` characters. A pattern for answers without prefixes always withholds the
last `max_length` characters.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import re2
import xxhash

from kvloom_common.plugins import PluginError
from safety_svc.folding import fold, is_letter
from safety_svc.judge_formats import FORMATS, JudgeTerms
from safety_svc.look_alikes import fold_look_alikes, spellings
from safety_svc.phrase_set import Phrase, PhraseSet, phrase_sets
from safety_svc.rule_fields import (
    AnyFields,
    CommonFields,
    GuardrailFields,
    InjectionFields,
    JudgeFields,
    KindFields,
    Name,
    OutsideFields,
    PolicyFields,
    RuleFields,
    Target,
)
from safety_svc.rule_modes import ALL_MODES, HOLDING, Mode, Rule, RuleTerms, Scopes
from safety_svc.rule_plugins import KindExpression, rule_kind

BUILTIN_POLICY: Final = Path(__file__).with_name("builtin_policy.toml")
MAX_POLICY_BYTES: Final = 64 * 2**20
MAX_PREFIX_LENGTH: Final = 64
MIN_SPACED_LETTERS: Final = 2
"""The letters of shorter phrases stand in many texts, if nothing between them counts."""


class PolicyError(Exception):
    """The policy file cannot be used. The message names the file, the rule and the problem."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    rule: Rule
    expression: Any
    """A compiled RE2 expression, or a KindExpression."""
    prefixes: tuple[str, ...]
    max_length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Guardrail:
    """A service that judges prompts."""

    rule: Rule
    url: str
    api_key: str
    timeout_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class ModelJudge:
    """A model of the fabric that judges prompts."""

    rule: Rule
    model: str
    terms: JudgeTerms
    timeout_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class InjectionJudge:
    """A model of the fabric whose embeddings of prompts are judged (injections.py)."""

    rule: Rule
    model: str
    timeout_seconds: float


OutsideRule = Guardrail | ModelJudge | InjectionJudge


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
    """A forbidden passage. `start` is the offset of its first character from the beginning of the text."""

    rule: Rule
    start: int
    is_failure: bool = False
    """True when the rule could not be applied, so that anything may be forbidden from `start` on."""


def worst(hits: Iterable[Hit | None]) -> Hit | None:
    """The first forbidden passage; only if there is none, a rule's failure."""
    return min((hit for hit in hits if hit is not None), key=lambda hit: (hit.is_failure, hit.start), default=None)


class RuleSet:
    """The compiled rules for one target, prompts or answers."""

    def __init__(self, phrases: Sequence[Phrase], patterns: Sequence[Pattern]) -> None:
        self.phrases = tuple(phrases)
        self.patterns = tuple(patterns)
        self.unanchored_length = max((p.max_length for p in patterns if not p.prefixes), default=0)
        """The number of last characters of a text that may belong to a match without a prefix."""
        self.max_prefixed_length = max((p.max_length for p in patterns if p.prefixes), default=0)
        prefixes = sorted({prefix for pattern in patterns for prefix in pattern.prefixes})
        self.max_prefix_length = max(map(len, prefixes), default=0)
        self.prefix_first_characters = frozenset(prefix[0] for prefix in prefixes)
        self.prefix_end = re.compile("|".join(filter(None, map(_any_beginning, prefixes))) or r"(?!)")
        """Finds a position at which the text may end in the middle of a prefix."""
        self.prefix = re.compile(f"(?={'|'.join(map(re.escape, prefixes))})" if prefixes else r"(?!)")
        """Finds every position at which a prefix begins, including overlapping ones."""

    def take_phrase_sets(self, twin: RuleSet | None) -> None:
        """Share those of a set with the same phrases, or make them."""
        if twin is not None:
            self.__dict__["phrase_sets"] = twin.phrase_sets
        _ = self.phrase_sets

    @functools.cached_property
    def phrase_sets(self) -> tuple[PhraseSet, ...]:
        """The phrases, by how texts are folded. Making them takes long."""
        return phrase_sets(self.phrases, fold, fold_look_alikes)

    def reach(self, text: str, start: int) -> int:
        """Return the maximum length of a match that begins with the prefix at text[start:]."""
        return max(p.max_length for p in self.patterns if p.prefixes and text.startswith(p.prefixes, start))

    def __bool__(self) -> bool:
        return bool(self.patterns or self.phrases)


@dataclasses.dataclass(frozen=True, slots=True)
class SafetyPolicy:
    """A compiled policy file."""

    revision: str
    """A hash of the file's content."""
    prompt: RuleSet
    answer: RuleSet
    """Rules because of which text is withheld."""
    watched_answer: RuleSet
    """Rules that let text of answers pass, and see it."""
    any_text: RuleSet
    """All rules."""
    guardrails: tuple[OutsideRule, ...]
    """Those for prompts."""
    answer_guardrails: tuple[OutsideRule, ...]
    """Those that watch answers."""
    scopes: Scopes
    categories: tuple[str, ...]
    """The categories of all rules, in the order of the file."""


def load_policy(path: Path) -> SafetyPolicy:
    """Read and compile a policy file. Raises PolicyError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise PolicyError(f"{path}: {error.strerror}") from error
    if len(raw) > MAX_POLICY_BYTES:
        raise PolicyError(f"{path}: the file is larger than {MAX_POLICY_BYTES} bytes")
    try:
        tables = msgspec.toml.decode(raw, type=PolicyFields).rules
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PolicyError(f"{path}: {error}") from error
    try:
        return _policy(tables, xxhash.xxh3_64_hexdigest(raw), path.parent)
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from error


def _policy(tables: Sequence[dict[str, Any]], revision: str, folder: Path) -> SafetyPolicy:
    """Raises PolicyError."""
    rules = [_fields(table, number) for number, table in enumerate(tables, 1)]
    for name, count in Counter(rule.name for rule in rules).items():
        if count > 1:
            raise PolicyError(f"rule {name!r}: the name is used twice")
    scopes = Scopes([RuleTerms(rule.name, rule.mode, rule.tenants, rule.on_request) for rule in rules])
    compiled = [_compiled(rule) for rule in rules if not isinstance(rule, OutsideFields) and _modes(rule) & ALL_MODES]
    prompt = _chosen(compiled, ("prompt",), ALL_MODES)
    answer = _chosen(compiled, ("answer",), HOLDING)
    watched = _chosen(compiled, ("answer",), ALL_MODES - HOLDING)
    any_text = _chosen(compiled, ("prompt", "answer"), ALL_MODES)
    categories = tuple(dict.fromkeys(rule.category or rule.name for rule in rules))
    made: list[RuleSet] = []
    for used in (prompt, answer, watched, any_text):  # now, and not while a text waits
        used.take_phrase_sets(next((other for other in made if other.phrases == used.phrases), None))
        made.append(used)
    outside = [(fields, _outside(fields, folder)) for fields in rules if isinstance(fields, OutsideFields)]
    for_prompts = tuple(rule for fields, rule in outside if "prompt" in fields.applies_to)
    for_answers = tuple(rule for fields, rule in outside if "answer" in fields.applies_to)
    return SafetyPolicy(revision, prompt, answer, watched, any_text, for_prompts, for_answers, scopes, categories)


def _outside(fields: OutsideFields, folder: Path) -> OutsideRule:
    """Raises PolicyError."""
    only_watches = _modes(fields) <= {"monitor", "review", "off"}
    if isinstance(fields, InjectionFields):
        if not only_watches or "answer" in fields.applies_to:
            message = "an injection rule is too easily deceived to gate with: use mode monitor or review, for prompts"
            raise PolicyError(f"rule {fields.name!r}: {message}")
        return InjectionJudge(_rule(fields), fields.model, fields.timeout_seconds)
    if "answer" in fields.applies_to and not only_watches:
        message = "answers are judged when they have been shown: use mode monitor or review, or applies_to = ['prompt']"
        raise PolicyError(f"rule {fields.name!r}: {message}")
    return _guardrail(fields, folder) if isinstance(fields, GuardrailFields) else _model_judge(fields)


def _guardrail(fields: GuardrailFields, folder: Path) -> Guardrail:
    """Raises PolicyError."""
    try:
        api_key = (folder / fields.api_key_file).read_text().strip() if fields.api_key_file else ""
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"rule {fields.name!r}: api_key_file: {error}") from error
    return Guardrail(_rule(fields), fields.url, api_key, fields.timeout_seconds)


def _model_judge(fields: JudgeFields) -> ModelJudge:
    """Raises PolicyError."""
    terms = JudgeTerms(fields.format, fields.policy, fields.categories, fields.strict)
    fault = FORMATS[fields.format].fault_of(terms)
    if fault:
        raise PolicyError(f"rule {fields.name!r}: {fault}")
    return ModelJudge(_rule(fields), fields.model, terms, fields.timeout_seconds)


def _fields(table: dict[str, Any], number: int) -> AnyFields:
    """The fields of one rule. Raises PolicyError."""
    name = table.get("name")
    shown = f"rule {name!r}" if isinstance(name, str) else f"rule {number}"
    try:
        if table.get("kind", "text") == "text":
            rule = msgspec.convert(table, RuleFields)
            if not rule.phrases and not rule.patterns:
                raise PolicyError(f"{shown}: has neither phrases nor patterns")
            return rule
        if table["kind"] == "guardrail":
            return msgspec.convert(table, GuardrailFields)
        if table["kind"] == "judge":
            return msgspec.convert(table, JudgeFields)
        if table["kind"] == "injection":
            return msgspec.convert(table, InjectionFields)
        common = {*CommonFields.__struct_fields__, "kind"}
        own = {field: value for field, value in table.items() if field not in common}
        kind = rule_kind(msgspec.convert(table["kind"], Name), own)
        return msgspec.convert({**table, "rule_kind": kind}, KindFields)
    except (msgspec.ValidationError, PluginError) as error:
        raise PolicyError(f"{shown}: {error}") from error


class _Compiled(NamedTuple):
    """A rule's phrases and patterns."""

    fields: RuleFields | KindFields
    phrases: Sequence[Phrase]
    patterns: Sequence[Pattern]


def _compiled(fields: RuleFields | KindFields) -> _Compiled:
    if isinstance(fields, KindFields):
        return _Compiled(fields, (), [_kind_pattern(fields)])
    rule = _rule(fields)
    phrases = [phrase for text in fields.phrases for phrase in _phrases(rule, text, fields)]
    return _Compiled(fields, phrases, [_pattern(rule, expression, fields) for expression in fields.patterns])


def _chosen(compiled: Iterable[_Compiled], targets: Collection[Target], modes: Collection[Mode]) -> RuleSet:
    """The rules for these targets that are in one of these modes for anybody."""
    phrases: list[Phrase] = []
    patterns: list[Pattern] = []
    for each in compiled:
        if not _modes(each.fields).isdisjoint(modes) and not set(each.fields.applies_to).isdisjoint(targets):
            phrases += each.phrases
            patterns += each.patterns
    return RuleSet(phrases, patterns)


def _modes(fields: CommonFields) -> frozenset[Mode]:
    return frozenset((fields.mode, *fields.tenants.values()))


def _rule(fields: CommonFields) -> Rule:
    return Rule(fields.name, fields.message, fields.category or fields.name, fields.on_failure)


def _kind_pattern(fields: KindFields) -> Pattern:
    rule, kind = _rule(fields), fields.rule_kind
    expression = KindExpression(rule.name, kind)
    _check_prefixes(rule, expression.prefixes, kind.max_length)
    return Pattern(rule, expression, expression.prefixes, kind.max_length)


def _phrases(rule: Rule, text: str, fields: RuleFields) -> Iterator[Phrase]:
    """One phrase in all ways in which it is searched."""
    folded = fold(text)[0].strip()
    if not folded:
        raise PolicyError(f"rule {rule.name!r}: the phrase {text!r} is empty")
    written = [(folded, False)]
    if fields.confusables:
        written += [(spelling, True) for spelling in sorted(spellings(text))]
    for spelling, is_look_alike in written:
        yield Phrase(rule, spelling, fields.whole_words, is_look_alike)
        if fields.spaced:
            letters = "".join(filter(is_letter, spelling))
            if len(letters) < MIN_SPACED_LETTERS:
                raise PolicyError(f"rule {rule.name!r}: the phrase {text!r} has too few letters for spaced = true")
            yield Phrase(rule, letters, fields.whole_words, is_look_alike, is_spaced=True)


def _pattern(rule: Rule, expression: str, fields: RuleFields) -> Pattern:
    _check_prefixes(rule, fields.prefixes, fields.max_length)
    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(expression, options)
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else error.args[0]
        raise PolicyError(f"rule {rule.name!r}: pattern {expression!r}: {reason}") from error
    if compiled.search("") is not None:
        raise PolicyError(f"rule {rule.name!r}: pattern {expression!r} matches the empty text")
    return Pattern(rule, compiled, fields.prefixes, fields.max_length)


def _check_prefixes(rule: Rule, prefixes: Sequence[str], max_length: int) -> None:
    longest = min(MAX_PREFIX_LENGTH, max_length)
    if any(not 0 < len(prefix) <= longest for prefix in prefixes):
        raise PolicyError(f"rule {rule.name!r}: prefixes must have 1 to {longest} characters")


def _any_beginning(prefix: str) -> str:
    """Return an expression that matches a proper beginning of `prefix` at the end of a text."""
    nested = ""
    for character in reversed(prefix[:-1]):
        nested = re.escape(character) + (f"(?:{nested})?" if nested else "")
    return rf"{nested}\Z" if nested else ""
