"""Receipts, from the HTTP request for one to the re-execution of the answer (docs/how-to/receipts.md)."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import click.testing
import msgspec
import pytest
from safetensors.torch import load_file

from kvloom.client.client import Client
from kvloom_common.config import AdapterConfig, KvloomConfig, ShardConfig
from kvloom_common.models.catalogue import Catalogue, adapters_of
from kvloom_common.models.served_model import ServedModel
from kvloom_common.receipts.key_files import KEY_FILE, public_path
from kvloom_common.receipts.keys import Signer, made_or_read, read_public_keys
from kvloom_common.receipts.receipt import Bundle, decode_bundle, digest, encode_bundle
from kvloom_common.tenancy.prices import Price, Prices
from kvloom_common.text.model_checksum import model_checksum
from kvloom_common.text.tokenizer import ModelTokenizer
from lab.damaged_model import damage
from lab.shallow_model import write_shallow_model
from shard_server.engines.base import Engine
from shard_server.engines.torch_engine.engine import TorchEngine
from shard_server.engines.torch_engine.lora.peft import adapter_checksum
from tests.fakes.embedding_world import EmbeddingWorld, embedding_world, sim_engine
from tests.fakes.failover_world import MODEL
from tests.fakes.peft_adapter import write_peft_adapter
from tools.receipts.collect import collected
from tools.receipts.command import bundles_in
from tools.receipts.command import verify as verify_command

pytest_plugins = ("tests.fakes.router_fixtures",)

SIM = '[shard]\nengine = "sim"\n[shard.sim]\nstep_ms = 0.0\nprefill_tokens_per_second = 1e6\n'
RECEIPT = {"x-kvloom-receipt": "true"}
PRICE = Price("p-7", "*", prompt_nanos=10, cached_nanos=1, output_nanos=30, request_nanos=500)
LAW_PRICE = Price("p-8", f"{MODEL}:law", prompt_nanos=20, cached_nanos=2, output_nanos=60)
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
def adapter_dir(shallow_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_peft_adapter(shallow_dir, tmp_path_factory.mktemp("adapters") / "law", rank=4, size=0.3)


def configured(data_dir: Path, checksum: str, **adapters: Path) -> Callable[[KvloomConfig], None]:
    def configure(config: KvloomConfig) -> None:
        config.data_dir = str(data_dir)
        config.router.receipts.enabled = True
        config.router.result_cache.enabled = True
        config.model.sha256 = checksum
        config.model.adapters = [AdapterConfig(name, str(path)) for name, path in adapters.items()]

    return configure


@pytest.fixture
async def torch_world(
    router_redis_url: str, tokenizer: ModelTokenizer, shallow_dir: Path, adapter_dir: Path, tmp_path: Path
) -> AsyncIterator[EmbeddingWorld]:
    config = ShardConfig(num_blocks=512)
    engine: Engine = TorchEngine(shallow_dir, MODEL, config)
    configure = configured(tmp_path, model_checksum(shallow_dir), law=adapter_dir)
    async with embedding_world(router_redis_url, tokenizer, (engine, config), configure=configure) as started:
        recorder = started.fabric.server.features.recorder
        assert recorder is not None
        assert recorder._receipts is not None
        recorder._receipts._prices = lambda: Prices([PRICE, LAW_PRICE])
        catalogue = Catalogue([ServedModel(MODEL, tokenizer, 0, "fp_test")])
        catalogue.set_adapters(adapters_of(started.fabric.link.fleet))
        started.edge.models.by_name = catalogue.by_name
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
    command = [str(file), *fixed, *arguments]
    result = await asyncio.to_thread(
        click.testing.CliRunner().invoke, verify_command, command
    )  # it has a loop of its own
    assert result.exit_code in (0, 1, 2), (result.output, result.exception)
    return result.exit_code, [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


async def verified(tmp_path: Path, found: list[Bundle], *arguments: str) -> tuple[int, set[str]]:
    """(exit status, parts with faults)"""
    status, verdicts = await verify(tmp_path, found, *arguments)
    return status, parts(verdicts)


def with_another_bit(bundle: Bundle) -> Any:
    (first,) = bundle.output
    vector = bytearray(base64.b64decode(str(first.embedding)))
    vector[5 * 4] ^= 1
    return [msgspec.structs.replace(first, embedding=base64.b64encode(vector).decode())]


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
    signer = made_or_read(tmp_path / KEY_FILE)
    flipped_token = signed_again(found[0], signer, output=with_another_token(found[0]))
    status, verdicts = await verify(tmp_path, [*found, *again, flipped_token], "--model", str(shallow_dir))
    assert (status, [verdict["is_rerun"] for verdict in verdicts]) == (1, [True] * 7), verdicts
    assert [parts([verdict]) for verdict in verdicts] == [set()] * 6 + [{"tokens"}]

    damaged = tmp_path / "damaged"
    damage(shallow_dir, damaged, layer=1, noise=0.5)
    lies = signed_again(found[0], signer, weights_checksum=model_checksum(damaged))
    status, verdicts = await verify(tmp_path, [found[0], lies], "--model", str(damaged))
    assert (status, [parts([verdict]) for verdict in verdicts]) == (1, [{"weights", "tokens"}, {"tokens"}])


@pytest.mark.timeout(360)
@pytest.mark.long
async def test_an_adapters_answer_is_computed_again_with_the_adapter(
    torch_world: EmbeddingWorld, shallow_dir: Path, adapter_dir: Path, tmp_path: Path
) -> None:
    """An adapter is weights as the model's are: an operator who serves another one must be found."""
    _, found = await ask(torch_world, "/v1/chat/completions", {**CHAT, "model": f"{MODEL}:law", "seed": 4}, stream=True)
    _, plain = await ask(torch_world, "/v1/chat/completions", {**CHAT, "seed": 4}, stream=True)
    receipt = found[0].receipt
    assert (receipt.model, receipt.adapter, len(receipt.adapter_checksum)) == (MODEL, "law", 64)
    assert (receipt.price.price, plain[0].receipt.price.price) == (LAW_PRICE, PRICE)
    assert found[0].output != plain[0].output
    signer = made_or_read(tmp_path / KEY_FILE)
    flipped_token = signed_again(found[0], signer, output=with_another_token(found[0]))
    unknown = signed_again(found[0], signer, adapter="medicine")
    with_adapter = ("--model", str(shallow_dir), "--adapter", f"law={adapter_dir}")
    status, verdicts = await verify(tmp_path, [*found, *plain, flipped_token, unknown], *with_adapter)
    assert (status, [verdict["is_rerun"] for verdict in verdicts]) == (1, [True, True, True, False])
    assert [parts([verdict]) for verdict in verdicts] == [set(), set(), {"tokens"}, set()]
    assert "--adapter medicine=" in verdicts[3]["not_rerun_because"]

    tensors = load_file(adapter_dir / "adapter_model.safetensors")
    for name in tensors:
        tensors[name] = -tensors[name] if ".layers.1." in name and "lora_B" in name else tensors[name]
    flipped_dir = write_peft_adapter(shallow_dir, tmp_path / "flipped", rank=4, tensors=tensors)
    lies = signed_again(found[0], signer, adapter_checksum=adapter_checksum(flipped_dir))
    with_flipped = ("--model", str(shallow_dir), "--adapter", f"law={flipped_dir}")
    status, verdicts = await verify(tmp_path, [*found, lies], *with_flipped)
    assert [parts([verdict]) for verdict in verdicts] == [{"adapter", "tokens"}, {"tokens"}]
    dearer = msgspec.structs.replace(receipt.price, output_nanos=61)
    assert await verified(tmp_path, [signed_again(found[0], signer, price=dearer)]) == (1, {"price"})


@pytest.mark.timeout(360)
async def test_embeddings_are_computed_again_bit_for_bit(
    torch_world: EmbeddingWorld, shallow_dir: Path, tmp_path: Path
) -> None:
    """A vector that was made by a cheaper model looks like any other."""
    texts = ["A loom weaves.", "Cats sleep.", "word " * 90]
    wanted = {"input": texts, "encoding_format": "base64", "pooling": "mean"}
    status, answer = await torch_world.post("/v1/embeddings", RECEIPT, **wanted)
    assert status == 200, answer
    found = bundles_in(json.dumps(answer))
    shown = {entry["embedding"] for entry in answer["data"]}
    assert {bundle.output[0].embedding for bundle in found} == shown
    status, answer = await torch_world.post(
        "/v1/embeddings", RECEIPT, input=texts[0], normalize=False, pooling="last", dimensions=8
    )
    assert status == 200, answer
    found += bundles_in(json.dumps(answer))
    assert [bundle.receipt.cost_nanos for bundle in found] == [
        500 + 10 * (b.receipt.num_prompt_tokens - b.receipt.num_cached_tokens) + b.receipt.num_cached_tokens
        for b in found
    ]
    signer = made_or_read(tmp_path / KEY_FILE)
    altered = with_another_bit(found[0])
    lies = signed_again(found[0], signer, output=altered)
    status, verdicts = await verify(tmp_path, [*found, lies], "--model", str(shallow_dir))
    assert [verdict["is_rerun"] for verdict in verdicts] == [True] * 5, verdicts
    assert [parts([verdict]) for verdict in verdicts] == [set()] * 4 + [{"vector"}]
    assert "1 of 576 dimensions differ, the first at 5" in verdicts[4]["faults"][0]["message"]
    assert await verified(tmp_path, [msgspec.structs.replace(found[0], output=altered)]) == (1, {"output"})
    damaged = tmp_path / "damaged"
    damage(shallow_dir, damaged, layer=1, noise=0.01)
    assert await verified(tmp_path, found[:1], "--model", str(damaged)) == (1, {"weights", "vector"})
    dearer = msgspec.structs.replace(found[0].receipt.price, prompt_nanos=11)
    assert await verified(tmp_path, [signed_again(found[0], signer, price=dearer)]) == (1, {"price"})


@pytest.mark.long
async def test_rankings_come_with_the_receipts_of_their_vectors(
    router_redis_url: str, tokenizer: ModelTokenizer, shallow_dir: Path, tmp_path: Path
) -> None:
    """Scores follow from the vectors, one of each text."""
    configure = configured(tmp_path, model_checksum(shallow_dir))
    async with embedding_world(router_redis_url, tokenizer, sim_engine(), configure=configure) as world:
        _, ranked = await world.post("/v1/rerank", RECEIPT, query="a loom", documents=["a loom", "a cat"])
        _, scored = await world.post("/v1/score", RECEIPT, text_1="a loom", text_2="a cat")
        _, without = await world.post("/v1/score", text_1="a loom", text_2="a cat")
    found = bundles_in(json.dumps(ranked)) + bundles_in(json.dumps(scored))
    assert ("kvloom" in without, len(found)) == (False, 5)
    status, verdicts = await verify(tmp_path, found, "--model", str(shallow_dir), config=SIM)
    assert (status, [verdict["is_rerun"] for verdict in verdicts]) == (0, [True] * 5), verdicts

    status, verdicts = await verify(tmp_path, found[:2], "--model", str(shallow_dir))  # with the torch engine
    assert status == 2, "another engine computes other bits, and that is no proof of anything"
    assert all("cannot be compared" in verdict["not_rerun_because"] for verdict in verdicts)


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


@pytest.mark.timeout(360)
async def test_some_of_many_are_computed_again(torch_world: EmbeddingWorld, shallow_dir: Path, tmp_path: Path) -> None:
    """A sample finds whoever cheats now and then; the same seed takes the same sample. docs/how-to/receipts.md has the
    whole measurement, 50 of 1,000."""
    async with Client(torch_world.fabric.address) as client:
        many = [decode_bundle(receipt) async for receipt in collected(client, MODEL, 60, max_tokens=4, seed=1)]
    chosen = sorted(random.Random(3).sample(range(60), 8))
    signer = made_or_read(tmp_path / KEY_FILE)
    many[chosen[5]] = signed_again(many[chosen[5]], signer, output=with_another_token(many[chosen[5]]))
    missed = next(i for i in range(60) if i not in chosen)
    many[missed] = signed_again(many[missed], signer, output=with_another_token(many[missed]))
    status, verdicts = await verify(tmp_path, many, "--model", str(shallow_dir), "--sample", "8", "--seed", "3")
    assert [i for i, verdict in enumerate(verdicts) if verdict["is_rerun"]] == chosen
    assert (status, [i for i, verdict in enumerate(verdicts) if verdict["faults"]]) == (1, [chosen[5]])


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
