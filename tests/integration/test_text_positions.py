"""A forbidden phrase is refused in every place in which a client can write what the model reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from kvloom.v1.router_service_pb2 import GenerateRequest
from kvloom_common.parsers.spec import ParserSpec
from kvloom_common.text.json_escapes import unescaped
from safety_svc.folding import fold
from shard_server.engines.base import Capability
from tests.examples import num_examples
from tests.fakes.screened_world import ScreenedWorld, WritingEngine, screened_world, showing_tokenizer
from tests.text_positions import UNSHOWN_ROUTES, Position, grpc_positions, http_positions, why_unshown

pytest_plugins = ("tests.fakes.router_fixtures",)

Fabric = tuple[ScreenedWorld, WritingEngine]
TEXTS = ("launch code", "launch-code")
"""The second one where only names may stand."""
IS_LONG = num_examples(100) > 100
MOST_UNSHOWN = 4
"""How many bodies `make test` tries of a position that no model reads."""
MESSAGE = "No launch codes."
HALVES = ("launch ", "code")
POLICY = f"""
[[rules]]
name = "codes"
message = "{MESSAGE}"
phrases = {json.dumps(TEXTS)}
whole_words = false
"""


@pytest.fixture
async def fabric(router_redis_url: str, tmp_path: Path) -> AsyncIterator[Fabric]:
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    tokenizer = showing_tokenizer()
    engine = WritingEngine(tokenizer)
    async with screened_world(router_redis_url, policy, engine, ParserSpec("hermes", "qwen3")) as world:
        yield world, engine


def values(position: Position) -> Iterator[Any]:
    for text in TEXTS:
        yield text
        yield json.dumps({"type": "object", "shown": text.replace(" ", "\n")})
        if position.is_json:
            yield {"type": "object", "properties": {text: {"description": text}}}
            yield {"type": "text", "text": text.replace(" ", "\n")}
            yield [{"type": "text", "text": text}]
            yield {"type": "grammar", "syntax": "lark", "definition": text}


def bodies(position: Position) -> Iterator[Any]:
    """Bodies with a forbidden text in this place, as the last message and as one of the history, and with a text that
    only two neighbours make forbidden."""
    made = [position.make(value) for value in values(position)]
    if position.pair is not None:
        made.append(position.pair(*HALVES))
    for body in made:
        yield body
        for key in ("messages", "input"):
            items = body.get(key)
            if isinstance(items, list) and items and isinstance(items[-1], dict):
                yield {**body, key: [*items, {"role": "user", "content": "go on"}]}


class Outcomes:
    """What became of the texts in each position."""

    def __init__(self, fabric: Fabric) -> None:
        self._world, self._engine = fabric
        self._found: dict[str, set[str]] = {}
        self._bodies: dict[str, dict[str, Any]] = {}

    def add(self, position: Position, path: str = "") -> None:
        own = self._bodies.setdefault(f"{path} {position.path}".strip(), {})
        own.update((json.dumps(body), body) for body in bodies(position))

    async def try_all(self, send: Callable[[str, Any], Awaitable[tuple[bool, str]]]) -> None:
        """`send` returns if a request was served, and what came of it. `make test` ends with the first body that was
        screened."""
        for at, made in self._bodies.items():
            found = self._found[at] = set()
            route, _, position = at.rpartition(" ")
            most = len(made) if IS_LONG or not why_unshown(position) else MOST_UNSHOWN
            for text, body in list(made.items())[:most]:
                outcome = await self._outcome(send, route, body)
                assert outcome != "passes", f"{at}: {text}"
                found.add(outcome)
                if outcome == "screened" and not IS_LONG:
                    break

    async def _outcome(self, send: Callable[[str, Any], Awaitable[tuple[bool, str]]], route: str, body: Any) -> str:
        self._engine.submitted.clear()
        is_served, text = await send(route, body)
        if MESSAGE in text:
            return "screened"
        if not is_served:
            return "refused"
        ids = [each.prompt_token_ids for each in self._engine.submitted]
        prompts = [unescaped(self._world.tokenizer.decode(each, skip_special_tokens=False)) for each in ids]
        return (
            "passes" if any(fold(text)[0] in fold(prompt)[0] for prompt in prompts for text in TEXTS) else "not shown"
        )

    @property
    def unexplained(self) -> list[str]:
        """The positions whose text was never screened, for no reason that is listed, and those for which a reason is
        listed although their text was screened."""
        return [
            at for at, found in self._found.items() if ("screened" in found) == bool(why_unshown(at.rpartition(" ")[2]))
        ]


async def test_every_position_of_every_http_api(fabric: Fabric) -> None:
    """A new field of a body, in which text may stand that a model reads, is screened or fails here."""
    world, _ = fabric
    outcomes = Outcomes(fabric)
    for path, position in http_positions():
        if path not in UNSHOWN_ROUTES:
            outcomes.add(position, path)

    async def send(path: str, body: Any) -> tuple[bool, str]:
        status, text = await world.post(path, body)
        return status == 200, text

    await outcomes.try_all(send)
    assert not outcomes.unexplained, "\n".join(outcomes.unexplained)


async def test_a_pair_of_texts_is_screened_as_its_model_reads_it(router_redis_url: str, tmp_path: Path) -> None:
    """A cross-encoder reads query and document as one text, which only together may be forbidden."""
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    engine = WritingEngine(showing_tokenizer())
    engine.info = dataclasses.replace(engine.info, capabilities=frozenset({Capability.EMBED, Capability.CROSS_ENCODE}))
    async with screened_world(router_redis_url, policy, engine) as world:
        for path, body in (
            ("/v1/rerank", {"query": HALVES[0], "documents": ["harmless", HALVES[1]]}),
            ("/v1/score", {"text_1": HALVES[0], "text_2": HALVES[1]}),
        ):
            status, text = await world.post(path, {"model": "tiny", **body})
            assert (status, MESSAGE in text) == (400, True), text


async def test_every_position_of_a_generate(fabric: Fabric) -> None:
    """Clients over gRPC pass by the edge, and not by the policy."""
    world, _ = fabric
    outcomes = Outcomes(fabric)
    stub = await world.router.stub()
    for position in grpc_positions():
        outcomes.add(position)

    async def send(_path: str, body: Any) -> tuple[bool, str]:
        try:
            wanted = json_format.ParseDict(body, GenerateRequest())
            responses = [response async for response in stub.Generate(wanted)]
        except (json_format.ParseError, grpc.aio.AioRpcError) as error:
            return False, str(error)
        return True, str(responses)

    await outcomes.try_all(send)
    assert not outcomes.unexplained, "\n".join(outcomes.unexplained)
