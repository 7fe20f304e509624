"""The unary and server-streaming RPCs: Generate, Plan, Cancel, ListModels, as any gRPC client calls them."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1 import generation_pb2
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from kvloom.v1.router_service_pb2 import (
    CancelRequest,
    ContentPart,
    Conversation,
    GenerateRequest,
    GetMetricsRequest,
    ListModelsRequest,
    Message,
    PlanRequest,
    TokenIds,
)
from kvloom_common.metrics.exposition import samples_in
from kvloom_common.text.tokenizer import ChatMessage
from tests.fakes.fake_shard import FakeShard, expected_text, expected_tokens
from tests.fakes.router_world import MODEL, TIMEOUT_SECONDS, Answer, RouterWorld, link_request
from tests.fakes.tiny_tokenizer import model_tokenizer
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)


async def start(world: RouterWorld, **options) -> FakeShard:
    shard = await world.start_shard("shard-0", **options)
    await world.start_router()
    await world.wait_for_shards(await world.connect(), 1)
    return shard


async def generate(world: RouterWorld, **fields) -> list:
    """Returns all responses to one Generate."""
    request = GenerateRequest(**{"model": MODEL, "stop": StopConditions(max_tokens=12), **fields})
    async with asyncio.timeout(TIMEOUT_SECONDS):
        return [response async for response in (await world.stub()).Generate(request)]


async def generate_error(world: RouterWorld, **fields) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(world, **fields)
    return caught.value


async def _read_to_end(call) -> None:
    """Reads to the end of the RPC. Raises AioRpcError unless its status is OK."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while await call.read() is not grpc.aio.EOF:
            pass


def text_of(responses: list, index: int = 0) -> str:
    return "".join(delta.text for response in responses for delta in response.deltas if delta.index == index)


def tokens_of(responses: list, index: int = 0) -> list[int]:
    return [
        token
        for response in responses
        for delta in response.deltas
        if delta.index == index
        for token in delta.token_ids
    ]


CONVERSATION = Conversation(
    messages=[
        Message(role="system", content="be brief"),
        Message(role="user", parts=[ContentPart(text="the quick "), ContentPart(text="brown fox")]),
    ]
)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"text": "the lazy dog"}, lambda: model_tokenizer().encode_now("the lazy dog")),
        ({"token_ids": TokenIds(ids=[5, 6, 7])}, lambda: [5, 6, 7]),
        (
            {"conversation": CONVERSATION},
            lambda: model_tokenizer().encode_now(
                model_tokenizer().render_chat(
                    [ChatMessage("system", "be brief"), ChatMessage("user", "the quick brown fox")]
                )
            ),
        ),
    ],
    ids=["text", "token_ids", "conversation"],
)
async def test_generate_takes_text_messages_and_ids(world: RouterWorld, fields, prompt) -> None:
    """A client in any language needs no tokenizer, but may use its own."""
    shard = await start(world)
    responses = await generate(world, request_id="my-request", **fields)
    assert shard.submits[0].prompt_token_ids == prompt()
    assert {response.request_id for response in responses} == {"my-request"}
    assert text_of(responses) == expected_text(prompt(), 0, 12)
    assert tokens_of(responses) == expected_tokens(prompt(), 0, 12)
    first, last = responses[0].deltas[0], responses[-1].deltas[0]
    assert first.start.shard_id == "shard-0"
    assert last.finish.reason == generation_pb2.FINISH_REASON_LENGTH
    assert last.finish.num_output_tokens == 12


async def test_a_predicted_text_reaches_the_shard_as_tokens(world: RouterWorld) -> None:
    """Clients of gRPC have no tokenizer; a prediction in both forms, or in none that can be read, is refused."""
    shard = await start(world)
    sampling = SamplingParams(min_p=0.1, repetition_penalty=1.1, logit_bias={3: -1.0}, shown_special_token_ids=[1])
    stop = StopConditions(max_tokens=12, min_tokens=4)
    await generate(world, text="the fox", predicted_text="the fox", sampling=sampling, stop=stop)
    sent = shard.submits[0]
    assert sent.sampling.predicted_token_ids == model_tokenizer().encode_now("the fox")
    assert (sent.sampling.min_p, sent.sampling.logit_bias[3], sent.stop.min_tokens) == (0.1, -1.0, 4)
    assert sent.sampling.shown_special_token_ids == [1]
    for fields, field in (
        ({"predicted_text": "a", "sampling": SamplingParams(predicted_token_ids=[1])}, "predicted_text"),
        ({"sampling": SamplingParams(min_p=2)}, "sampling.min_p"),
        ({"stop": StopConditions(max_tokens=2, min_tokens=3)}, "stop.min_tokens"),
    ):
        error = from_rpc_error(await generate_error(world, text="the fox", **fields))
        assert error.field == field


async def test_generate_streams_several_choices_with_logprobs(world: RouterWorld) -> None:
    """One RPC streams n answers, each with its index."""
    await start(world)
    responses = await generate(world, token_ids=TokenIds(ids=[3]), n=3, sampling=SamplingParams(logprobs=0))
    for index in range(3):
        tokens = expected_tokens([3], index, 12)
        assert tokens_of(responses, index) == tokens
        deltas = [delta for response in responses for delta in response.deltas if delta.index == index]
        assert [entry.logprob for delta in deltas for entry in delta.logprobs] == [-float(token) for token in tokens]
    assert responses[0].request_id, "the router gives a request without an id one"


@pytest.mark.parametrize(
    ("fields", "code", "reason", "field"),
    [
        ({"text": "a", "model": ""}, "INVALID_ARGUMENT", "INVALID_ARGUMENT", "model"),
        ({"text": "a", "model": "gpt-9"}, "NOT_FOUND", "MODEL_NOT_FOUND", "model"),
        ({"token_ids": TokenIds(ids=[1]), "model": "gpt-9"}, "NOT_FOUND", "MODEL_NOT_FOUND", "model"),
        ({}, "INVALID_ARGUMENT", "INVALID_ARGUMENT", "input"),
        ({"text": ""}, "INVALID_ARGUMENT", "INVALID_ARGUMENT", "text"),
        ({"conversation": Conversation()}, "INVALID_ARGUMENT", "INVALID_ARGUMENT", "conversation.messages"),
        (
            {"conversation": Conversation(messages=[Message(content="hi")])},
            "INVALID_ARGUMENT",
            "INVALID_ARGUMENT",
            "conversation.messages[0].role",
        ),
        ({"token_ids": TokenIds()}, "INVALID_ARGUMENT", "INVALID_ARGUMENT", "token_ids.ids"),
        ({"token_ids": TokenIds(ids=[2**32 - 1])}, "INVALID_ARGUMENT", "INVALID_ARGUMENT", "token_ids.ids"),
        ({"text": "a", "n": 17}, "INVALID_ARGUMENT", "INVALID_ARGUMENT", "n"),
        (
            {"text": "a", "sampling": SamplingParams(top_p=float("nan"))},
            "INVALID_ARGUMENT",
            "INVALID_ARGUMENT",
            "sampling.top_p",
        ),
        ({"text": "a", "stop": StopConditions(stop=[""])}, "INVALID_ARGUMENT", "INVALID_ARGUMENT", "stop.stop[0]"),
        ({"text": "a", "timeout_seconds": float("inf")}, "INVALID_ARGUMENT", "INVALID_ARGUMENT", "timeout_seconds"),
        ({"text": "a" * 2000}, "INVALID_ARGUMENT", "REQUEST_TOO_LARGE", "text"),
        ({"token_ids": TokenIds(ids=[1] * 101)}, "INVALID_ARGUMENT", "REQUEST_TOO_LARGE", "token_ids.ids"),
        ({"token_ids": TokenIds(ids=[1] * 90)}, "INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED", None),
    ],
)
async def test_a_refusal_names_its_reason_and_field(world: RouterWorld, fields, code, reason, field) -> None:
    """Callers act on google.rpc.ErrorInfo, and the router still serves afterwards."""
    world.config.router.max_prompt_tokens = 100
    await start(world, max_model_len=64)
    error = await generate_error(world, **fields)
    assert error.code() is grpc.StatusCode[code]
    status = rpc_status.from_call(error)
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("kvloom", reason)
    if field is not None:
        assert info.metadata["field"] == field
    assert "Traceback" not in (error.details() or "")
    assert text_of(await generate(world, token_ids=TokenIds(ids=[1]))) == expected_text([1], 0, 12)


async def test_an_id_that_is_in_use_is_refused(world: RouterWorld) -> None:
    """Requests are cancelled by id, so an id must be unique."""
    shard = await start(world)
    shard.pause()
    call = (await world.stub()).Generate(
        GenerateRequest(model=MODEL, token_ids=TokenIds(ids=[1]), request_id="same", stop=StopConditions(max_tokens=5))
    )
    reading = asyncio.create_task(call.read())
    await eventually(lambda: shard.submits, "the first request")
    error = await generate_error(world, token_ids=TokenIds(ids=[1]), request_id="same")
    assert from_rpc_error(error).reason_name == "DUPLICATE_REQUEST_ID"
    shard.resume()
    assert (await asyncio.wait_for(reading, TIMEOUT_SECONDS)).request_id == "same"
    call.cancel()


async def test_a_cancelled_rpc_stops_the_shard(world: RouterWorld) -> None:
    """A caller that disconnects must not keep an engine busy."""
    shard = await start(world, step_seconds=0.005)
    request = GenerateRequest(
        model=MODEL, token_ids=TokenIds(ids=[1]), stop=StopConditions(max_tokens=4000), request_id="long"
    )
    call = (await world.stub()).Generate(request)
    await asyncio.wait_for(call.read(), TIMEOUT_SECONDS)
    call.cancel()
    await eventually(lambda: shard.num_running == 0 and shard.cancelled_slots, "the shard's cancel")
    assert not (await (await world.stub()).Cancel(CancelRequest(request_id="long"))).found


async def test_cancel_ends_a_request_by_name_from_any_client(world: RouterWorld) -> None:
    """An operator, or a client that lost its connection, must be able to stop a request."""
    shard = await start(world, step_seconds=0.005)
    stub, link, answer = await world.stub(), await world.connect("other"), Answer()
    link.submit(link_request([1], 4000, request_id="runaway"), answer)
    await eventually(lambda: answer.token_ids[0], "the first token")
    assert (await stub.Cancel(CancelRequest(request_id="runaway"))).found
    await eventually(lambda: answer.done, "the end")
    assert answer.finish.reason == generation_pb2.FINISH_REASON_CANCELLED
    assert answer.finish.num_output_tokens == len(answer.token_ids[0])
    await eventually(lambda: shard.num_running == 0, "the shard's cancel")
    assert not (await stub.Cancel(CancelRequest(request_id="nobody"))).found
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Cancel(CancelRequest())
    assert from_rpc_error(caught.value).field == "request_id"


async def test_a_failure_after_the_first_token_is_the_status_of_the_rpc(world: RouterWorld) -> None:
    """A stream that just ends would look complete, so the loss must be reported after the delivered tokens."""
    world.config.router.max_attempts = 1
    shard = await start(world, step_seconds=0.005)
    call = (await world.stub()).Generate(
        GenerateRequest(model=MODEL, token_ids=TokenIds(ids=[1]), stop=StopConditions(max_tokens=4000))
    )
    first = await asyncio.wait_for(call.read(), TIMEOUT_SECONDS)
    assert first.deltas[0].token_ids
    await shard.stop()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _read_to_end(call)
    assert from_rpc_error(caught.value).reason_name == "SHARD_LOST"


async def test_a_blocked_prompt_is_an_error_of_generate(world: RouterWorld) -> None:
    """Nothing of the answer was sent, so the RPC fails instead of finishing."""
    safety = await world.start_safety()
    await start(world)
    await eventually(lambda: safety.num_streams == 1, "the safety link")
    error = await generate_error(world, conversation=Conversation(messages=[Message(role="user", content="forbidden")]))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert from_rpc_error(error).reason_name == "CONTENT_FILTERED"


async def test_plan_explains_and_places_nothing(world: RouterWorld) -> None:
    """A plan has every shard with its cost, and the pick that a real request would get."""
    shards = [await start(world), await world.start_shard("shard-1")]
    await world.wait_for_shards(await world.connect(), 2)
    stub = await world.stub()
    wanted = GenerateRequest(model=MODEL, token_ids=TokenIds(ids=[1] * 40), stop=StopConditions(max_tokens=4))
    plan = await stub.Plan(PlanRequest(request=wanted))
    assert plan.num_prompt_tokens == 40
    assert {score.shard_id for score in plan.shards} == {"shard-0", "shard-1"}
    assert plan.picked_shard_id in ("shard-0", "shard-1")
    assert sum(plan.shards[0].cost_terms.values()) == pytest.approx(plan.shards[0].cost_seconds)
    assert not any(shard.submits for shard in shards)
    too_long = GenerateRequest(model=MODEL, token_ids=TokenIds(ids=[1] * 9000))
    refused = await stub.Plan(PlanRequest(request=too_long))
    assert not refused.picked_shard_id
    assert refused.error.message
    assert all(score.filtered_reason for score in refused.shards)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Plan(PlanRequest(request=GenerateRequest(model=MODEL, text="a", n=99)))
    assert from_rpc_error(caught.value).field == "request.n"


async def test_models_are_listed_with_what_the_fleet_can_do(world: RouterWorld) -> None:
    """Clients choose among the models that the fleet really serves."""
    await start(world)
    models = (await (await world.stub()).ListModels(ListModelsRequest())).models
    assert [(model.name, model.num_ready_shards, model.max_model_len) for model in models] == [(MODEL, 1, 4096)]
    assert "seeded_resume" in models[0].capabilities


async def test_health_shows_whether_a_request_could_be_answered(world: RouterWorld) -> None:
    """Load balancers and supervisors use it: a router without a shard is up, but cannot serve."""
    await world.start_router()
    channel = grpc.aio.insecure_channel(world.address)
    async with channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="kvloom.v1.RouterService"))

        async def status() -> int:
            return (await asyncio.wait_for(watch.read(), TIMEOUT_SECONDS)).status

        first = await status()
        assert first != health_pb2.HealthCheckResponse.SERVING
        shard = await world.start_shard("shard-0")
        assert await status() == health_pb2.HealthCheckResponse.SERVING
        await shard.stop()
        assert await status() == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


async def test_metrics_count_what_was_delivered(world: RouterWorld) -> None:
    """Operators scale and charge by these."""
    await start(world)
    await generate(world, token_ids=TokenIds(ids=[1, 2, 3]))
    await generate_error(world, text="a", n=99)
    model = {"model": MODEL}
    assert world.metric("kvloom_router_requests_total", outcome="length", error_type="", **model) == 1
    assert world.metric("kvloom_router_requests_invalid_total", error_type="invalid_argument") == 1
    assert world.metric("kvloom_router_tokens_total", token_type="input", **model) == 3
    assert world.metric("kvloom_router_tokens_total", token_type="output", **model) == 12
    of_class = {**model, "priority_class": "interactive"}
    assert world.metric("kvloom_router_request_duration_seconds_count", **of_class) == 1
    assert world.metric("kvloom_router_time_to_first_token_seconds_count", **of_class) == 1
    assert world.metric("kvloom_router_shards_ready", model=MODEL) == 1
    assert world.metric("kvloom_router_requests_live") == 0


async def test_a_draining_router_finishes_what_runs_and_takes_nothing_new(world: RouterWorld) -> None:
    """A rolling restart must lose no answer."""
    shard = await start(world, step_seconds=0.005)
    link, answer = await world.connect("other"), Answer()
    link.submit(link_request([1], 60), answer)
    await eventually(lambda: shard.num_running, "the request")
    world.stop.set()
    await eventually(lambda: link.fleet.draining, "the announcement of the drain")
    error = await generate_error(world, token_ids=TokenIds(ids=[1]))
    assert from_rpc_error(error).reason_name == "DRAINING"
    await eventually(lambda: answer.done, "the answer")
    assert answer.token_ids[0] == expected_tokens([1], 0, 60)
    assert world.served is not None
    await asyncio.wait_for(world.served, TIMEOUT_SECONDS)


async def test_get_metrics_gives_only_what_was_asked_for(world: RouterWorld) -> None:
    """Supervisors read them every second during a rollout."""
    await start(world)
    await generate(world, token_ids=TokenIds(ids=[1, 2, 3]))
    stub = await world.stub()
    answer = await stub.GetMetrics(GetMetricsRequest(names=["kvloom_router_requests"]))
    samples = [(sample.name, sample.labels["model"], sample.value) for sample in samples_in(answer.text)]
    assert ("kvloom_router_requests_total", MODEL, 1.0) in samples
    assert {name for name, *_ in samples} <= {"kvloom_router_requests_total", "kvloom_router_requests_created"}
    assert answer.incarnation_id
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetMetrics(GetMetricsRequest(names=["x"] * 65))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
