"""How public guard models are asked for a judgement, and how they answer.

A format makes the conversation that a model's own chat template expects, and reads what the model has written. What it
cannot read for certain is no judgement: the rule has then failed, and neither allows nor forbids the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

FormatName = Literal["llama_guard", "granite_guardian", "shieldgemma", "qwen3guard", "gpt_oss_safeguard"]

HARM: Final = "harm"
"""Granite Guardian's criterion for all that does harm."""


class JudgeTerms(NamedTuple):
    """The terms of one rule, which are those of `JudgeFields` (rule_fields.py)."""

    format: FormatName
    policy: str = ""
    categories: Sequence[str] = ()
    strict: bool = False


class JudgePrompt(NamedTuple):
    """The input of a model."""

    messages: Sequence[tuple[str, str]]
    """Roles and contents."""
    options: Mapping[str, Any]
    """The variables of the chat template."""
    max_tokens: int


class JudgeFormat(NamedTuple):
    """One family of models."""

    prompt_for: Callable[[JudgeTerms, str, bool], JudgePrompt]
    """Makes the prompt for a text, which may be an answer."""
    forbids: Callable[[JudgeTerms, str], bool | None]
    """Reads the answer; None: it is no judgement."""
    fault_of: Callable[[JudgeTerms], str]
    """Why a rule cannot have these terms; "" if it can."""


# -- Llama Guard ------------------------------------------------------------------------------------------------------

_LLAMA_CODES: Final = re.compile(r"S\d{1,2}(\s*,\s*S\d{1,2})*")


def _plain_prompt(max_tokens: int) -> Callable[[JudgeTerms, str, bool], JudgePrompt]:
    """The chat template has everything but the text."""
    return lambda _terms, text, is_answer: JudgePrompt(_conversation(text, is_answer), {}, max_tokens)


def _conversation(text: str, is_answer: bool) -> Sequence[tuple[str, str]]:
    """Models judge the last message. An answer is judged without its prompt."""
    return [("user", ""), ("assistant", text)] if is_answer else [("user", text)]


def _llama_forbids(terms: JudgeTerms, answer: str) -> bool | None:
    """ "safe", or "unsafe" with the codes of hazards in the next line."""
    lines = answer.strip().split("\n")
    verdict, rest = lines[0].strip(), "".join(lines[1:]).strip()
    if verdict == "safe":
        return None if rest else False
    if verdict != "unsafe" or (rest and not _LLAMA_CODES.fullmatch(rest)):
        return None
    return _is_of(terms, [code.strip() for code in rest.split(",") if code.strip()])


# -- Granite Guardian -------------------------------------------------------------------------------------------------

_SCORE: Final = re.compile(r"<score>\s*(yes|no)\s*</score>", re.IGNORECASE)


def _granite_prompt(terms: JudgeTerms, text: str, is_answer: bool) -> JudgePrompt:
    """Versions up to 3.2 read `risk_name` and `risk_definition`, later ones the others."""
    config: dict[str, str] = {}
    if terms.policy:
        config |= {"risk_definition": terms.policy, "custom_criteria": terms.policy}
    if terms.categories or not terms.policy:
        criterion = terms.categories[0] if terms.categories else HARM
        config |= {"risk_name": criterion, "criteria_id": criterion}
    return JudgePrompt(_conversation(text, is_answer), {"guardian_config": config, "think": False}, 64)


def _granite_forbids(_terms: JudgeTerms, answer: str) -> bool | None:
    """ "<score> yes </score>", or in older versions "Yes" in the first line. All scores must say the same."""
    scores = {score.lower() for score in _SCORE.findall(answer)}
    if scores:
        return None if len(scores) > 1 else scores == {"yes"}
    if "<score" in answer:
        return None
    return _yes_or_no(answer.strip().split("\n")[0])


def _granite_fault(terms: JudgeTerms) -> str:
    return "granite_guardian judges by one criterion: give at most one category" if len(terms.categories) > 1 else ""


# -- ShieldGemma ------------------------------------------------------------------------------------------------------


def _shieldgemma_prompt(terms: JudgeTerms, text: str, is_answer: bool) -> JudgePrompt:
    return JudgePrompt(_conversation(text, is_answer), {"guideline": terms.policy}, 8)


def _shieldgemma_forbids(_terms: JudgeTerms, answer: str) -> bool | None:
    """The answer begins with "Yes" or "No"; an explanation may follow."""
    words = re.match(r"\w+", answer.strip())
    return None if words is None else _yes_or_no(words[0])


# -- Qwen3Guard -------------------------------------------------------------------------------------------------------

_QWEN_SAFETY: Final = re.compile(r"^Safety: *(Safe|Unsafe|Controversial) *$", re.MULTILINE)
_QWEN_CATEGORIES: Final = re.compile(r"^Categories: *(.+?) *$", re.MULTILINE)


def _qwen_forbids(terms: JudgeTerms, answer: str) -> bool | None:
    """ "Safety: Unsafe" and "Categories: Violent, Jailbreak" in lines of their own."""
    found = _QWEN_SAFETY.findall(answer)
    if len(found) != 1:
        return None
    if found[0] == "Safe" or (found[0] == "Controversial" and not terms.strict):
        return False
    categories = _QWEN_CATEGORIES.search(answer)
    named = [] if categories is None or categories[1] == "None" else categories[1].split(",")
    return _is_of(terms, [name.strip() for name in named])


# -- gpt-oss-safeguard ------------------------------------------------------------------------------------------------

_SAFEGUARD_FORM: Final = (
    'Answer with one JSON object and nothing else: {"violation": 1} if the content violates the policy, '
    '{"violation": 0} if it does not.'
)


class _Violation(msgspec.Struct):
    violation: int
    policy_category: str | None = None


def _safeguard_prompt(terms: JudgeTerms, text: str, _is_answer: bool) -> JudgePrompt:
    system = f"{terms.policy}\n\n{_SAFEGUARD_FORM}"
    return JudgePrompt([("system", system), ("user", text)], {"reasoning_effort": "low"}, 1024)


def _safeguard_forbids(terms: JudgeTerms, answer: str) -> bool | None:
    """The object, or its number alone. The model's reasoning was taken out before."""
    answer = answer.strip()
    try:
        found = _Violation(int(answer)) if answer in ("0", "1") else msgspec.json.decode(answer, type=_Violation)
    except (msgspec.DecodeError, RecursionError):
        return None
    if found.violation not in (0, 1):
        return None
    return bool(found.violation) and _is_of(terms, [found.policy_category] if found.policy_category else [])


# ---------------------------------------------------------------------------------------------------------------------


def _is_of(terms: JudgeTerms, categories: Sequence[str]) -> bool:
    """True when a forbidden text is one of the rule's. One of which the model names no category is."""
    return not terms.categories or not categories or not set(terms.categories).isdisjoint(categories)


def _yes_or_no(word: str) -> bool | None:
    return {"yes": True, "no": False}.get(word.strip().lower())


def _needs_policy(terms: JudgeTerms) -> str:
    return "" if terms.policy else f"{terms.format} is told what is forbidden: give a policy"


def _has_own_policy(terms: JudgeTerms) -> str:
    return f"{terms.format} knows what is forbidden, and takes no policy" if terms.policy else ""


def _needs_policy_without_categories(terms: JudgeTerms) -> str:
    return "shieldgemma names no categories" if terms.categories else _needs_policy(terms)


FORMATS: Final[Mapping[FormatName, JudgeFormat]] = {
    "llama_guard": JudgeFormat(_plain_prompt(32), _llama_forbids, _has_own_policy),
    "granite_guardian": JudgeFormat(_granite_prompt, _granite_forbids, _granite_fault),
    "shieldgemma": JudgeFormat(_shieldgemma_prompt, _shieldgemma_forbids, _needs_policy_without_categories),
    "qwen3guard": JudgeFormat(_plain_prompt(64), _qwen_forbids, _has_own_policy),
    "gpt_oss_safeguard": JudgeFormat(_safeguard_prompt, _safeguard_forbids, _needs_policy),
}
