"""The catalogue of an edge: models come and go with the shards that serve them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from kvloom.errors import KvloomError
from kvloom.v1.model_card_pb2_grpc import add_ModelCardServiceServicer_to_server
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo
from kvloom_common.config import ModelConfig
from kvloom_common.models.card_service import ModelCardServicer, fetch_card
from kvloom_common.models.catalogue import Catalogue, CatalogueFollower
from kvloom_common.models.model_card import ModelCardError, PackedCard, make_card
from tests.fakes.served_models import tiny_model
from tests.fakes.tiny_tokenizer import byte_level_tokenizer
from tests.waiting import eventually


@dataclasses.dataclass
class Routers:
    """Routers that have some cards, over a real server."""

    channel: grpc.aio.Channel
    cards: dict[str, PackedCard]
    fleet: FleetState = dataclasses.field(default_factory=FleetState)
    changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    num_calls: int = 0

    async def wait_fleet_change(self) -> None:
        await self.changed.wait()

    def channel_to(self, model: str) -> grpc.aio.Channel:
        self.num_calls += 1
        return self.channel

    def serve(self, *cards: PackedCard) -> None:
        """From now on shards serve these models."""
        self.cards.update({card.model: card for card in cards})
        infos = [ModelInfo(name=card.model, num_ready_shards=1, card_checksum=card.checksum) for card in cards]
        self.fleet = FleetState(models=infos)
        self.changed.set()
        self.changed = asyncio.Event()


@pytest.fixture
async def routers() -> AsyncIterator[Routers]:
    cards: dict[str, PackedCard] = {}
    server = grpc.aio.server()
    add_ModelCardServiceServicer_to_server(ModelCardServicer(cards.get), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Routers(channel, cards)
    await server.stop(None)


@pytest.fixture
async def catalogue(routers: Routers) -> AsyncIterator[Catalogue]:
    catalogue = Catalogue()
    task = asyncio.create_task(CatalogueFollower(catalogue, routers, retry_seconds=0.01).watch())
    yield catalogue
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    catalogue.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def card(folder: Path, name: str, **changes: object) -> PackedCard:
    return make_card(ModelConfig(name=name, path=str(folder), **changes))


async def test_models_appear_change_and_disappear(routers: Routers, catalogue: Catalogue, folder: Path) -> None:
    """Clients of an edge without any model's files get each model as soon as a shard serves it, in its newest form, and
    a 404 when it is withdrawn."""
    routers.serve(card(folder, "a"), card(folder, "b", aliases=["x"]))
    await eventually(lambda: set(catalogue.by_name) == {"a", "b", "x"}, "both models")
    assert catalogue.by_name["x"] is catalogue.by_name["b"]
    routers.serve(card(folder, "b", version="2"))
    await eventually(lambda: set(catalogue.by_name) == {"b"}, "the withdrawal of a")
    assert catalogue.by_name["b"].version == "2"
    assert routers.num_calls == 3


async def test_lost_routers_take_no_model_away(routers: Routers, catalogue: Catalogue, folder: Path) -> None:
    """While no router is connected, its models are unknown, not withdrawn: clients must get a 503, and no 404."""
    routers.serve(card(folder, "a"))
    await eventually(lambda: "a" in catalogue.by_name, "the model")
    routers.serve()
    routers.serve(card(folder, "a"), card(folder, "b"))
    await eventually(lambda: "b" in catalogue.by_name, "the other model")
    assert "a" in catalogue.by_name
    assert routers.num_calls == 2


async def test_a_card_that_cannot_be_fetched_is_tried_again(
    routers: Routers, catalogue: Catalogue, folder: Path
) -> None:
    """The router may be about to get it, or be replaced; the other models are served meanwhile."""
    good, late = card(folder, "good"), card(folder, "late")
    routers.serve(late, good)
    del routers.cards["late"]
    await eventually(lambda: "good" in catalogue.by_name and routers.num_calls > 3, "further tries")
    assert "late" not in catalogue.by_name
    routers.cards["late"] = late
    await eventually(lambda: "late" in catalogue.by_name, "the late card")


async def test_an_alias_does_not_hide_a_model() -> None:
    """Two machines may be configured apart: a model must stay reachable by its own name."""
    other = dataclasses.replace(tiny_model("other"), aliases=("tiny",))
    catalogue = Catalogue([tiny_model("tiny"), other])
    assert catalogue.by_name["tiny"].name == "tiny"
    catalogue.remove("tiny")
    assert catalogue.by_name["tiny"] is other


async def test_one_card_is_fetched_once_however_many_shards_have_it(folder: Path) -> None:
    """When a fleet starts, all of its shards bring the same card at once."""
    catalogue, wanted, calls = Catalogue(), card(folder, "a"), 0

    async def fetch() -> bytes:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0)
        return wanted.packed

    await asyncio.gather(*(catalogue.ensure("a", wanted.checksum, fetch) for _ in range(8)))
    assert calls == 1
    with pytest.raises(ModelCardError, match="is that of a"):
        await catalogue.ensure("b", wanted.checksum, fetch)
    catalogue.close()


@pytest.mark.parametrize(("model", "checksum"), [("other", ""), ("a", "0" * 64)])
async def test_a_card_that_is_not_there_is_named(routers: Routers, folder: Path, model: str, checksum: str) -> None:
    """Otherwise an operator would search for the fault in the network."""
    routers.serve(card(folder, "a"))
    with pytest.raises(KvloomError, match=f"no card of the model '{model}'"):
        await fetch_card(routers.channel, model, checksum)


async def test_shared_names_stand_for_a_model_until_its_successor_is_alone() -> None:
    """During a rollout two versions have the same aliases: no request may come to the new one by its position in a
    list."""
    old = dataclasses.replace(tiny_model("m@1"), aliases=("m", "chat"))
    new = dataclasses.replace(tiny_model("m@2"), aliases=("m", "chat"), succeeds="m@1")
    for models in ([old, new], [new, old]):
        catalogue = Catalogue(models)
        assert {catalogue.by_name[name].name for name in ("m", "chat")} == {"m@1"}
        catalogue.remove("m@1")
        assert {catalogue.by_name[name].name for name in ("m", "chat")} == {"m@2"}
