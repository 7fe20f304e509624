"""The configuration of names that stand for one of several models, and of shadow traffic."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvloom_common.config.section import NonNegativeInt, Section, always


class RouteTarget(Section):
    """A model among which a route chooses."""

    model: str
    """A model's name or alias, never a route's."""
    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    """Its share, in relation to the other targets'."""


Language = Literal[
    "ar",
    "de",
    "el",
    "en",
    "es",
    "fr",
    "he",
    "hi",
    "it",
    "ja",
    "ko",
    "nl",
    "pl",
    "pt",
    "ru",
    "sv",
    "th",
    "tr",
    "uk",
    "zh",
]
"""The languages that rules tell apart, by their ISO 639-1 codes."""


class RouteRule(Section):
    """Names the models that take the requests for which all of the conditions hold. A condition that is not set always
    holds."""

    targets: Annotated[list[str | RouteTarget], Meta(min_length=1, max_length=8)]
    """The models, as in the route's `targets`."""
    features: list[Literal["tools", "schema", "logprobs", "vision"]] = []
    """The request asks for all of these: tools, a form that the answer must have, logprobs, that images are seen."""
    tiers: list[Literal["interactive", "batch"]] = []
    """One of them is the request's."""
    min_prompt_tokens: NonNegativeInt = 0
    """The least size of the prompt. Before a model is chosen, it is estimated: a quarter of the body's bytes."""
    max_prompt_tokens: NonNegativeInt = 0
    """The largest size. 0: any."""
    min_context_tokens: NonNegativeInt = 0
    """The least context that the request needs: the estimated size of its prompt, and the most that its answer may
    have. An answer without a limit counts as nothing."""
    max_context_tokens: NonNegativeInt = 0
    """The largest context. 0: any."""
    languages: list[Language] = []
    """One of them is that of the last message of the user. One that is not clear is none of them."""


class CascadeConfig(Section):
    """When the answer of one of a route's models is discarded, so that the next model answers."""

    escalate_on: Annotated[list[Literal["schema", "logprob", "refusal"]], Meta(min_length=1)]
    """The tests that an answer must pass."""
    min_mean_logprob: Annotated[float, Meta(le=0, ge=-100)] = -1.0
    """For "logprob": the least mean log-probability of an answer's tokens."""


class RouteConfig(Section):
    """A name by which clients request one of several models (docs/how-to/model-routes.md)."""

    name: str
    """It goes before a model of the same name."""
    targets: Annotated[list[str | RouteTarget], Meta(min_length=1, max_length=8)]
    """The models, by their names or with weights."""
    rules: Annotated[list[RouteRule], Meta(max_length=64)] = []
    """The first whose conditions hold replaces `targets`."""
    fallback: Annotated[list[str], Meta(max_length=8)] = []
    """The models to try, in this order, when the chosen one cannot take a request."""
    cascade: CascadeConfig | None = None
    """The answer of every model but the last must pass these tests before the client gets it. None: answers are not
    judged."""
    on_loss: Literal["fail", "continue"] = "fail"
    """A streamed answer whose model is lost when the client has a part of it fails, or the next model of the route
    continues its text."""


class ShadowConfig(Section):
    """A share of a model's answers that is also given to a candidate, without being shown to anyone
    (docs/how-to/shadow-traffic.md)."""

    moved = always(max_queued="64", max_tokens="4096")

    model: str
    """The model whose answers are sampled."""
    candidate: str
    """The model that is compared with it."""
    share: Annotated[float, Meta(ge=0, le=1)] = 0.01
    """The share of the model's answers."""
    mode: Literal["score", "generate"] = "score"
    """"score": the candidate computes how likely it finds the answer, by one prefill. "generate": it answers, too."""
    max_in_flight: Annotated[int, Meta(ge=1, le=256)] = 2
    """How many requests a router has under way at the candidate for this."""
