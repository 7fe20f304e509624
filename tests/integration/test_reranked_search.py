"""Searches whose passages a model of the fabric ranks again."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo
from kvloom_common.models.served_model import ServedModel
from orchestrator.metrics import RERANKED
from shard_server.engines.sim_tokens import EMBEDDING_SIZE
from tests.fakes.fake_encoder import WINDOW, embedding, encoder_info, encoder_model
from tests.fakes.fake_router_link import FakeRequest, Script, answer
from tests.fakes.state_world import StateWorld, state_world
from tests.fakes.tiny_tokenizer import model_tokenizer
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests share their world

RANKER = "ranker"
BEST = "mill"
TEXTS = {
    "loom.md": "The loom reads cards, and cards, and more cards.",
    "mill.md": "The mill grinds wheat where nobody asks for cards.",
    "ship.md": "The ship carries cards over the sea.",
}


def vector(x: float, y: float) -> bytes:
    return array("f", [x, y, *([0.0] * (EMBEDDING_SIZE - 2))]).tobytes()


def ranking(otherwise: Script) -> Script:
    """Returns a script of a model that finds only texts about mills relevant."""

    def play(request: FakeRequest) -> None:
        if request.request.wanted.model != RANKER:
            otherwise(request)
            return
        text = model_tokenizer().decode(request.request.prompt_token_ids)
        request.start()
        request.finish(embedding=vector(1.0, 0.0) if BEST in text or "?" in text else vector(0.6, 0.8))

    return play


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[StateWorld, str]]:
    folder = tmp_path_factory.mktemp("reranked")
    models = [encoder_model(), ServedModel(RANKER, model_tokenizer(), 0, "fp_test")]
    settings = {"rerank_model": RANKER, "rerank_seconds": 30.0}
    async with state_world(f"sqlite:///{folder}/state.db", folder, more_models=models, **settings) as started:
        link = started.edge.link
        tiny = next(info for info in link.fleet.models if info.name == "tiny")
        capabilities = ["embed", "rerank"]
        ranker = ModelInfo(name=RANKER, num_ready_shards=1, max_model_len=WINDOW, capabilities=capabilities)
        link.tell(FleetState(models=[tiny, encoder_info(), ranker]))
        link.script = embedding(answer("Hello"))
        ids = [
            (await started.client.files.create(file=(name, text.encode()), purpose="assistants")).id
            for name, text in TEXTS.items()
        ]
        store = await started.client.vector_stores.create(file_ids=ids)

        async def is_ready() -> bool:
            return (await started.client.vector_stores.retrieve(store.id)).file_counts.completed == len(ids)

        async with started.jobs():
            await eventually(is_ready, "the end of indexing")
        yield started, store.id


@pytest.fixture
def world(shared: tuple[StateWorld, str]) -> StateWorld:
    shared[0].edge.link.script = ranking(embedding(answer("Hello")))
    return shared[0]


@pytest.fixture
def store(shared: tuple[StateWorld, str]) -> str:
    return shared[1]


def num_searches(outcome: str) -> float:
    return RERANKED.labels(outcome).total


async def found(world: StateWorld, store: str, **more: object) -> list[tuple[str, float]]:
    results = world.client.vector_stores.search(store, query="Which cards?", **more)  # type: ignore[arg-type]
    return [(one.filename, one.score) async for one in results]


async def test_the_model_decides_what_is_first(world: StateWorld, store: str) -> None:
    """Its scores are those of the results, and thresholds are about them. `ranker: "none"` leaves it out."""
    before = num_searches("done")
    every = await found(world, store)
    assert every[0] == ("mill.md", 1.0)
    assert [score for _, score in every[1:]] == [0.6, 0.6]
    assert num_searches("done") == before + 1
    only = await found(world, store, ranking_options={"score_threshold": 0.9}, max_num_results=2)
    assert only == [("mill.md", 1.0)]
    plain = await found(world, store, ranking_options={"ranker": "none"})
    assert len(plain) == 3
    assert num_searches("done") == before + 2


@pytest.mark.parametrize("outcome", ["late", "failed"])
async def test_without_the_model_there_is_a_ranking(
    world: StateWorld, store: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of vectors and words: a slow or dead model costs the order, and not the search."""
    others = embedding(answer("Hello"))

    def script(request: FakeRequest) -> None:
        if request.request.wanted.model != RANKER:
            others(request)
        elif outcome == "failed":
            request.fail(ErrorReason.ERROR_REASON_SHARD_LOST)

    world.edge.link.script = script
    if outcome == "late":
        assert world.searcher is not None
        reranker = world.searcher._reranker
        assert reranker is not None
        monkeypatch.setattr(reranker, "_max_seconds", 0.05)
    before = num_searches(outcome)
    assert {name for name, _ in await found(world, store)} == set(TEXTS)
    assert num_searches(outcome) == before + 1
    for request in world.edge.link.requests:
        request.lose()  # what the search still waits for


async def test_passages_are_cut_where_the_model_has_no_room(
    world: StateWorld, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that its encoder could read may be too long beside the question."""
    lengths: list[int] = []
    rank = ranking(embedding(answer("Hello")))

    def script(request: FakeRequest) -> None:
        num_tokens = len(request.request.prompt_token_ids)
        if request.request.wanted.model == RANKER and num_tokens > 30:
            lengths.append(num_tokens)
            request.fail(ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED)
        else:
            rank(request)

    world.edge.link.script = script
    before = num_searches("done")
    assert (await found(world, store))[0][0] == "mill.md"
    assert lengths
    assert num_searches("done") == before + 1
