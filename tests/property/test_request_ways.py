"""A request says the same to the engine and to its bill, whichever way it takes: new over a link, by an earlier client,
inside one process, by `Generate`, by the SDK, taken over by another edge, failed over to another router, and moved from
shard to shard."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_http.recovery.takeover import _continued, _recorded
from edge_http.resume.records import RequestsRecord, decode_requests, encode
from kvloom.adapters import Adapter
from kvloom.client.client import _link_request
from kvloom.errors import KvloomError
from kvloom.router_link.link import ChoiceProgress, GrpcRouterLink, LinkRequest
from kvloom.router_link.tracked_request import TrackedRequest
from kvloom.v1 import router_service_pb2 as pb
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, FINISH_REASON_STOP, SamplingParams, SequenceFinish
from kvloom.v1.shard_service_pb2 import ShardSubmit
from kvloom_common.tenancy.prices import Prices
from kvloom_common.tenancy.usage_record import UsageRecord
from router import convert
from router.core.actions import RequestEnded, SubmitAttempt
from router.core.events import (
    AdaptersReported,
    ChoiceSpec,
    LoadReported,
    Request,
    RequestArrived,
    ShardAdapter,
    ShardLoad,
)
from router.core.priority_classes import CLASS_OF_TIER
from router.core.rule_settings import HealthSettings
from router.metering.meter import Meter
from router.request_validator import RequestValidator
from tests.examples import num_examples
from tests.fakes.core_rig import CoreRig, only
from tests.fakes.served_models import tiny_model
from tests.property.test_router_group_bookkeeping import Group, Heard

PROMPT: Final = [1, 2, 3, 4, 5]
BLOCKED: Final = {"tenant": "acme/web", "key_id": "k1"}
"""What only processes of the fabric say of a caller."""
CALLER: Final = {"traceparent": "00-1", "client_request_id": "mine"}
OUTPUT: Final = [7, 8, 9]

BESIDE: Final = frozenset(
    (
        *("text", "conversation", "token_ids", "tools", "tool_choice", "parallel_tool_calls", "template_options"),
        *("predicted_text", "models", "resumable", "resume_token", "starting_after"),
        *("partial_choices", "continuation_ticket"),
    )
)
"""The fields of a request that concern the making of its prompt, the choice of its model, or one stream of its answer:
an edge has read them, and no router or shard behind it does."""
COUNTED_ANEW: Final = frozenset({"timeout_seconds", "objectives"})
"""The fields that say less the later a request comes."""

milliseconds = st.floats(60_000, 80_000)
PARTICULAR: Final[Mapping[str, st.SearchStrategy[Any]]] = {
    "model": st.sampled_from(["tiny", "tiny:poet"]),
    "sampling": st.fixed_dictionaries(
        {"seed": st.integers(0, 2**64 - 1)},
        optional={"temperature": st.floats(0, 2), "logprobs": st.integers(0, 3), "logit_bias": st.just({3: 1.5})},
    ).map(lambda fields: SamplingParams(**fields)),
    "stop": st.fixed_dictionaries({}, optional={"max_tokens": st.integers(4, 9), "stop": st.just(["end"])}),
    "n": st.integers(1, 3),
    "tier": st.sampled_from([0, 1, 2]),
    "priority_class": st.sampled_from(["", "interactive", "batch"]),
    "objectives": st.fixed_dictionaries(
        {"deadline_ms": milliseconds, "ttft_ms": milliseconds, "tpot_ms": milliseconds, "elapsed_ms": st.just(3.0)}
    ),
    "pooling": st.none(),  # test_an_embedding_is_the_same_request_on_every_way
    "images": st.just(()),  # no model here sees any (tests/integration/test_image_inputs.py)
    "request_id": st.just("r"),
    "timeout_seconds": st.just(90.0),
}
"""The fields whose values are checked; the others are drawn by their type, so that no field of tomorrow is left out."""


def _drawn(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.name in PARTICULAR:
        return PARTICULAR[field.name]
    assert field.message_type is None, f"say in PARTICULAR what {field.name} may be"
    if field.cpp_type == field.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type == field.CPPTYPE_STRING:
        return st.text("abc", max_size=8) if field.type == field.TYPE_STRING else st.binary(max_size=8)
    return st.integers(0, 100)


requests = st.fixed_dictionaries(
    {field.name: _drawn(field) for field in pb.GenerateRequest.DESCRIPTOR.fields if field.name not in BESIDE}
).map(lambda fields: pb.GenerateRequest(**fields))


# -- the ways ---------------------------------------------------------------------------------------------------------


@functools.cache
def intake() -> RequestValidator:
    model = tiny_model()
    adapted = model.with_adapter(Adapter("poet", "present"))
    return RequestValidator(
        {"tiny": model, adapted.name: adapted},
        1000,
        lambda: True,
        meters_usage=True,
        caches_results=True,
        gives_receipts=True,
        classes={one.name: one for one in CLASS_OF_TIER.values()},
    )


def progress(wanted: pb.GenerateRequest, num_tokens: int) -> list[ChoiceProgress]:
    """So much of each choice was delivered."""
    choices = [ChoiceProgress(index) for index in range(wanted.n)]
    for choice in choices:
        choice.token_ids.extend(OUTPUT[:num_tokens])
        choice.num_chars = num_tokens
    return choices


def link_request(wanted: pb.GenerateRequest) -> LinkRequest:
    """The request as an edge makes it."""
    submit = pb.Submit(request=wanted, prompt_text="text", has_fallback_model=True, **BLOCKED, **CALLER)
    return LinkRequest(submit, PROMPT)


def arrived(request: LinkRequest) -> pb.Submit:
    """The submit that a router reads."""
    link = GrpcRouterLink("127.0.0.1:1", "edge")
    link._connected = True
    link._fleet = pb.FleetState(reads_packed_token_ids=True)
    link.submit(request, Heard(request.n))
    frame = link._take_frame()
    assert frame is not None
    (submit,) = pb.RouterServiceConnectRequest.FromString(frame.SerializeToString()).submits
    return submit


def at_router(submit: pb.Submit) -> Request:
    return intake().request_from_submit(submit, "c")


def new(wanted: pb.GenerateRequest, num_tokens: int) -> Request:
    request = link_request(wanted)
    request.partial_choices = progress(wanted, num_tokens) if num_tokens else ()
    return at_router(arrived(request))


def in_one_process(wanted: pb.GenerateRequest, num_tokens: int) -> Request:
    choices = [ChoiceSpec(index, index, OUTPUT[:num_tokens], num_tokens) for index in range(wanted.n)]
    return intake().request_from_link(link_request(wanted), choices, "c")


def after_takeover(wanted: pb.GenerateRequest, num_tokens: int) -> LinkRequest:
    """The request of the edge that reads the journal of another one."""
    record = RequestsRecord(1.0, [_recorded(link_request(wanted))])
    (submit,) = decode_requests(encode(record)).submits()
    return _continued(submit, progress(wanted, num_tokens), wanted.timeout_seconds)


def after_loss(request: LinkRequest, num_tokens: int) -> LinkRequest:
    """The request for the next router after the loss of one, which had delivered so many tokens."""
    tracked = TrackedRequest(1, request, Heard(request.n), Group(), b"")
    tracked.on_submitted("link")
    error = KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, "lost").to_proto()
    for index in range(request.n):
        for token_id in OUTPUT[:num_tokens]:
            tracked.on_tokens(index, "a", [token_id], ())
    for index in range(request.n):
        tracked.on_finish(index, SequenceFinish(reason=FINISH_REASON_ERROR, error=error))
    return tracked.next_request()


def taken_over(wanted: pb.GenerateRequest, num_tokens: int) -> Request:
    return at_router(arrived(after_takeover(wanted, num_tokens)))


def failed_over(wanted: pb.GenerateRequest, num_tokens: int) -> Request:
    return at_router(arrived(after_loss(link_request(wanted), num_tokens)))


def taken_over_and_failed_over(wanted: pb.GenerateRequest, num_tokens: int) -> Request:
    return at_router(arrived(after_loss(after_takeover(wanted, num_tokens), 0)))


def _with_prompt(wanted: pb.GenerateRequest, num_tokens: int) -> pb.GenerateRequest:
    whole = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
    whole.MergeFrom(wanted)
    if num_tokens:
        for choice in progress(wanted, num_tokens):
            whole.partial_choices.add(
                index=choice.index, token_ids=choice.token_ids, num_delivered_chars=choice.num_chars
            )
    return whole


def by_grpc(wanted: pb.GenerateRequest, num_tokens: int) -> Request:
    whole = _with_prompt(wanted, num_tokens)
    accepted = asyncio.run(intake().accept_generate(whole, "c", "00-1", client_request_id="mine"))
    return accepted.request


def by_sdk(wanted: pb.GenerateRequest, num_tokens: int) -> Request:
    return at_router(arrived(after_loss(_link_request(_with_prompt(wanted, 0)), num_tokens)))


OF_FABRIC: Final[Mapping[str, Callable[[pb.GenerateRequest, int], Request]]] = {
    "one process": in_one_process,
    "taken over": taken_over,
    "failed over": failed_over,
    "taken over, then failed over": taken_over_and_failed_over,
}
OF_OTHERS: Final[Mapping[str, Callable[[pb.GenerateRequest, int], Request]]] = {"gRPC": by_grpc, "the SDK": by_sdk}


# -- what is seen of a request ----------------------------------------------------------------------------------------


def told(request: Request) -> dict[str, Any]:
    """What a request tells the core, without what is of the way alone."""
    fields = {name: getattr(request, name) for name in Request.__struct_fields__}
    fields["prompt_token_ids"] = list(request.prompt_token_ids)
    fields["choices"] = [
        (choice.index, list(choice.output_token_ids), choice.num_delivered_chars) for choice in request.choices
    ]
    if request.objectives is not None:
        fields["objectives"] = msgspec.structs.replace(request.objectives, is_admitted=False)
    return fields


OF_CALLER: Final = frozenset({"tenant", "key_id", "cache_salt", "prompt_text", "has_fallback_model"})
"""The fields that a router believes of the fabric's own processes only, or finds out itself."""
OF_CALL: Final = frozenset({"traceparent", "client_request_id"})


def engine_view(attempt: SubmitAttempt) -> ShardSubmit:
    """What a shard gets, without what is of this attempt alone."""
    submit = convert.submit_to_proto(attempt, packs_token_ids=True)
    submit.attempt_id = submit.num_expected_cached_tokens = 0
    for choice in submit.choices:
        choice.slot = choice.num_delivered_chars = 0
        del choice.output_token_ids[:]
    return submit


def served(request: Request, move: str = "") -> tuple[list[ShardSubmit], UsageRecord]:
    """What the engines see of a request that `move`s after its first token, and its usage record."""
    rig = CoreRig(meters_usage=True, health=HealthSettings())
    for name in ("s0", "s1"):
        rig.add_shard(name, model="tiny", capabilities=frozenset({"adapters", "embed", "generate", "seeded_resume"}))
        checksum = "" if request.adapter is None else request.adapter.checksum
        rig.handle(AdaptersReported(name, [ShardAdapter("poet", checksum, True)]))
    attempts = [only(rig.handle(RequestArrived(request)), SubmitAttempt)]
    slots = [choice.slot for choice in attempts[0].choices]
    if move:
        ((first, slot),) = [(attempts[0].shard_id, slot) for slot in slots]
        rig.start(first, slot)
        if move == "failover":
            actions = rig.fail(first, slot)
        else:
            actions = rig.handle(LoadReported(first, ShardLoad(num_running=1, draining=True, hand_over=True)))
        attempts.append(only(actions, SubmitAttempt))
    for choice in attempts[-1].choices:
        rig.finish(attempts[-1].shard_id, choice.slot, FINISH_REASON_STOP)
    (ended,) = [action for action in rig.log if isinstance(action, RequestEnded)]
    record = msgspec.json.decode(Meter("router", lambda: Prices(()), lambda: 9.0).record(ended, 1), type=UsageRecord)
    return [engine_view(attempt) for attempt in attempts], record


def same(name: str, request: Request, expected: Request, ignored: frozenset[str] = frozenset()) -> None:
    own, other = told(request), told(expected)
    different = {field: (own[field], other[field]) for field in own if own[field] != other[field]}
    assert not different.keys() - ignored, f"{name}: {different}"


# -- tests ------------------------------------------------------------------------------------------------------------


@settings(max_examples=num_examples(40), deadline=None)
@given(wanted=requests, num_tokens=st.integers(0, 3))
def test_a_request_says_the_same_whichever_way_it_comes(wanted: pb.GenerateRequest, num_tokens: int) -> None:
    """An answer that another edge took over had lost its receipt and its objectives, and one of the SDK its receipt."""
    expected = new(wanted, num_tokens)
    for name, way in OF_FABRIC.items():
        same(name, way(wanted, num_tokens), expected)
    same("gRPC", by_grpc(wanted, num_tokens), expected, OF_CALLER)
    same("the SDK", by_sdk(wanted, num_tokens), expected, OF_CALLER | OF_CALL)


@settings(max_examples=num_examples(40), deadline=None)
@given(wanted=requests, num_tokens=st.integers(0, 3))
def test_what_is_wanted_arrives_as_it_was_sent(wanted: pb.GenerateRequest, num_tokens: int) -> None:
    """Also what no router reads yet: a new field must not have to be named on the way."""
    for request in (
        link_request(wanted),
        after_takeover(wanted, num_tokens),
        after_loss(link_request(wanted), num_tokens),
        _link_request(_with_prompt(wanted, 0)),
    ):
        found = arrived(request).request
        for field, value in wanted.ListFields():
            if field.name not in COUNTED_ANEW:
                assert getattr(found, field.name) == value, field.name
        assert found.timeout_seconds <= wanted.timeout_seconds


@settings(max_examples=num_examples(15), deadline=None)
@given(wanted=requests, move=st.sampled_from(["", "failover", "migration"]))
def test_engines_and_bills_see_the_same(wanted: pb.GenerateRequest, move: str) -> None:
    """A request that moves is the same to each of its shards, and each way to the router leads to the same record."""
    wanted.n = 1 if move else wanted.n
    for field in ("guardrails", "tells_safety_rules"):
        wanted.ClearField(field)  # nobody judges here, and an answer would wait for its verdict
    views, record = served(new(wanted, 0), move)
    assert all(view == views[0] for view in views)
    for way in OF_FABRIC.values():
        assert served(way(wanted, 0), move) == (views, record)


def test_an_embedding_is_the_same_request_on_every_way() -> None:
    """It has no choices to continue, so it only comes whole."""
    wanted = pb.GenerateRequest(model="tiny", request_id="r", n=1, receipt=True, pooling={"raw_length": True})
    wanted.sampling.seed = 1
    expected = new(wanted, 0)
    assert expected.pooling is not None
    for name, way in (OF_FABRIC | OF_OTHERS).items():
        same(name, way(wanted, 0), expected, OF_CALLER | OF_CALL)
