"""Edges and routers follow the rollouts in the registry, with a real Redis."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import msgspec
import pytest
import redis.asyncio
import structlog.testing

from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.records import NameTakenError, RolloutRecord
from kvloom_common.discovery.registry import RolloutRegistry
from kvloom_common.models import rollout_follower
from kvloom_common.models.model_routes import ModelRoutes
from kvloom_common.models.rollout_follower import RolloutFollower
from kvloom_common.process.watched_files import following
from kvloom_common.trust.secret import FabricSecret
from kvloom_common.trust.shared_secret import SharedSecret
from tests.fakes.redis_server import redis_server
from tests.waiting import eventually

RECORD = RolloutRecord("m", ("m",), old="m", new="m@2", share=0.5, address="a", incarnation_id="i", owner="o")
TRUST = SharedSecret(FabricSecret.draw(), ("tools",), "t")


@dataclasses.dataclass
class World:
    config: KvloomConfig
    routes: ModelRoutes
    registry: RolloutRegistry

    def share(self) -> float | None:
        """Of the new version; None without a rollout."""
        route = self.routes.by_name.get("m")
        if route is None:
            return None
        return sum(target.weight for target in route.targets if not isinstance(target, str) and target.model == "m@2")


@pytest.fixture
async def world(redis_url: str, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    config = KvloomConfig()
    config.redis.url, config.redis.key_prefix = redis_url, f"rollouts-{request.node.name}"
    routes = ModelRoutes()
    registry = RolloutRegistry(redis_url, config.redis.key_prefix, TRUST.sealer)
    async with following(RolloutFollower(config, TRUST.sealer, routes)):
        yield World(config, routes, registry)
    await registry.close()


async def test_a_rollout_begins_grows_and_ends_without_a_restart(world: World) -> None:
    """Each step must reach the processes at once, or the sessions of one user meet both versions."""
    await world.registry.announce(RECORD)
    await eventually(lambda: world.share() == 0.5)
    await world.registry.announce(msgspec.structs.replace(RECORD, share=0.75))
    await eventually(lambda: world.share() == 0.75)
    await world.registry.withdraw("m", "i")
    await eventually(lambda: world.share() is None)


async def test_two_machines_do_not_roll_out_the_same_model(world: World, redis_url: str) -> None:
    """Each would set shares that the other does not know of."""
    await world.registry.announce(RECORD)
    other = RolloutRegistry(redis_url, world.config.redis.key_prefix, TRUST.sealer)
    with pytest.raises(NameTakenError):
        await other.announce(msgspec.structs.replace(RECORD, incarnation_id="j", owner="p"))
    await other.close()


async def test_what_this_fabric_has_not_signed_changes_nothing_and_is_reported_once(
    world: World, redis_url: str
) -> None:
    """Whoever can write to Redis could send users to a model of their choice."""
    with structlog.testing.capture_logs() as logs:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.set(f"{world.config.redis.key_prefix}:rollout:m", msgspec.json.encode(RECORD))
            await client.sadd(f"{world.config.redis.key_prefix}:rollout_ids", "m")
        for share in (0.1, 0.2, 0.3):
            good = msgspec.structs.replace(RECORD, name="n", names=("n",), old="n", share=share)
            await world.registry.announce(good)
            await eventually(
                lambda share=share: any(entry.get("share") == share and entry.get("model") == "n" for entry in logs)
            )
    assert world.share() is None
    assert len([entry for entry in logs if entry["log_level"] == "warning"]) == 1


def test_rollouts_are_logged_as_the_process_is_configured_to_log() -> None:
    """The services configure their log after this module was imported: a program that reads their JSON lines would
    find lines for people among them."""
    seen: list[str] = []

    def see(_logger: object, _method: str, event: dict[str, object]) -> str:
        seen.append(str(event["event"]))
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[see], cache_logger_on_first_use=False)
    try:
        RolloutFollower(KvloomConfig(), TRUST.sealer, ModelRoutes())._follow({"m": RECORD})
    finally:
        structlog.configure(**before)
    assert seen == ["rollout_share_changed"]


async def test_a_rollout_that_nobody_announces_again_ends_although_redis_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new version must not stay in use when its supervisor cannot take it back any more; until then a short outage
    changes nothing."""
    monkeypatch.setattr(rollout_follower, "TTL_SECONDS", 0.6)
    monkeypatch.setattr(rollout_follower, "HEARTBEAT_SECONDS", 0.05)
    config, routes = KvloomConfig(), ModelRoutes()
    server = redis_server()
    server.start()
    config.redis.url = server.connection_url
    registry = RolloutRegistry(config.redis.url, config.redis.key_prefix, TRUST.sealer)
    await registry.announce(RECORD)
    async with following(RolloutFollower(config, TRUST.sealer, routes)):
        await eventually(lambda: "m" in routes.by_name)
        server.stop()
        assert "m" in routes.by_name
        await eventually(lambda: "m" not in routes.by_name)
    await registry.close()
