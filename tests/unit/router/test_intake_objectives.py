"""Which objectives a request gets from its message, and what is left of them at another router."""

from __future__ import annotations

import math

import pytest

from kvloom.client.generate_request import build_request
from kvloom.errors import KvloomError
from kvloom.objectives import delay_objectives
from kvloom.v1.generation_pb2 import Choice
from kvloom.v1.router_service_pb2 import Objectives
from router.core.events import Request
from router.core.objectives import Objectives as CoreObjectives
from router.request_builder import within_deadline
from router.request_validator import RequestValidator
from tests.fakes.link_requests import make_submit
from tests.fakes.served_models import tiny_models


def request_of(objectives: Objectives | None) -> Request:
    intake = RequestValidator(tiny_models(), 50, lambda: False)
    submit = make_submit(model="tiny", prompt_token_ids=[1], choices=[Choice(slot=1)], objectives=objectives)
    return intake.request_from_submit(submit, "c")


def test_objectives_are_in_seconds_in_the_core() -> None:
    """The wire has milliseconds, like the headers; the core has seconds everywhere."""
    assert request_of(None).objectives is None
    wanted = Objectives(deadline_ms=9000, ttft_ms=250, tpot_ms=40, elapsed_ms=500, admitted=True)
    assert request_of(wanted).objectives == CoreObjectives(9.0, 0.25, 0.04, 0.5, is_admitted=True)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e9])
@pytest.mark.parametrize("name", ["deadline_ms", "ttft_ms", "tpot_ms"])
def test_every_other_value_is_an_error_that_names_the_field(name: str, value: float) -> None:
    """The router and the SDK refuse the same values, each by the name that its caller knows."""
    with pytest.raises(KvloomError) as caught:
        request_of(Objectives(**{name: value}))
    assert caught.value.field == f"objectives.{name}"
    with pytest.raises(KvloomError) as caught:
        build_request({"model": "tiny", "text": "a", name: value})
    assert caught.value.field == name


def test_the_sdk_has_options_for_them() -> None:
    """A request without objectives must have no such message at all."""
    assert not build_request({"model": "tiny", "text": "a"}).HasField("objectives")
    assert build_request({"model": "tiny", "text": "a", "ttft_ms": 250}).objectives == Objectives(ttft_ms=250)


def test_objectives_count_from_the_first_arrival() -> None:
    """A failover must give a request no new time, and must not have it refused."""
    later = Objectives(deadline_ms=9000, elapsed_ms=500)
    delay_objectives(later, 2.0, is_admitted=True)
    assert later == Objectives(deadline_ms=9000, elapsed_ms=2500, admitted=True)


def test_the_deadline_of_a_call_counts_too() -> None:
    """gRPC ends a call at its own deadline, so nothing may be computed after that."""
    request = request_of(Objectives(deadline_ms=9000, elapsed_ms=500))
    for seconds, expected in ((2.0, 2.5), (60.0, 9.0)):
        objectives = within_deadline(request, seconds).objectives
        assert objectives is not None
        assert objectives.deadline_seconds == expected
