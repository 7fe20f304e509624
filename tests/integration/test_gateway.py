"""`kvloom epp` as a gateway speaks with it: external processing, health, metrics of engines and KV events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloom.v1 import external_processor_pb2 as ext_proc
from kvloom.v1.external_processor_pb2_grpc import ExternalProcessorStub
from tests.fakes.fake_vllm import FakeKvPublisher
from tests.fakes.gateway_world import GatewayWorld, gateway_world
from tests.fakes.tiny_tokenizer import model_tokenizer
from tests.waiting import eventually
from tools.gateway.exchange import DESTINATION, DROPPED_HEADER
from tools.gateway.picker_service import READINESS
from tools.gateway.prompts import PromptReader

STREAMED = ext_proc.FULL_DUPLEX_STREAMED


class Talk:
    """One HTTP request, from Envoy's side."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = ExternalProcessorStub(channel).Process()

    async def send(self, **message: Any) -> None:
        await self._call.write(ext_proc.ProcessingRequest(**message))

    async def read(self) -> ext_proc.ProcessingResponse:
        async with asyncio.timeout(10):
            found = await self._call.read()
        assert isinstance(found, ext_proc.ProcessingResponse), "the picker has ended the exchange"
        return found

    async def headers(self, *, is_end: bool = False, mode: int = STREAMED, **headers: str) -> None:
        given = {":path": "/v1/chat/completions", "content-type": "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items() if name != "subset"}
        message = ext_proc.ProcessingRequest(
            request_headers=ext_proc.HttpHeaders(headers=_map(given), end_of_stream=is_end),
            protocol_config=ext_proc.ProtocolConfiguration(request_body_mode=mode, response_body_mode=mode),
        )
        if "subset" in headers:
            fields = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            fields.update({"x-gateway-destination-endpoint-subset": headers["subset"].split()})
        await self._call.write(message)

    async def body(self, data: bytes, *, is_end: bool = True) -> None:
        await self.send(request_body=ext_proc.HttpBody(body=data, end_of_stream=is_end))

    async def ask(self, **fields: Any) -> list[str]:
        """Sends a whole request. Returns the endpoints that it may go to, in order."""
        headers = fields.pop("headers", {})
        data = msgspec.json.encode({"model": "m", **fields})
        await self.headers(**headers)
        await self.body(data[:20], is_end=False)
        await self.body(data[20:])
        destination = await self.destination()
        pieces = [(await self.read()).request_body.response.body_mutation.streamed_response for _ in range(2)]
        assert [(one.body, one.end_of_stream) for one in pieces] == [(data[:20], False), (data[20:], True)]
        return destination

    async def destination(self) -> list[str]:
        response = await self.read()
        set_headers = response.request_headers.response.header_mutation.set_headers
        found = {one.header.key: one.header.raw_value.decode() for one in set_headers}
        assert found == {
            DESTINATION: response.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION].string_value
        }, "equal in both"
        return found[DESTINATION].split(",")

    async def refused(self) -> tuple[int, str, str]:
        """(status, code of the error, reason in the header)."""
        found = (await self.read()).immediate_response
        error = msgspec.json.decode(found.body)["error"]
        reasons = [
            one.header.raw_value.decode() for one in found.headers.set_headers if one.header.key == DROPPED_HEADER
        ]
        assert not isinstance(await self._call.read(), ext_proc.ProcessingResponse)
        return found.status.code, error["code"], "".join(reasons)

    def gone(self) -> None:
        """Its client has gone."""
        self._call.cancel()

    async def end(self) -> None:
        await self._call.done_writing()
        assert not isinstance(await self._call.read(), ext_proc.ProcessingResponse)


def _map(headers: dict[str, str]) -> ext_proc.HeaderMap:
    return ext_proc.HeaderMap(
        headers=[ext_proc.HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()]
    )


@pytest.fixture
async def world() -> AsyncIterator[GatewayWorld]:
    async with gateway_world() as found:
        yield found


@pytest.fixture
async def channel(world: GatewayWorld) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(world.address) as found:
        yield found


async def test_a_request_gets_an_endpoint_and_goes_on_as_it_came(
    world: GatewayWorld, channel: grpc.aio.Channel
) -> None:
    """The protocol of endpoint pickers, 1.0.0: the endpoint in a header and in metadata, each piece of the answer at
    once, and who has served it read back."""
    talk = Talk(channel)
    first, second = await talk.ask(messages=[{"role": "user", "content": "hello " * 50}], stream=True)
    assert {first, second} == {engine.address for engine in world.engines}
    served = ext_proc.ProcessingRequest(response_headers=ext_proc.HttpHeaders(headers=_map({":status": "200"})))
    served.metadata_context.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": second})
    await talk._call.write(served)
    assert (await talk.read()).HasField("response_headers")
    for number in range(3):
        data, is_end = f"data: {number}\n\n".encode(), number == 2
        await talk.send(response_body=ext_proc.HttpBody(body=data, end_of_stream=is_end))
        passed = (await talk.read()).response_body.response.body_mutation.streamed_response
        assert (passed.body, passed.end_of_stream) == (data, is_end)
    await talk.send(response_trailers=ext_proc.HttpTrailers())
    assert (await talk.read()).HasField("response_trailers")
    await talk.end()
    world.gateway.picker.check_integrity()
    assert world.num("served_elsewhere") == 1
    again = Talk(channel)
    assert await again.ask(messages=[])
    again.gone()
    await eventually(lambda: world.gateway.picker.num_placed == 0, "the cancelled request is over")
    world.gateway.picker.check_integrity()


async def test_requests_without_a_prompt_are_placed_too(world: GatewayWorld, channel: grpc.aio.Channel) -> None:
    """A list of models, an upload, a body with trailers, and a gateway that sends no bodies at all."""
    addresses = {engine.address for engine in world.engines}
    get, upload, trailed, headers_only = (Talk(channel) for _ in range(4))
    await get.headers(is_end=True)
    assert set(await get.destination()) == addresses
    await upload.headers(content_type="multipart/form-data; boundary=x")
    await upload.body(b"--x")
    assert set(await upload.destination()) == addresses
    assert (await upload.read()).request_body.response.body_mutation.streamed_response.body == b"--x"
    await trailed.headers()
    await trailed.body(b'{"model": "m"}', is_end=False)
    await trailed.send(request_trailers=ext_proc.HttpTrailers())
    assert set(await trailed.destination()) == addresses
    assert not (await trailed.read()).request_body.response.body_mutation.streamed_response.end_of_stream
    assert (await trailed.read()).HasField("request_trailers")
    await headers_only.headers(mode=ext_proc.NONE)
    assert set(await headers_only.destination()) == addresses
    for talk in (get, upload, trailed, headers_only):
        await talk.end()


async def test_refusals_are_answers_of_the_gateway(world: GatewayWorld, channel: grpc.aio.Channel) -> None:
    """400, 413, 429 and 503 with OpenAI's JSON, and the reason why a request was dropped."""
    talk = Talk(channel)
    await talk.headers()
    await talk.body(b'{"model": ')
    assert await talk.refused() == (400, "malformed", "")
    talk = Talk(channel)
    await talk.headers(subset="10.9.9.9:1")
    await talk.body(b"{}")
    assert await talk.refused() == (503, "unavailable", "")
    for engine in world.engines:
        engine.num_waiting = 9
    picker = world.gateway.picker
    await eventually(lambda: all(picker.is_saturated(engine.address) for engine in world.engines))
    talk = Talk(channel)
    await talk.headers(x_llm_d_inference_objective="batch")
    await talk.body(b"{}")
    assert await talk.refused() == (429, "saturated", "rejected-saturated")
    assert await Talk(channel).ask(messages=[])
    talk = Talk(channel)
    await talk.headers()
    world.gateway.door.max_body_bytes = 1000
    await talk.body(bytes(600), is_end=False)
    await talk.body(bytes(401), is_end=False)
    assert await talk.refused() == (413, "too_large", "")


async def test_health_follows_the_engines(world: GatewayWorld, channel: grpc.aio.Channel) -> None:
    """A picker without an engine is alive, but not ready; each of the protocol's names says so."""
    health: Any = health_pb2_grpc.HealthStub(channel)
    ready, not_ready = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING

    async def states() -> list[int]:
        return [
            (await health.Check(health_pb2.HealthCheckRequest(service=one))).status for one in ("liveness", *READINESS)
        ]

    assert await states() == [ready] * 4
    for engine in world.engines:
        await engine.stop()
    await world.until_ready(0)
    assert await states() == [ready, *[not_ready] * 3]
    talk = Talk(channel)
    await talk.headers(is_end=True)
    assert (await talk.refused())[0] == 503
    await world.engines[1].start()
    await world.until_ready(1)
    assert await states() == [ready] * 4
    assert await Talk(channel).ask(messages=[]) == [world.engines[1].address]
    whole = world.pool
    world.change_pool(endpoints=[])  # the pods of an InferencePool may all be gone
    await world.until_ready(0)
    assert await states() == [ready, *[not_ready] * 3]
    world.change_pool(endpoints=whole.endpoints)
    await world.until_ready(1)
    world.change_pool(endpoints=world.pool.endpoints[:1])
    assert world.gateway.picker.num_ready == 0


async def test_kv_events_are_followed_and_gaps_replayed() -> None:
    """The picker learns what was cached before it came, what it missed, and that an engine has started again."""
    tokens = [number % 300 for number in range(64)]

    def stored(first: int, last: int) -> dict[str, Any]:
        parent = {"parent_block_hash": first - 1} if first else {}
        blocks = list(range(first, last))
        found = {"type": "BlockStored", "block_hashes": blocks, "token_ids": tokens[first * 16 : last * 16]}
        return {**found, "block_size": 16, **parent}

    async with FakeKvPublisher() as publisher:
        await publisher.publish(stored(0, 1))
        kv_events = (publisher.events_address, publisher.replay_address)
        async with gateway_world(2, PromptReader(tokenizer=model_tokenizer()), kv_events) as world:
            picker, address = world.gateway.picker, world.engines[0].address
            await publisher.until_subscribed()
            await eventually(lambda: picker.num_stored(address) == 1, "what was stored before")
            await publisher.publish(stored(1, 2))
            await eventually(lambda: picker.num_stored(address) == 2)
            await publisher.publish(stored(2, 3), is_lost=True)
            await publisher.publish(stored(3, 4))
            await eventually(lambda: picker.num_stored(address) == 4, "the lost batch is replayed")
            gaps = {"outcome": "replayed"}
            await eventually(lambda: world.registry.get_sample_value("kvloom_epp_kv_gaps_total", gaps) == 1)
            async with grpc.aio.insecure_channel(world.address) as channel:
                talk = Talk(channel)
                asked = await talk.ask(prompt=tokens, headers={":path": "/v1/completions"})
                assert asked[0] == address
                talk.gone()
            publisher.batches.clear()
            await publisher.publish(stored(0, 1), at=2.0)  # its number is 0 again
            await eventually(lambda: picker.num_stored(address) == 1, "the engine has started again")
            publisher.batches.clear()
            await publisher.publish(stored(0, 2), number=7, at=3.0)
            await eventually(lambda: picker.num_stored(address) == 2, "nothing replays what is missing")
            assert world.registry.get_sample_value("kvloom_epp_kv_gaps_total", {"outcome": "lost"}) == 1
            await publisher.publish({"type": "BlockStored"}, number=8, at=4.0)
            await eventually(lambda: picker.num_stored(address) == 0, "malformed events empty it")
