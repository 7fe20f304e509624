"""Receipts, from the HTTP request for one to the re-execution of the answer (docs/receipts.md)."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import click.testing
import msgspec
import pytest

from kvloom.config import KvloomConfig, ShardConfig
from kvloom.receipts.key_files import KEY_FILE, public_path
from kvloom.receipts.keys import Signer, made_or_read, read_public_keys
from kvloom.receipts.receipt import Bundle, digest, encode_bundle
from kvloom.tenancy.prices import Price, Prices
from kvloom.text.model_checksum import model_checksum
from kvloom.text.tokenizer import ModelTokenizer
from shard_server.engines.base import Engine
from shard_server.engines.torch_engine.engine import TorchEngine
from tests.fakes.embedding_world import EmbeddingWorld, embedding_world, sim_engine
from tests.fakes.failover_world import MODEL
from tests.fakes.shallow_model import write_shallow_model
from tools.models.damage import damage
from tools.receipts.bundles import bundles_in
from tools.receipts.command import receipts

pytest_plugins = ("tests.fakes.router_fixtures",)

RECEIPT = {"x-kvloom-receipt": "true"}
PRICE = Price("p-7", "*", prompt_nanos=10, cached_nanos=1, output_nanos=30, request_nanos=500)
CHAT = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 12}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/chat/completions", {**CHAT, "temperature": 0}),
    "sampled": ("/v1/chat/completions", {**CHAT, "temperature": 0.9, "seed": 5, "top_p": 0.9, "n": 2}),
    "a drawn seed and a stop string": ("/v1/completions", {"prompt": "A loom is", "max_tokens": 12, "stop": [" a"]}),
    "responses": ("/v1/responses", {"input": "Name a fish.", "max_output_tokens": 8, "store": False}),
    "messages": ("/v1/messages", CHAT),
}


@pytest.fixture(scope="module")
def shallow_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with few layers, whose bits depend on its weights as those of all."""
    return write_shallow_model(model_dir, tmp_path_factory.mktemp("models") / "shallow", num_layers=3)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Iterator[ModelTokenizer]:
    loaded = ModelTokenizer.load(model_dir)
    yield loaded
    loaded.close()


def configured(data_dir: Path, checksum: str) -> Callable[[KvloomConfig], None]:
    def configure(config: KvloomConfig) -> None:
        config.data_dir = str(data_dir)
        config.router.receipts.enabled = True
        config.router.result_cache.enabled = True
        config.model.sha256 = checksum

    return configure


@pytest.fixture
async def torch_world(
    router_redis_url: str, tokenizer: ModelTokenizer, shallow_dir: Path, tmp_path: Path
) -> AsyncIterator[EmbeddingWorld]:
    config = ShardConfig(num_blocks=512)
    engine: Engine = TorchEngine(shallow_dir, MODEL, config)
    configure = configured(tmp_path, model_checksum(shallow_dir))
    async with embedding_world(router_redis_url, tokenizer, (engine, config), configure=configure) as started:
        started.fabric.server.prices = lambda: Prices([PRICE])
        yield started


async def ask(world: EmbeddingWorld, path: str, body: dict[str, Any], *, stream: bool) -> tuple[str, list[Bundle]]:
    """(x-kvloom-cache, receipts)"""
    wanted = {"model": MODEL, **body, "stream": stream}
    async with world.http.post(world.url + path, json=wanted, headers=RECEIPT) as response:
        text = await response.text()
        assert response.status == 200, text
        return response.headers["x-kvloom-cache"], bundles_in(text)


async def verify(
    tmp_path: Path, found: list[Bundle], *arguments: str, config: str = ""
) -> tuple[int, list[dict[str, Any]]]:
    """(exit status, verdicts) of `kvloom receipts verify`."""
    file, config_file = tmp_path / "receipts.jsonl", tmp_path / "verify.toml"
    file.write_bytes(b"".join(encode_bundle(bundle) + b"\n" for bundle in found))
    config_file.write_text(config or "[shard]\nnum_blocks = 512\n")
    fixed = ["--data-dir", str(tmp_path), "--config", str(config_file), "--json"]
    command = ["verify", str(file), *fixed, *arguments]
    result = await asyncio.to_thread(click.testing.CliRunner().invoke, receipts, command)  # it has a loop of its own
    assert result.exit_code in (0, 1, 2), (result.output, result.exception)
    return result.exit_code, [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def parts(verdicts: list[dict[str, Any]]) -> set[str]:
    return {fault["part"] for verdict in verdicts for fault in verdict["faults"]}


def signed_again(bundle: Bundle, signer: Signer, **changes: Any) -> Bundle:
    """As an operator would do who has the key and lies."""
    output = changes.pop("output", bundle.output)
    receipt = msgspec.structs.replace(bundle.receipt, output_digest=digest(output), **changes)
    return msgspec.structs.replace(bundle, receipt=receipt, output=output, signature=signer.sign(receipt))


def with_another_token(bundle: Bundle) -> Any:
    first, *others = bundle.output
    ids = [*first.token_ids]
    ids[2] += 1
    return [msgspec.structs.replace(first, token_ids=ids), *others]


@pytest.mark.timeout(360)
async def test_a_real_models_answers_are_computed_again_bit_for_bit(
    torch_world: EmbeddingWorld, shallow_dir: Path, tmp_path: Path
) -> None:
    """The claim of a receipt: whoever has the model finds the same tokens, whatever the API and the sampling."""
    found: list[Bundle] = []
    for number, (path, body) in enumerate(REQUESTS.values()):
        _, bundles = await ask(torch_world, path, body, stream=bool(number % 2))
        (bundle,) = bundles
        found.append(bundle)
    receipt = found[0].receipt
    assert receipt.weights_checksum == model_checksum(shallow_dir)
    assert receipt.card_checksum == "" or len(receipt.card_checksum) == 64
    assert len(receipt.chat_template_checksum) == 64
    assert receipt.price.price == PRICE
    assert receipt.cost_nanos == 500 + 10 * receipt.num_prompt_tokens + 30 * receipt.num_output_tokens
    use, again = await ask(torch_world, *REQUESTS["greedy"], stream=False)
    assert (use, again[0].receipt.is_result_cache_hit, again[0].receipt.cost_nanos) == ("hit", True, 0)
    assert again[0].output == found[0].output
    status, verdicts = await verify(tmp_path, [*found, *again], "--model", str(shallow_dir))
    assert (status, [verdict["is_rerun"] for verdict in verdicts]) == (0, [True] * 6), verdicts

    signer = made_or_read(tmp_path / KEY_FILE)
    status, verdicts = await verify(
        tmp_path, [signed_again(found[0], signer, output=with_another_token(found[0]))], "--model", str(shallow_dir)
    )
    assert (status, parts(verdicts)) == (1, {"tokens"}), "a flipped token, signed by who has the key"

    damaged = tmp_path / "damaged"
    damage(shallow_dir, damaged, layer=1, noise=0.5)
    status, verdicts = await verify(tmp_path, found[:1], "--model", str(damaged))
    assert (status, parts(verdicts)) == (1, {"weights", "tokens"}), "flipped weights"
    lies = signed_again(found[0], signer, weights_checksum=model_checksum(damaged))
    status, verdicts = await verify(tmp_path, [lies], "--model", str(damaged))
    assert (status, parts(verdicts)) == (1, {"tokens"}), "flipped weights whose checksum was signed"


async def test_what_was_altered_is_named(torch_world: EmbeddingWorld, tmp_path: Path) -> None:
    """A verdict that only says "wrong" helps nobody to find out what happened."""
    _, (bundle,) = await ask(torch_world, *REQUESTS["greedy"], stream=False)
    receipt = bundle.receipt
    signer = made_or_read(tmp_path / KEY_FILE)
    other_prompt = msgspec.structs.replace(bundle.request, prompt_token_ids=[7, *bundle.request.prompt_token_ids[1:]])
    dearer = msgspec.structs.replace(receipt.price, output_nanos=31)
    cases: list[tuple[Bundle, set[str]]] = [
        (bundle, set()),
        (msgspec.structs.replace(bundle, output=with_another_token(bundle)), {"output"}),
        (msgspec.structs.replace(bundle, request=other_prompt), {"request"}),
        (changed(bundle, price=dearer), {"signature", "price"}),
        (changed(bundle, cost_nanos=receipt.cost_nanos + 1), {"signature", "price"}),
        (changed(bundle, tenant="other"), {"signature"}),
        (signed_again(bundle, signer, price=dearer), {"price"}),
        (signed_again(bundle, signer, num_output_tokens=receipt.num_output_tokens + 1), {"counts", "price"}),
        (msgspec.structs.replace(bundle, signature="00" * 64), {"signature"}),
        (msgspec.structs.replace(bundle, key_id="0" * 16), {"signature"}),
    ]
    for altered, expected in cases:
        status, verdicts = await verify(tmp_path, [altered])
        assert parts(verdicts) == expected
        assert status == (1 if expected else 0)


def changed(bundle: Bundle, **changes: Any) -> Bundle:
    return msgspec.structs.replace(bundle, receipt=msgspec.structs.replace(bundle.receipt, **changes))


async def test_fifty_of_a_thousand(router_redis_url: str, tokenizer: ModelTokenizer, model_dir: Path, tmp_path: Path):
    """A sample finds whoever cheats now and then; the same seed takes the same sample."""
    engine, config = sim_engine()
    configure = configured(tmp_path, model_checksum(model_dir))
    async with embedding_world(router_redis_url, tokenizer, (engine, config), configure=configure) as world:
        bodies = [{"prompt": f"Question {number}.", "max_tokens": 6, "seed": number} for number in range(1000)]
        many: list[Bundle] = []
        for first in range(0, 1000, 50):
            asked = [ask(world, "/v1/completions", body, stream=False) for body in bodies[first : first + 50]]
            many += [bundle for _, bundles in await asyncio.gather(*asked) for bundle in bundles]
    sim = '[shard]\nengine = "sim"\n[shard.sim]\nstep_ms = 0.0\nprefill_tokens_per_second = 1e6\n'
    wanted = ("--model", str(model_dir), "--sample", "50", "--seed", "3")
    status, verdicts = await verify(tmp_path, many, *wanted, config=sim)
    assert (status, len(verdicts)) == (0, 1000)
    chosen = [i for i, verdict in enumerate(verdicts) if verdict["is_rerun"]]
    assert chosen == sorted(random.Random(3).sample(range(1000), 50))
    signer = made_or_read(tmp_path / KEY_FILE)
    many[chosen[7]] = signed_again(many[chosen[7]], signer, output=with_another_token(many[chosen[7]]))
    status, verdicts = await verify(tmp_path, many, *wanted, config=sim)
    assert (status, [i for i, verdict in enumerate(verdicts) if verdict["faults"]]) == (1, [chosen[7]])

    status, verdicts = await verify(tmp_path, many[:2], "--model", str(model_dir))  # with the torch engine
    assert status == 2, "another engine computes other bits, and that is no proof of anything"
    assert all("cannot be compared" in verdict["not_rerun_because"] for verdict in verdicts)


async def test_only_those_who_ask_get_one_and_the_keys_are_published(torch_world: EmbeddingWorld, tmp_path: Path):
    """Receipts contain the prompt's tokens, so they come only by request; anyone may have the public key."""
    status, answer = await torch_world.post("/v1/chat/completions", **CHAT)
    assert (status, "kvloom" in answer) == (200, False)
    async with torch_world.http.get(torch_world.url + "/.well-known/kvloom-receipts.json") as response:
        assert await response.json() == msgspec.to_builtins(read_public_keys(public_path(tmp_path / KEY_FILE)))
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    torch_world.edge.receipt_keys = None  # as of an edge of a fabric without receipts
    async with torch_world.http.get(torch_world.url + "/.well-known/kvloom-receipts.json") as response:
        assert response.status == 404
    status, answer = await torch_world.post("/v1/chat/completions", RECEIPT, **CHAT)
    assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
