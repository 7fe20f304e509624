"""Adapters of a shard over real sockets: registered by call or configuration, told to routers, used by sequences."""

from __future__ import annotations

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.shard_service_pb2 import (
    AdapterRef,
    GetInfoRequest,
    LoadAdapterRequest,
    SleepRequest,
    UnloadAdapterRequest,
    WakeRequest,
)
from kvloom_common.config import AdapterConfig, KvloomConfig
from shard_server.engines.base import Engine
from shard_server.engines.sim_engine import SimEngine, expected_token_id
from shard_server.engines.sim_tokens import sim_adapter_checksum
from tests.fakes.shard_world import EOS, VOCABULARY, RouterEnd, ShardWorld, shard_world, sim_config

PROMPT = list(range(100, 140))
R = ErrorReason


def adapter_config(*names: str, max_loaded: int = 2, step_ms: float = 1.0) -> KvloomConfig:
    config = sim_config(step_ms=step_ms, max_model_len=8192)
    config.shard.sim.adapter_load_ms = 5.0
    config.model.adapters = [AdapterConfig(name=name) for name in names]
    return config


def make_engine(config: KvloomConfig, max_loaded: int = 2) -> Engine:
    return SimEngine("model", config.shard, VOCABULARY, frozenset({EOS}), max_loaded_adapters=max_loaded)


async def submit_with(router: RouterEnd, slot: int, adapter: str, max_tokens: int = 4) -> None:
    ref = AdapterRef(name=adapter, checksum=sim_adapter_checksum(adapter, ""))
    await router.submit(slot, PROMPT, max_tokens=max_tokens, adapter=ref, cache_salt="tenant")


def expected(adapter: str, num_tokens: int) -> list[int]:
    checksum = sim_adapter_checksum(adapter, "") if adapter else ""
    return [expected_token_id(PROMPT, 7, position, checksum) for position in range(num_tokens)]


async def load(world: ShardWorld, name: str, *, now: bool = False) -> str:
    """The error's message, if there is one."""
    return (await world.stub.LoadAdapter(LoadAdapterRequest(name=name, load_now=now))).error.message


async def test_every_sequence_runs_with_its_own_adapter() -> None:
    """Several adapters and the model itself run side by side; routers see what is loaded, and what a load costs."""
    config = adapter_config("law", "medicine")
    async with shard_world(config, make_engine(config)) as world:
        router = await world.router()
        assert "adapters" in router.info.capabilities
        assert {name: adapter.loaded for name, adapter in router.adapters.items()} == {"law": False, "medicine": False}
        assert router.adapters["law"].checksum == sim_adapter_checksum("law", "")
        for slot, name in enumerate(["law", "medicine"]):
            await submit_with(router, slot, name)
        await router.submit(2, PROMPT, max_tokens=4)
        for slot in range(3):
            assert (await router.finish_of(slot)).num_output_tokens == 4
        assert router.tokens == {0: expected("law", 4), 1: expected("medicine", 4), 2: expected("", 4)}
        info = await world.stub.GetInfo(GetInfoRequest())
        assert all(adapter.loaded for adapter in info.adapters.adapters)
        assert info.adapters.max_loaded == 2
        assert info.adapters.load_seconds >= 0.005
        await router.read_until(lambda: all(adapter.loaded for adapter in router.adapters.values()))


async def test_a_sequence_is_refused_unless_the_shard_has_exactly_its_adapter() -> None:
    """Another shard may have it; weights other than the router believes must never answer."""
    config = adapter_config("law")
    async with shard_world(config, make_engine(config)) as world:
        router = await world.router()
        await submit_with(router, 1, "medicine")
        await router.submit(2, PROMPT, adapter=AdapterRef(name="law", checksum="other weights"))
        for slot in (1, 2):
            assert (await router.finish_of(slot)).error.reason == R.ERROR_REASON_ADAPTER_NOT_FOUND
        await router.submit(3, PROMPT, adapter=AdapterRef(name="law"))  # its blocks would be shared with the model's
        assert (await router.finish_of(3)).error.field == "adapter.checksum"


async def test_a_shard_shares_no_block_between_adapters_of_one_salt() -> None:
    """The same prompt of the same tenant has other KV with every adapter, and with none."""
    config = adapter_config("law", "medicine")
    async with shard_world(config, make_engine(config)) as world:
        router = await world.router()
        await submit_with(router, 1, "law")
        await router.finish_of(1)
        await submit_with(router, 2, "medicine")
        await router.submit(3, PROMPT, max_tokens=4, cache_salt="tenant")
        await submit_with(router, 4, "law")
        assert [(await router.finish_of(slot)).num_cached_tokens > 0 for slot in (2, 3, 4)] == [False, False, True]


async def test_adapters_come_and_go_by_call() -> None:
    """A repeated load is fine; an unload refuses new sequences at once and waits for those that run."""
    config = adapter_config(step_ms=5)
    async with shard_world(config, make_engine(config)) as world:
        router = await world.router()
        assert not router.adapters
        assert await load(world, "law", now=True) == ""
        await router.read_until(lambda: "law" in router.adapters and router.adapters["law"].loaded)
        assert await load(world, "law") == ""
        assert "name" in await load(world, "no:colon")
        await submit_with(router, 1, "law", max_tokens=8000)
        await router.read_until(lambda: 1 in router.tokens)
        late = await world.stub.UnloadAdapter(UnloadAdapterRequest(name="law", deadline_seconds=0.05))
        assert late.error.reason == R.ERROR_REASON_DEADLINE_EXCEEDED
        await submit_with(router, 2, "law")
        assert (await router.finish_of(2)).error.reason == R.ERROR_REASON_ADAPTER_NOT_FOUND
        assert "still being unloaded" in await load(world, "law")
        await router.write(cancel_slots=[1])
        await router.read_until(lambda: not router.adapters)
        while "still being unloaded" in (message := await load(world, "law")):
            pass  # the engine has not ended the sequence yet
        assert message == ""
        assert not (await world.stub.UnloadAdapter(UnloadAdapterRequest(name="law"))).HasField("error")
        gone = await world.stub.UnloadAdapter(UnloadAdapterRequest(name="law"))
        assert gone.error.reason == R.ERROR_REASON_ADAPTER_NOT_FOUND
        assert await load(world, "law") == ""


async def test_the_least_recently_used_adapter_makes_room() -> None:
    """More adapters than slots: each sequence still gets its own, and waits while all slots are in use."""
    config = adapter_config("a", "b", "c")
    async with shard_world(config, make_engine(config, max_loaded=1)) as world:
        router = await world.router()
        for slot, name in enumerate(["a", "b", "c", "a"]):
            await submit_with(router, slot, name, max_tokens=3)
        for slot, name in enumerate(["a", "b", "c", "a"]):
            await router.finish_of(slot)
            assert router.tokens[slot] == expected(name, 3)

        def value(name: str) -> float | None:
            return world.metrics.get_sample_value(name, {"model": "model"})

        num_loads, num_evictions = (
            value("kvloom_shard_adapter_loads_total"),
            value("kvloom_shard_adapter_evictions_total"),
        )
        assert num_loads is not None
        assert num_loads >= 3
        assert num_evictions == num_loads - 1
        labels = {"max_lora": "1", "waiting_lora_adapters": "", "running_lora_adapters": ""}
        assert world.metrics.get_sample_value("vllm:lora_requests_info", labels) is not None


async def test_a_cancelled_sequence_waits_for_its_adapter_no_more() -> None:
    """It must end although it never began, and its adapter may still be loaded for others."""
    config = adapter_config("law")
    config.shard.sim.adapter_load_ms = 200
    async with shard_world(config, make_engine(config)) as world:
        router = await world.router()
        await submit_with(router, 1, "law")
        await submit_with(router, 2, "law")
        await router.write(cancel_slots=[1])
        await router.finish_of(1)
        assert (await router.finish_of(2)).num_output_tokens == 4
        assert 1 not in router.tokens


async def test_an_awakened_shard_has_its_adapters_again() -> None:
    """Also those that were registered by call: routers know them, and would be refused otherwise."""
    config = adapter_config("law")
    async with shard_world(config, make_engine(config), make_engine=lambda: make_engine(config)) as world:
        router = await world.router()
        assert await load(world, "medicine", now=True) == ""
        await world.stub.Sleep(SleepRequest())
        await router.read_until(lambda: len(router.adapters) == 2 and not router.adapters["medicine"].loaded)
        assert "sleeps" in await load(world, "third")
        await world.stub.Wake(WakeRequest())
        await submit_with(router, 1, "medicine")
        await router.finish_of(1)
        assert router.tokens[1] == expected("medicine", 4)


async def test_a_shard_without_adapters_says_so() -> None:
    """With max_loaded_adapters = 0 nothing is offered, and a load says what to change."""
    config = adapter_config()
    async with shard_world(config, make_engine(config, max_loaded=0)) as world:
        router = await world.router()
        assert "adapters" not in router.info.capabilities
        assert not router.frames[0].HasField("adapters")
        assert "takes no adapters" in await load(world, "law")
        await submit_with(router, 1, "law")
        assert (await router.finish_of(1)).error.reason == R.ERROR_REASON_ADAPTER_NOT_FOUND
