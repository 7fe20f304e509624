"""What clients send beside HTTP bodies: the router's and the shard's decoders of submits, and the edge's of headers.

KVLOOM_FUZZ_EXAMPLES sets how many examples each test runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from aiohttp.test_utils import make_mocked_request
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_http.wire import headers
from edge_http.wire.request_headers import headers_of
from kvloom.errors import KvloomError
from kvloom.v1 import generation_pb2, router_service_pb2, shard_service_pb2
from router.core.core import CoreConfig, RouterCore
from router.core.events import RequestArrived, ShardDescription, ShardUp
from router.request_validator import RequestValidator
from shard_server.engines.base import Capability, EngineInfo
from shard_server.submits import resolve_submit
from tests.examples import num_examples
from tests.fakes.served_models import tiny_models

FUZZ = settings(max_examples=int(os.environ.get("KVLOOM_FUZZ_EXAMPLES", num_examples(120))), deadline=None)
UINT32 = st.integers(0, 40) | st.sampled_from([2**31, 2**32 - 1])
DOUBLE = st.sampled_from([0.0, 0.5, 1.0, 2.0, 1e308, -1.0, float("inf"), float("nan")])
NAMES = st.text(max_size=4) | st.just("x" * 300)


def messages(kind: type, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: kind(**values))


GUIDES = messages(
    generation_pb2.Guide,
    json_object=st.booleans(),
    json_schema=st.sampled_from(["", "{}", "{", "[]", "1", '{"type": 3}', "[" * 5000, "\x00"]),
    regex=st.sampled_from(["", "a", "(", "a{1000000}"]),
    choice=messages(generation_pb2.Choices, texts=st.lists(NAMES, max_size=3)),
    grammar=st.sampled_from(["", "start: x", "%"]),
)
SAMPLING = messages(
    generation_pb2.SamplingParams,
    temperature=DOUBLE,
    top_p=DOUBLE,
    top_k=UINT32,
    seed=st.sampled_from([0, 2**64 - 1]),
    presence_penalty=DOUBLE,
    frequency_penalty=DOUBLE,
    logprobs=UINT32,
    guide=GUIDES,
)
STOPS = messages(
    generation_pb2.StopConditions,
    max_tokens=UINT32,
    stop=st.lists(NAMES, max_size=18),
    stop_token_ids=st.lists(UINT32, max_size=3),
    ignore_eos=st.booleans(),
)
CHOICES = messages(
    generation_pb2.Choice,
    slot=UINT32,
    index=UINT32,
    output_token_ids=st.lists(UINT32, max_size=3),
    num_delivered_chars=UINT32,
)
TOKEN_IDS = st.lists(UINT32, max_size=6)
SUBMITS = messages(
    router_service_pb2.Submit,
    request_id=NAMES,
    model=st.sampled_from(["tiny", "tiny", "other", ""]),
    prompt_token_ids=TOKEN_IDS,
    prompt_text=NAMES,
    sampling=SAMPLING,
    stop=STOPS,
    choices=st.lists(CHOICES, max_size=3),
    timeout_seconds=DOUBLE,
    tenant=NAMES,
    traceparent=NAMES,
    session_key=NAMES,
    tier=st.integers(0, 4),
)
GENERATES = messages(
    router_service_pb2.GenerateRequest,
    model=st.sampled_from(["tiny", "tiny", "other", ""]),
    text=NAMES,
    conversation=messages(
        router_service_pb2.Conversation,
        messages=st.lists(
            messages(
                router_service_pb2.Message,
                role=st.sampled_from(["user", "system", "", "\x00"]),
                content=NAMES,
                parts=st.lists(messages(router_service_pb2.ContentPart, text=NAMES), max_size=2),
            ),
            max_size=3,
        ),
    ),
    token_ids=messages(router_service_pb2.TokenIds, ids=TOKEN_IDS),
    sampling=SAMPLING,
    stop=STOPS,
    n=UINT32,
    request_id=NAMES,
    timeout_seconds=DOUBLE,
    session_key=NAMES,
    tier=st.integers(0, 4),
)
SHARD_SUBMITS = messages(
    shard_service_pb2.ShardSubmit,
    request_id=NAMES,
    attempt_id=UINT32,
    prompt_token_ids=TOKEN_IDS,
    sampling=SAMPLING,
    stop=STOPS,
    choices=st.lists(CHOICES, max_size=3),
    cache_salt=NAMES,
    num_expected_cached_tokens=UINT32,
)


def intake() -> RequestValidator:
    return RequestValidator(tiny_models(), max_prompt_tokens=64, needs_prompt_text=lambda: True)


def admit(request: Any) -> None:
    """The core accepts every request that the intake accepts."""
    core = RouterCore(CoreConfig(safety_required=False, answer_mode="off"), seed=1)
    core.handle(ShardUp(ShardDescription("s0", "1", "tiny", 4, 100, 4, 60)), 1.0)
    core.handle(RequestArrived(request), 1.0)
    core.check_integrity()


def check_refusal(error: KvloomError) -> None:
    """The client's fault, in an error message that fits on a screen."""
    assert error.kind.http_status in (400, 404, 413, 429)
    assert len(error.message) < 2000


@FUZZ
@given(submit=SUBMITS)
def test_any_submit(submit: router_service_pb2.Submit) -> None:
    """On the data plane, a submit gives a request or its own error, and the stream continues."""
    try:
        request = intake().request_from_submit(submit, "client")
    except KvloomError as error:
        check_refusal(error)
        return
    admit(request)


@FUZZ
@given(wanted=GENERATES)
def test_any_generate_request(wanted: router_service_pb2.GenerateRequest) -> None:
    """The same holds for `Generate`."""
    try:
        request = asyncio.run(intake().accept_generate(wanted, "client")).request
    except KvloomError as error:
        check_refusal(error)
        return
    admit(request)


INFO = EngineInfo(
    engine="sim",
    model="tiny",
    vocab_size=40,
    eos_token_ids=frozenset((2,)),
    block_size=4,
    num_blocks=100,
    max_batch=4,
    max_model_len=30,
    capabilities=frozenset(Capability),
)


@FUZZ
@given(submit=SHARD_SUBMITS)
def test_any_submit_at_a_shard(submit: shard_service_pb2.ShardSubmit) -> None:
    """Routers of another version, or foreign ones, cannot make a shard's engine accept what it cannot run."""
    try:
        requests = resolve_submit(submit, INFO, serial=1)
    except KvloomError as error:
        check_refusal(error)
        return
    for request in requests:
        assert 0 < len(request.prompt_token_ids) + request.max_tokens <= INFO.max_model_len
        assert all(token_id < INFO.vocab_size for token_id in request.prompt_token_ids)


HEADER_VALUES = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=("Cs",)), max_size=20)


@FUZZ
@given(
    given_headers=st.dictionaries(
        st.sampled_from(
            [
                headers.REQUEST_ID,
                "x-correlation-id",
                "traceparent",
                headers.SESSION_ID,
                headers.RESUME,
                headers.IDEMPOTENCY_KEY,
                headers.LAST_EVENT_ID,
                headers.DETAILS,
                headers.EXPLAIN,
            ]
        ),
        HEADER_VALUES | st.sampled_from(["9" * 17, "9" * 16, "-1", "+5", "1_0", "٣", "0", " 7", "1e3", "on", "OFF"]),
    )
)
def test_any_headers(given_headers: dict[str, str]) -> None:
    """Unknown header values are ignored or rejected by name; none of them gets into logs and responses unchecked."""
    request = make_mocked_request("POST", "/v1/chat/completions", headers=given_headers)
    request_id = headers.request_id(request)
    assert request_id.isascii()
    assert request_id.isprintable()
    assert len(request_id) <= 128
    assert len(headers.traceparent(request)) <= 200
    readers = (
        headers.wants_resume,
        headers.idempotency_key,
        headers.last_event_id,
        lambda r: headers.session_key(r, None),
        headers.wants_details,
        headers.wants_explanation,
        lambda r: headers_of(r).idempotency_key,
    )
    for read in readers:
        value, field = _read(read, request)
        assert field in (
            "",
            headers.RESUME,
            headers.IDEMPOTENCY_KEY,
            headers.LAST_EVENT_ID,
            headers.SESSION_ID,
            headers.CACHE,
        )
        assert not isinstance(value, int) or 0 <= value <= headers.MAX_EVENT_NUMBER


def _read(read: Callable[[Any], object], request: object) -> tuple[object, str]:
    """(value, field at fault)."""
    try:
        return read(request), ""
    except KvloomError as error:
        check_refusal(error)
        return None, error.field or "?"
