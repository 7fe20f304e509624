"""The router believes processes of the fabric that the choices of a request have output already, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from kvloom.v1 import router_service_pb2 as pb
from kvloom.v1.generation_pb2 import Choice
from kvloom_common.models.served_model import ServedModel
from router.caller_scope import TRUSTED, CallerScope
from router.core.events import Request
from router.core.objectives import LiveObjectives
from router.request_validator import RequestValidator
from tests.fakes.link_requests import make_submit
from tests.fakes.tiny_tokenizer import model_tokenizer

OUTSIDE = CallerScope("acme/search")
TOKENIZER = model_tokenizer()


def intake() -> RequestValidator:
    return RequestValidator({"m": ServedModel("m", TOKENIZER, 0, "fp")}, 1000, lambda: True, meters_usage=True)


def submitted(scope: CallerScope, output: str = "", **fields: Any) -> Request:
    token_ids = TOKENIZER.encode_now(output) if output else []
    choice = Choice(slot=1, output_token_ids=token_ids, num_delivered_chars=len(output))
    prompt = TOKENIZER.encode_now("the fox")
    submit = make_submit(request_id="r", model="m", prompt_token_ids=prompt, choices=[choice], **fields)
    return intake().request_from_submit(submit, "client", scope)


def test_processes_of_the_fabric_are_believed() -> None:
    """Their answers were screened, charged and admitted where they began."""
    request = submitted(TRUSTED, "jumps", num_ended_tokens=3, prompt_text="the fox")
    assert (request.is_continued, request.num_claimed_tokens) == (True, 0)
    assert request.num_earlier_tokens == len(request.choices[0].output_token_ids) + 3
    assert (request.answer_id, request.prompt_text) == ("", "the fox")


def test_others_have_a_longer_prompt() -> None:
    """That is what the fabric computes for them."""
    request = submitted(OUTSIDE, "jumps", num_ended_tokens=3, num_foreign_tokens=1)
    num_claimed = len(request.choices[0].output_token_ids)
    assert (request.is_continued, request.num_earlier_tokens, request.num_claimed_tokens) == (False, 0, num_claimed)
    assert request.num_prompt_tokens == len(request.prompt_token_ids) + num_claimed


def test_no_two_requests_of_others_are_one_answer() -> None:
    """The same request twice under one id was computed twice, and paid once."""
    assert submitted(OUTSIDE).answer_id != submitted(OUTSIDE).answer_id != ""


@pytest.mark.parametrize("text", ["", "the fox"])
def test_claimed_output_is_screened_and_so_is_a_prompt_whose_text_is_another(text: str) -> None:
    """Forbidden text passed as the output that a choice has, or as tokens beside a harmless text."""
    request = submitted(OUTSIDE, "a forbidden thing", prompt_text=text)
    assert request.prompt_text == "the fox\na forbidden thing"
    assert submitted(OUTSIDE, prompt_text="something else").prompt_text == "the fox"


async def test_claims_of_a_generate_are_screened() -> None:
    """The same over the RPC for a single request."""
    claim = pb.PartialChoice(index=0, token_ids=TOKENIZER.encode_now("a forbidden thing"), num_delivered_chars=17)
    wanted = pb.GenerateRequest(model="m", text="the fox", partial_choices=[claim], n=2)
    wanted.sampling.seed = 7
    accepted = await intake().accept_generate(wanted, "client", scope=OUTSIDE)
    assert accepted.request.prompt_text == "the fox\na forbidden thing"
    assert accepted.request.num_claimed_tokens == len(claim.token_ids)
    trusted = (await intake().accept_generate(wanted, "client")).request
    assert (trusted.prompt_text, trusted.num_claimed_tokens) == ("the fox", 0)


@pytest.mark.parametrize(("scope", "is_refusable"), [(TRUSTED, False), (OUTSIDE, True)])
def test_only_the_fabric_says_that_a_request_was_admitted(scope: CallerScope, is_refusable: bool) -> None:
    """A request with `admitted`, or with output, is not refused because its deadline cannot be met."""
    objectives = pb.Objectives(deadline_ms=100, admitted=True)
    for output in ("", "jumps"):
        request = submitted(scope, output, objectives=objectives)
        assert request.objectives is not None
        live = LiveObjectives(request.objectives, 0.0, is_continued=request.is_continued)
        assert live.is_refusable is is_refusable
