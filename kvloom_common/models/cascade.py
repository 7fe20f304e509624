"""When the answer of a smaller model is discarded, so that a larger one answers. It is pure: an answer that has ended
is judged by the tests of its route (docs/how-to/model-routes.md)."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from kvloom_common.config import CascadeConfig
from kvloom_common.json_schema.schema_check import conforms

Objection = Literal["schema", "logprob", "refusal", "too_large"]
"""Why an answer is discarded. "too_large": it could not be held until its end."""

ANY_JSON: Final[Mapping[str, Any]] = {"type": "object"}
"""The schema of `response_format: {"type": "json_object"}`."""


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerForm:
    """Says what a request demands of the form of its answers."""

    schema: Any = None
    """The JSON Schema of its text; None: there is none."""
    choices: Sequence[str] = ()
    """The texts of which it must be one; empty: any."""
    is_guided: bool = False
    """True when the request asked for any form, so that an answer that was cut off does not have it."""
    tools: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The schema of the arguments of each tool that may be called."""


@dataclasses.dataclass(slots=True)
class CandidateChoice:
    """One choice of the answer that is judged."""

    text: str = ""
    """Without reasoning and calls."""
    calls: Sequence[tuple[str, str]] = ()
    """(name, arguments as the model wrote them)"""
    finish_reason: str = "stop"
    """In OpenAI's words."""
    sum_logprobs: float = 0.0
    num_logprobs: int = 0
    """Tokens whose log-probability is in the sum; reasoning has some, too."""


def objection(choices: Sequence[CandidateChoice], tests: CascadeConfig, form: AnswerForm) -> Objection | None:
    """The first of the tests, in their order, that some choice does not pass; None: the answer is good enough."""
    for test in tests.escalate_on:
        if not all(_passes(test, choice, tests, form) for choice in choices):
            return test
    return None


def _passes(test: str, choice: CandidateChoice, tests: CascadeConfig, form: AnswerForm) -> bool:
    match test:
        case "refusal":
            return choice.finish_reason != "content_filter" and (bool(choice.calls) or not is_refusal(choice.text))
        case "logprob":
            # An answer without tokens says nothing of how sure the model was.
            return not choice.num_logprobs or choice.sum_logprobs / choice.num_logprobs >= tests.min_mean_logprob
        case _:
            return _has_form(choice, form)


def _has_form(choice: CandidateChoice, form: AnswerForm) -> bool:
    if choice.finish_reason == "length" and (form.is_guided or choice.calls):
        return False
    if choice.calls:
        return all(_is_call(name, arguments, form.tools) for name, arguments in choice.calls)
    if form.choices:
        return choice.text in form.choices
    return form.schema is None or _is_json(choice.text, form.schema)


def _is_call(name: str, arguments: str, tools: Mapping[str, Any]) -> bool:
    return name in tools and _is_json(arguments, ANY_JSON) and _is_json(arguments, tools[name])


def _is_json(text: str, schema: Any) -> bool:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return conforms(value, schema)


def _refuse_constant(name: str) -> None:
    """JSON has no NaN."""
    raise ValueError(name)


NUM_READ_CHARS: Final = 240
"""How much of an answer's beginning is read."""

_HELP: Final = (
    r"(?:help|assist|comply|fulfil|fulfill|provide|answer|do that|do this|create|generate|write|engage|support|share|"
    r"discuss|offer|give|participate|continue|produce|complete|respond)\b"
)
_APOLOGY: Final = (
    r"(?:(?:i'm|i am|we're|we are) (?:very |so |really )?sorry|sorry|i apologi[sz]e|my apologies|unfortunately)"
)
_NOT_ABLE: Final = (
    r"(?:can't|cannot|can not|won't|will not|am not able to|am unable to|'m not able to|'m unable to|must decline to|"
    r"have to decline to|am not allowed to|'m not allowed to)"
)
_AS_AN_AI: Final = r"as an? (?:ai|artificial intelligence|language model|large language model)[a-z ,-]{0,40}"

_REFUSALS: Final = re.compile(
    "|".join(
        (
            # "I'm sorry, but I can't help with that." An apology alone, or for a mistake, is none.
            rf"{_APOLOGY}[,.!;:]? (?:but )?(?:i|we) ?{_NOT_ABLE}",
            rf"{_APOLOGY}[,.!;:]? (?:but )?{_AS_AN_AI} ?(?:i|we) ?{_NOT_ABLE}",
            # Without an apology it must be about the wish: "I cannot see the moon from here" is an answer.
            rf"(?:{_AS_AN_AI} ?)?i ?{_NOT_ABLE} {_HELP}",
            r"i must (?:respectfully )?(?:decline|refuse)\b",
            # German
            r"(?:es tut mir (?:sehr )?leid|tut mir leid|entschuldigung|leider)[,.!;:]? (?:aber )?"
            r"(?:da(?:bei|mit|zu) )?(?:kann|darf|werde) ich (?:ihnen |dir |euch )?"
            r"(?:da(?:bei|mit|zu|rauf) |das |diese[a-z]* [a-zäöüß]+ )?(?:leider )?nicht\b",
            r"ich (?:kann|darf|werde) (?:ihnen |dir |euch )?(?:da(?:bei|mit|zu) |das )(?:leider )?nicht\b",
            # French
            r"(?:je suis (?:vraiment )?désolée?|désolée?)[,.!;:]? (?:mais )?je ne (?:peux|puis|pourrai) pas\b",
            r"je ne (?:peux|puis) pas (?:vous |t')?(?:aider|répondre|fournir|faire cela)\b",
            # Spanish
            r"(?:lo siento|lamentablemente)[,.!;:]? (?:pero )?no (?:puedo|podré)\b",
            r"no puedo (?:ayudarte|ayudarle|ayudar|proporcionar|responder a es[ao])\b",
        )
    )
)
_PLAIN: Final = str.maketrans({"’": "'", "‘": "'", "*": None, "_": None, "#": None, '"': None, "“": None, "”": None})


def is_refusal(text: str) -> bool:
    """True when the text begins with a refusal. Markup, quotation marks and case do not matter."""
    beginning = " ".join(text[:NUM_READ_CHARS].translate(_PLAIN).lower().split())
    return _REFUSALS.match(beginning) is not None
