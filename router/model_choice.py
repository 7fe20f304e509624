"""Chooses the model that takes a `Generate` which names a route, or several models."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvloom.errors import invalid_argument
from kvloom.v1.router_service_pb2 import TIER_BATCH, GenerateRequest
from kvloom_common.models.model_routes import (
    BYTES_PER_TOKEN,
    MAX_CANDIDATES,
    ChosenRoute,
    Feature,
    ModelRoutes,
    RouteFacts,
)
from kvloom_common.models.served_model import ServedModel, adapters_by_model
from router.caller_scope import CallerAccess


class ModelChoice(NamedTuple):
    model: ServedModel | None
    """None: the name stands for none."""
    chosen: ChosenRoute | None = None
    """How it was chosen; None if it was named."""


def choose_model(
    wanted: GenerateRequest,
    models: Mapping[str, ServedModel],
    routes: ModelRoutes,
    is_ready: Callable[[str], bool],
    caller: str,
    access: CallerAccess | None = None,
    prefers_others: Callable[[str], bool] | None = None,
) -> ModelChoice:
    """Chooses the first of several models with a ready shard that is not so overloaded that it `prefers_others`, or
    else the first with a ready shard. Raises KvloomError (INVALID_ARGUMENT, PERMISSION_DENIED)."""
    if access is not None:
        is_any = routes.is_any(wanted.model, models)
        access.check_models(wanted.models if is_any else (wanted.model, *wanted.models), models)
    named = models.get(wanted.model)
    # A part of the answer came from this very model.
    is_continued = bool(wanted.partial_choices) and named is not None
    is_answer = not wanted.HasField("pooling")
    if is_continued or not routes.is_needed(wanted.model, wanted.models, models, is_answer=is_answer):
        return ModelChoice(named)
    if len(wanted.models) > MAX_CANDIDATES:
        raise invalid_argument(f"models may have at most {MAX_CANDIDATES} names.", "models")
    served = adapters_by_model(models.values())
    if access is not None:
        served = list(access.usable(served, models))
    if not is_answer:
        real_names = {name: model.name for name, model in models.items()}
        routes.check_comparable(wanted.model, wanted.models, served, lambda name: real_names.get(name, name))
    chosen = routes.choose(wanted.model, wanted.models, _facts(wanted, caller), served)
    if access is not None and not chosen.models:
        access.check_models((wanted.model,), models)
    # It streams at once, so it takes no answer that would have to be judged first.
    names = [name for name in chosen.models if name not in chosen.cascades]
    known = [model for name in names if (model := models.get(name)) is not None]
    if chosen.cascades:
        chosen = dataclasses.replace(chosen, targets=names[:1])
    ready = [model for model in known if is_ready(model.base_name or model.name)]
    preferred = ready
    if prefers_others is not None:
        preferred = [model for model in ready if not prefers_others(model.base_name or model.name)]
    return ModelChoice(next(itertools.chain(preferred, ready, known), None), chosen)


def _facts(wanted: GenerateRequest, caller: str) -> RouteFacts:
    features: set[Feature] = set()
    if wanted.tools:
        features.add("tools")
    if wanted.sampling.HasField("guide"):
        features.add("schema")
    if wanted.sampling.HasField("logprobs"):
        features.add("logprobs")
    is_tokens = wanted.WhichOneof("input") == "token_ids"
    size = len(wanted.token_ids.ids) if is_tokens else wanted.ByteSize() // BYTES_PER_TOKEN
    return RouteFacts(
        num_prompt_tokens=size,
        features=frozenset(features),
        is_batch=wanted.tier == TIER_BATCH,
        share_key=wanted.session_key or caller,
        max_answer_tokens=wanted.stop.max_tokens,
        user_text=_user_text(wanted),
        is_answer=not wanted.HasField("pooling"),
    )


def _user_text(wanted: GenerateRequest) -> str:
    if wanted.WhichOneof("input") == "text":
        return wanted.text
    messages = wanted.conversation.messages
    return next((message.content for message in reversed(messages) if message.role == "user"), "")
