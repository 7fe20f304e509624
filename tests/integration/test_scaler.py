"""`kvloom scaler` between a real router and what KEDA asks, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from prometheus_client import CollectorRegistry

from kvloom.transport.channel_options import CHANNEL_OPTIONS
from kvloom.v1.external_scaler_pb2 import GetMetricsRequest, ScaledObjectRef
from kvloom.v1.external_scaler_pb2_grpc import ExternalScalerStub, add_ExternalScalerServicer_to_server
from kvloom_common.transport.checked_server import CheckedServer
from tests.fakes.fake_shard import expected_tokens
from tests.fakes.router_world import Answer, RouterWorld, link_request
from tests.waiting import eventually
from tools.failures import CommandError
from tools.scaler.policy import ScalingTargets
from tools.scaler.servicer import ExternalScaler
from tools.scaler.watch import STALE_SECONDS, FleetWatch

pytest_plugins = ("tests.fakes.router_fixtures",)

ABOUT = ScaledObjectRef(name="shards", namespace="llm", scalerMetadata={"model": "tiny"})
METRICS = GetMetricsRequest(scaledObjectRef=ABOUT, metricName="kvloom-shards")


class Scaled:
    """A scaler that reads when it is told to, and what KEDA sees of it."""

    def __init__(self, world: RouterWorld) -> None:
        self.now = 1000.0
        self.registry_is_up = True
        self.registry = CollectorRegistry()
        self._world = world
        self.watch = FleetWatch(
            self._find,
            lambda address: grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS),
            ScalingTargets(scale_in_seconds=60.0),
            self.registry,
            clock=lambda: self.now,
        )
        self.keda: ExternalScalerStub

    async def _find(self) -> list[str]:
        if not self.registry_is_up:
            raise CommandError("the registry cannot be read")
        return [self._world.address]

    async def read(self, after_seconds: float = 5.0) -> int:
        """Read once more, and return what KEDA is told."""
        self.now += after_seconds
        await self.watch.read()
        return (await self.keda.GetMetrics(METRICS)).metricValues[0].metricValue

    def sample(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@pytest.fixture
async def scaled(world: RouterWorld) -> AsyncIterator[Scaled]:
    found = Scaled(world)
    server = grpc.aio.server()
    add_ExternalScalerServicer_to_server(ExternalScaler(found.watch, found.registry), CheckedServer(server))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        found.keda = ExternalScalerStub(channel)
        yield found
    await server.stop(None)
    await found.watch.close()


async def test_keda_is_told_how_many_shards_there_should_be(world: RouterWorld, scaled: Scaled) -> None:
    """The metric's target is 1 a shard, so that its value is the number of shards: more at once when load comes, and
    fewer a while after it has gone."""
    shard = await world.start_shard("shard-0", max_batch=4)
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    (spec,) = (await scaled.keda.GetMetricSpec(ABOUT)).metricSpecs
    assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("kvloom-shards", 1, 1.0)
    assert await scaled.read() == 1
    handles = [link.submit(link_request(list(range(40)), 4000), Answer()) for _ in range(4)]
    async with asyncio.timeout(10):
        while await scaled.read(0.0) != 2:  # until the shard has reported that its batch is full
            pass
    assert scaled.sample("kvloom_scaler_shards_needed", model="tiny", term="batch") == pytest.approx(1 / 0.9)
    assert scaled.sample("kvloom_scaler_shards_recommended", model="tiny") == 2
    assert scaled.sample("kvloom_scaler_shards_ready", model="tiny") == 1
    assert scaled.sample("kvloom_scaler_reading_age_seconds") == 0
    for handle in handles:
        link.cancel(handle)
    await eventually(lambda: not shard.num_running, "the end of the sequences")
    await world.ask(link, list(range(40)), 1)  # with the shard's next report
    assert await scaled.read(59) == 2
    assert await scaled.read(61) == 0
    assert (scaled.sample("kvloom_scaler_questions_total", method="GetMetrics") or 0) >= 4


async def test_a_model_becomes_active_with_its_first_shard(world: RouterWorld, scaled: Scaled) -> None:
    """KEDA learns it at once, by the stream that it keeps."""
    await world.start_router()
    link = await world.connect()
    await scaled.watch.read()
    stream = scaled.keda.StreamIsActive(ABOUT)
    assert not (await stream.read()).result
    assert not (await scaled.keda.IsActive(ABOUT)).result
    await world.start_shard("shard-0")
    await world.wait_for_shards(link, 1)
    await scaled.read()
    assert (await stream.read()).result
    assert (await scaled.keda.IsActive(ABOUT)).result
    stream.cancel()


async def test_a_request_starts_the_first_shard(world: RouterWorld, scaled: Scaled) -> None:
    """The router holds it, KEDA is told by its stream, and the shard that comes answers it. A while after the last
    request there need be no shard."""
    world.config.router.overload.start_patience_seconds = 30.0
    await world.start_router()
    link = await world.connect()
    await scaled.watch.read()
    stream = scaled.keda.StreamIsActive(ABOUT)
    assert not (await stream.read()).result
    answer = Answer()
    link.submit(link_request([4, 5], 5), answer)
    await eventually(lambda: world.metric("kvloom_router_requests_queued"), "a request that waits")
    assert await scaled.read() == 1
    assert (await stream.read()).result
    await world.start_shard("shard-0")
    await eventually(lambda: answer.done, "its answer")
    assert answer.token_ids[0] == expected_tokens([4, 5], 0, 5)
    assert await scaled.read() == 1
    assert await scaled.read(61) == 0
    assert not (await stream.read()).result
    stream.cancel()


async def test_silence_changes_nothing(world: RouterWorld, scaled: Scaled) -> None:
    """Without routers KEDA gets an error, on which it leaves the fleet as it is; an outdated number would shrink it."""
    await world.start_shard("shard-0")
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    assert await scaled.read() == 1
    scaled.registry_is_up = False
    assert await scaled.read() == 1
    scaled.now += STALE_SECONDS + 1
    for call in (scaled.keda.IsActive(ABOUT), scaled.keda.GetMetrics(METRICS)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert scaled.sample("kvloom_scaler_reading_age_seconds") == STALE_SECONDS + 1


async def test_a_question_without_a_model_is_refused(scaled: Scaled) -> None:
    """A ScaledObject that is written wrongly must say so, and not scale some model."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scaled.keda.GetMetricSpec(ScaledObjectRef(name="shards"))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "scalerMetadata.model" in (caught.value.details() or "")


async def test_a_stream_of_a_silent_fabric_ends(world: RouterWorld, scaled: Scaled) -> None:
    """KEDA then asks again, instead of believing the last word for ever."""
    stream = scaled.keda.StreamIsActive(ABOUT)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(10):
            await stream.read()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
