"""Requests to a router, made of the fields that a test names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvloom.router_link.link import ChoiceProgress, LinkRequest
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from kvloom.v1.router_service_pb2 import GenerateRequest, Submit

_OF_REQUEST = frozenset(GenerateRequest.DESCRIPTOR.fields_by_name)


def make_submit(**fields: Any) -> Submit:
    """A submit with these fields, each where it stands: in the submit itself, or in its request."""
    wanted = {name: fields.pop(name) for name in [*fields] if name in _OF_REQUEST}
    return Submit(request=GenerateRequest(**wanted), **fields)


def link_request(
    request_id: str = "r",
    model: str = "m",
    prompt_token_ids: Sequence[int] = (1, 2, 3),
    prompt_text: str = "",
    sampling: SamplingParams | None = None,
    stop: StopConditions | None = None,
    n: int = 1,
    timeout_seconds: float = 0.0,
    *,
    partial_choices: Sequence[ChoiceProgress] = (),
    is_new: bool = False,
    **fields: Any,
) -> LinkRequest:
    """A request for a link; `fields` are those of `make_submit`."""
    submit = make_submit(
        request_id=request_id,
        model=model,
        prompt_text=prompt_text,
        sampling=sampling or SamplingParams(),
        stop=stop or StopConditions(),
        n=n,
        timeout_seconds=timeout_seconds,
        **fields,
    )
    return LinkRequest(submit, prompt_token_ids, partial_choices, is_new)
