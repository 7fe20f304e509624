"""The headers of a request are read once, however they are written."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from edge_http.wire.request_headers import NO_WISHES, RequestHeaders, headers_of
from kvloom.errors import KvloomError
from kvloom.v1.router_service_pb2 import GenerateRequest


def test_a_request_without_wishes_makes_no_record() -> None:
    """Nearly all requests are of this kind, and must not pay for what they do not ask for."""
    request = make_mocked_request("POST", "/", headers={"Host": "edge", "x-request-id": "r", "traceparent": "00"})
    assert headers_of(request) is NO_WISHES


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (
            "X-KVLOOM-Details",
            "True",
            RequestHeaders(wants_details=True, wanted=GenerateRequest(tells_safety_rules=True)),
        ),
        ("x-kvloom-explain", "1", RequestHeaders(wants_explanation=True)),
        ("x-kvloom-Receipt", "true", RequestHeaders(wanted=GenerateRequest(receipt=True))),
        ("X-Kvloom-Resume", "OFF", RequestHeaders(resume=False)),
        ("idempotency-key", "k", RequestHeaders(idempotency_key="k")),
        ("cache-control", "max-age=0, no-store", RequestHeaders(wanted=GenerateRequest(no_result_cache=True))),
        ("X-Kvloom-Cache", "off", RequestHeaders(wanted=GenerateRequest(no_result_cache=True))),
        ("X-LLM-D-Inference-Fairness-Id", "f", RequestHeaders(has_class=True)),
        ("x-llm-d-SLO-ttft-ms", "9", RequestHeaders(has_objectives=True)),
    ],
)
def test_each_header_sets_its_field(name: str, value: str, expected: RequestHeaders) -> None:
    """Names of headers have no case, and a second look finds the same record."""
    request = make_mocked_request("POST", "/", headers={name: value})
    assert headers_of(request) == expected
    assert headers_of(request) is headers_of(request)


@pytest.mark.parametrize("name", ["x-kvloom-cache", "x-kvloom-resume", "Idempotency-Key"])
def test_a_wrong_value_is_refused_by_name(name: str) -> None:
    """A wish that was ignored would not be noticed."""
    with pytest.raises(KvloomError) as caught:
        headers_of(make_mocked_request("POST", "/", headers={name: "?!"}))
    assert caught.value.field == name
