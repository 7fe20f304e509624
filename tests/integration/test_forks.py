"""Responses that fork from a stored one, behind an item or a token."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvloom_common.config import ShardConfig, SimConfig, TorchConfig
from kvloom_common.models.served_model import ServedModel
from kvloom_common.text.tokenizer import ModelTokenizer
from lab.shallow_model import write_shallow_model
from shard_server.engines.base import Engine
from shard_server.engines.sim_engine import SimEngine
from shard_server.engines.torch_engine.engine import TorchEngine
from tests.fakes.failover_world import MODEL, failover_world
from tests.fakes.fake_router_link import FakeRequest, answer
from tests.fakes.state_world import StateWorld, state_world
from tests.fakes.tiny_tokenizer import model_tokenizer

pytest_plugins = ("tests.fakes.router_fixtures",)

MAX_TOKENS = 24


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Iterator[ModelTokenizer]:
    loaded = ModelTokenizer.load(model_dir)
    yield loaded
    loaded.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[StateWorld]:
    async with state_world(f"sqlite:///{tmp_path}/state.db", tmp_path) as started:
        yield started


def writing(text: str) -> Callable[[FakeRequest], None]:
    """A script that writes a text, token by token, behind what there is of it."""
    tokenizer = model_tokenizer()
    ids = tokenizer.encode_now(text)

    def play(request: FakeRequest) -> None:
        request.start()
        begun = request.request.partial_choices
        for number in range(len(begun[0].token_ids) if begun else 0, len(ids)):
            request.tokens(tokenizer.decode([ids[number]]), token_ids=[ids[number]])
        request.finish()

    return play


@contextlib.asynccontextmanager
async def of_real_shards(
    redis_url: str, folder: Path, tokenizer: ModelTokenizer, engine: Engine, config: ShardConfig
) -> AsyncIterator[StateWorld]:
    """A world whose router and shard are real."""
    async with failover_world(redis_url, tokenizer) as fabric:
        await fabric.start_router()
        await fabric.add_shard("shard-0", engine, config)
        await fabric.wait_for_shards(fabric.link, 1)
        served = ServedModel(MODEL, tokenizer, 1_700_000_000, "fp_test", None)
        link: Any = fabric.link
        async with state_world(f"sqlite:///{folder}/state.db", folder, more_models=[served], link=link) as started:
            started.client = started.client.with_options(timeout=120.0)
            yield started


async def streamed(world: StateWorld, **more: Any) -> tuple[float, Any]:
    """The seconds to the first text, and the response."""
    last: Any = None
    began, took = time.monotonic(), 0.0
    async for event in await world.client.responses.create(stream=True, **more):
        if event.type == "response.output_text.delta" and not took:
            took = time.monotonic() - began
        last = event
    return took, last.response


async def forked(world: StateWorld, number: int) -> None:
    """A response, and a fork of it that changes nothing."""
    api, more = world.client, {"max_output_tokens": MAX_TOKENS, "temperature": 1.2 * (number % 3 > 0)}
    made = await api.responses.create(model=MODEL, input=f"Tell me story {number}.", **more)
    assert made.usage is not None
    at = {"at": number * 7 % made.usage.output_tokens}
    if number % 2:
        again = await api.responses.create(model=MODEL, previous_response_id=made.id, extra_body=at, **more)
    else:
        _, again = await streamed(world, model=MODEL, previous_response_id=made.id, extra_body=at, **more)
    assert again.output_text == made.output_text, at
    assert again.usage is not None
    assert (again.usage.input_tokens, again.usage.output_tokens) == (made.usage.input_tokens, made.usage.output_tokens)


async def all_forked(world: StateWorld, count: int) -> None:
    for first in range(0, count, 10):
        await asyncio.gather(*(forked(world, number) for number in range(first, first + 10)))


async def test_a_fork_that_changes_nothing_has_the_same_output(
    router_redis_url: str, tmp_path: Path, tokenizer: ModelTokenizer
) -> None:
    """Behind any token, greedy or sampled, streamed or whole, 20 of 20."""
    config = ShardConfig(engine="sim", sim=SimConfig(step_ms=0.1, prefill_tokens_per_second=1e6))
    engine = SimEngine(MODEL, config, tokenizer.vocab_size)
    async with of_real_shards(router_redis_url, tmp_path, tokenizer, engine, config) as world:
        await all_forked(world, 20)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_200_forks_of_a_real_model(
    router_redis_url: str, tmp_path: Path, tokenizer: ModelTokenizer, model_dir: Path, load_runner: Any
) -> None:
    """200 of 200; and a fork behind 4,000 tokens needs no prefill, since the shard has the blocks."""
    config = ShardConfig(
        num_blocks=1024, max_batch=10, max_prefill_tokens_per_step=128, torch=TorchConfig(num_threads=1)
    )
    shallow = write_shallow_model(model_dir, tmp_path / "model", 2)
    engine = TorchEngine(shallow, MODEL, config, load_runner=load_runner)
    async with of_real_shards(router_redis_url, tmp_path, tokenizer, engine, config) as world:
        await all_forked(world, 200)
        more: Any = {"model": MODEL, "max_output_tokens": 64}
        seconds: dict[str, list[float]] = {"fresh": [], "fork": []}
        for number in range(5):
            story = f"{number} " + " ".join(f"word{number}{place}" for place in range(4000 // 4))
            took, made = await streamed(world, **more, input=story)
            seconds["fresh"].append(took)
            took, _ = await streamed(
                world, **more, previous_response_id=made.id, extra_body={"at": made.usage.output_tokens // 2}
            )
            seconds["fork"].append(took)
        fresh, fork = (sorted(seconds[name])[2] for name in ("fresh", "fork"))
        assert fork < fresh / 2, (fresh, fork)


async def test_a_fork_gets_the_tokens_and_the_seed(world: StateWorld) -> None:
    """The router generates what is behind them, as after the loss of another router, and it is billed only for that. A
    fork can be forked, and both are stored with the same input."""
    world.edge.link.script = writing("the quick brown fox jumps")
    first = await world.client.responses.create(model="tiny", input="a", instructions="Be brief.")
    made = await world.client.responses.create(model="tiny", input="b", previous_response_id=first.id)
    original = world.edge.link.requests[-1].request
    world.edge.link.script = writing("the quick brown dog")
    tokenizer = model_tokenizer()
    ids = tokenizer.encode_now("the quick brown fox jumps")
    at = next(number for number in range(len(ids)) if tokenizer.decode(ids[:number]) == "the quick brown")
    fork = await world.client.responses.create(model="tiny", previous_response_id=made.id, extra_body={"at": at})
    request = world.edge.link.requests[-1].request
    assert (fork.output_text, fork.previous_response_id) == ("the quick brown dog", made.id)
    assert list(request.prompt_token_ids) == list(original.prompt_token_ids)
    assert request.wanted.sampling.seed == original.wanted.sampling.seed
    assert (list(request.partial_choices[0].token_ids[:at]), request.submit.num_foreign_tokens) == (ids[:at], at)
    again = await world.client.responses.create(model="tiny", previous_response_id=fork.id, extra_body={"at": at})
    assert again.output_text == "the quick brown dog"
    shown = [[item.id async for item in world.client.responses.input_items.list(one.id)] for one in (made, again)]
    assert shown[0] == shown[1]
    await world.client.responses.create(model="tiny", input="c", previous_response_id=again.id)
    assert "fox jumps" not in world.prompt().rpartition("b<|im_end|>")[2]


async def test_a_fork_behind_an_item_leaves_out_what_follows(world: StateWorld) -> None:
    """Also behind one of a response before the one that is named, and for all later turns."""
    api, previous, ids = world.client, None, list[str]()
    for number in range(3):
        world.edge.link.script = answer(f"answer {number}")
        made = await api.responses.create(model="tiny", input=f"question {number}", previous_response_id=previous)
        ids += [made.id, made.output[0].id]
        previous = made.id
    world.edge.link.script = answer("forked")
    fork = await api.responses.create(
        model="tiny", input="instead", previous_response_id=previous, extra_body={"at": ids[3]}
    )
    assert [word in world.prompt() for word in ("answer 1", "question 2", "answer 2", "instead")] == [1, 0, 0, 1]
    later = await api.responses.create(model="tiny", input="later", previous_response_id=fork.id)
    assert [word in world.prompt() for word in ("answer 1", "question 2", "forked", "later")] == [1, 0, 1, 1]
    items = [item async for item in api.responses.input_items.list(later.id, order="asc")]
    question = items[2].id
    assert question is not None
    await api.responses.create(model="tiny", previous_response_id=later.id, extra_body={"at": question})
    assert [word in world.prompt() for word in ("answer 0", "question 1", "answer 1", "instead")] == [1, 1, 0, 0]
    await api.responses.delete(ids[0])
    with pytest.raises(openai.NotFoundError):
        await api.responses.create(model="tiny", input="x", previous_response_id=later.id)


async def test_what_cannot_be_forked_is_refused(world: StateWorld) -> None:
    """By name: what is unknown, or another tenant's, and what does not follow from what is stored."""
    world.edge.link.script = writing("the quick")
    api = world.client
    made = await api.responses.create(model="tiny", input="a")
    talk = await api.conversations.create()
    talked = await api.responses.create(model="tiny", input="a", conversation=talk.id)
    cases: list[tuple[openai.AsyncOpenAI, dict[str, Any], Any, int, str]] = [
        (api, {"previous_response_id": made.id, "input": "b"}, 1, 400, "input"),
        (api, {"previous_response_id": made.id}, 10_000, 400, "at"),
        (api, {"previous_response_id": made.id, "background": True}, 1, 400, "at"),
        (api, {"previous_response_id": made.id, "input": "b"}, "msg_none", 404, "at"),
        (api, {"previous_response_id": talked.id}, 1, 409, "at"),
        (api, {"input": "b"}, 1, 400, "at"),
        (world.other, {"previous_response_id": made.id}, 1, 404, "previous_response_id"),
    ]
    for client, body, at, status, field in cases:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.responses.create(model="tiny", extra_body={"at": at}, **body)
        assert (caught.value.status_code, caught.value.param) == (status, field), body
