"""Guided decoding on a real model: answers keep to their guides, and no other answers change."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvloom_common.config import ShardConfig, TorchConfig
from kvloom_common.text.tokenizer import ChatMessage, ModelTokenizer
from lab.shallow_model import write_shallow_model
from shard_server.engines.base import (
    Capability,
    EngineError,
    EngineRequest,
    Guide,
    GuideKind,
    Sampling,
    SequenceFinishReason,
)
from shard_server.engines.torch_engine.engine import TorchEngine
from shard_server.engines.torch_engine.sampling.guides import GuideError
from shard_server.engines.torch_engine.sampling.llguidance_guides import CACHED_GUIDES, GuideCompiler
from tests.conformance.engine_driver import EngineDriver

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
NESTED = {
    "type": "array",
    "minItems": 1,
    "maxItems": 2,
    "items": {
        "anyOf": [
            {"type": "boolean"},
            {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"], "additionalProperties": False},
        ]
    },
}


def json_guide(schema: Any) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        value.keys() == {"name", "age", "tags"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 20
        and 0 <= value["age"] <= 150
        and len(value["tags"]) <= 3
        and set(value["tags"]) <= {"red", "green", "blue"}
    )


def is_nested(text: str) -> bool:
    return all(item in (True, False) or item == {"x": None} for item in json.loads(text)) and len(json.loads(text)) <= 2


CALL_BEGIN, CALL_END = '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"
"""A call as strict tools guide it; the second tool's schema refers to itself."""
TREE = {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}
PERSON_TEXT = '{"name": "Ann", "age": 3, "tags": ["red"]}'


def tags_guide() -> Guide:
    tags = [
        {"begin": CALL_BEGIN, "json_schema": json.dumps(PERSON), "end": CALL_END},
        {"begin": CALL_BEGIN.replace('"f"', '"g"'), "json_schema": json.dumps(TREE), "end": CALL_END},
    ]
    return Guide(GuideKind.STRUCTURAL_TAGS, json.dumps({"tags": tags, "triggers": ["<tool_call>"]}))


GUIDES = {
    "schema": (json_guide(PERSON), is_person),
    "nested": (json_guide(NESTED), is_nested),
    "regex": (
        Guide(GuideKind.REGEX, r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
        lambda text: re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text),
    ),
    "choice": (
        Guide(GuideKind.CHOICE, '["Paris", "日本 \\"x\\"", "no\\n"]'),
        lambda text: text in ("Paris", '日本 "x"', "no\n"),
    ),
    "grammar": (
        Guide(GuideKind.GRAMMAR, 'start: sum\nsum: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[1-9][0-9]{0,2}/'),
        lambda text: re.fullmatch(r"[1-9]\d{0,2}(\+[1-9]\d{0,2}){1,3}", text),
    ),
}


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Iterator[ModelTokenizer]:
    loaded = ModelTokenizer.load(model_dir)
    yield loaded
    loaded.close()


@pytest.fixture(
    scope="module", params=[pytest.param(2, id="2 layers"), pytest.param(0, id="all layers", marks=pytest.mark.long)]
)
def own_model_dir(request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, or its first layers: a guide holds whatever they would say."""
    if not request.param:
        return model_dir
    return write_shallow_model(model_dir, tmp_path_factory.mktemp("shallow") / "model", request.param)


@pytest.fixture(scope="module")
def compiler(model_dir: Path) -> GuideCompiler:
    return GuideCompiler(model_dir / "tokenizer.json", 49152, [0, 2])


@pytest.fixture
async def driver(own_model_dir: Path, load_runner: Callable[..., Any]) -> AsyncIterator[EngineDriver]:
    # A start computes the largest portion of a prompt several times: a small one.
    sizes: dict[str, Any] = {
        "num_blocks": 256,
        "max_model_len": 512,
        "max_batch": 24,
        "max_prefill_tokens_per_step": 64,
    }
    config = ShardConfig(torch=TorchConfig(num_threads=1), **sizes)
    engine = TorchEngine(own_model_dir, "m", config, load_runner=load_runner)
    await engine.start()
    yield EngineDriver(engine)
    await engine.close()


class Prompts:
    """Requests about something, each with a name of its own."""

    def __init__(self, tokenizer: ModelTokenizer, driver: EngineDriver) -> None:
        self.tokenizer = tokenizer
        self.stop = driver.engine.info.eos_token_ids
        self.number = 0

    def request(
        self, guide: Guide | None, *, temperature: float = 0.0, max_tokens: int = 120, **changes: Any
    ) -> EngineRequest:
        self.number += 1
        question = changes.pop("question", "Describe a person as JSON.")
        prompt = self.tokenizer.encode_now(self.tokenizer.render_chat([ChatMessage("user", question)]))
        sampling = changes.pop("sampling", Sampling(temperature=temperature, seed=self.number))
        return EngineRequest(
            f"r{self.number}", prompt, sampling, max_tokens, stop_token_ids=self.stop, guide=guide, **changes
        )


@pytest.fixture
def prompts(tokenizer: ModelTokenizer, driver: EngineDriver) -> Prompts:
    return Prompts(tokenizer, driver)


async def test_answers_keep_to_every_kind_of_guide(driver: EngineDriver, prompts: Prompts) -> None:
    """At temperature 0 and at high ones, all together in one batch, beside unguided ones: what ends by itself satisfies
    its guide, what max_tokens cuts off does not end in a stop token."""
    assert Capability.GUIDED in driver.engine.info.capabilities
    jobs = [
        (prompts.request(guide, temperature=temperature), check)
        for guide, check in GUIDES.values()
        for temperature in (0.0, 0.0, 1.0, 1.6)
    ]
    free = [prompts.request(None, temperature=1.0, max_tokens=40) for _ in range(4)]
    await driver.run(*(request for request, _ in jobs), *free)
    num_ended = 0
    for request, check in jobs:
        tokens = driver.tokens[request.request_id]
        text = prompts.tokenizer.decode(tokens)
        if driver.ends[request.request_id] is SequenceFinishReason.STOP:
            num_ended += 1
            assert tokens[-1] in request.stop_token_ids
            assert check(text), text
        else:
            assert driver.ends[request.request_id] is SequenceFinishReason.LENGTH
            assert not set(tokens) & request.stop_token_ids
    assert num_ended >= len(jobs) - 3


async def test_guided_neighbours_change_nothing(driver: EngineDriver, prompts: Prompts) -> None:
    """Batch invariance: tokens and logprobs of an unguided answer are the same bits beside guided ones, and a guided
    answer's are the same alone."""
    sampling = Sampling(temperature=0.9, seed=11, num_logprobs=2, frequency_penalty=0.2)
    free = prompts.request(None, sampling=sampling, max_tokens=30)
    guided = prompts.request(GUIDES["schema"][0], sampling=sampling, max_tokens=60)
    await driver.run(free)
    await driver.run(guided)
    alone = {name: (driver.tokens[name], driver.logprobs[name]) for name in (free.request_id, guided.request_id)}
    twins = {
        request.request_id: dataclasses.replace(request, request_id=f"{request.request_id}-again")
        for request in (free, guided)
    }
    crowd = [prompts.request(guide, temperature=1.0, max_tokens=20) for guide, _ in GUIDES.values()]
    await driver.run(*crowd, *twins.values())
    for name, twin in twins.items():
        assert (driver.tokens[twin.request_id], driver.logprobs[twin.request_id]) == alone[name]


async def test_a_guide_goes_on_after_a_failover(driver: EngineDriver, prompts: Prompts) -> None:
    """Resumed from any prefix of its output, the answer ends as it would have."""
    guide, check = GUIDES["schema"]
    whole = prompts.request(guide, temperature=1.0)
    [tokens] = await driver.run(whole)
    assert check(prompts.tokenizer.decode(tokens))
    cuts = sorted(random.Random(1).sample(range(1, len(tokens)), 5))
    resumed = [dataclasses.replace(whole, request_id=f"cut-{cut}", output_token_ids=tokens[:cut]) for cut in cuts]
    rests = await driver.run(*resumed)
    assert rests == [tokens[cut:] for cut in cuts]


async def test_output_that_left_the_guide_is_refused(driver: EngineDriver, prompts: Prompts) -> None:
    """A client that resumes with it has mixed up two requests."""
    request = prompts.request(GUIDES["regex"][0], output_token_ids=prompts.tokenizer.encode_now("hello"))
    driver.engine.submit(request)
    refusals: list[str] = []
    while not refusals:
        refusals = [end.refusal for end in (await driver.step()).ends]
    assert refusals == ["the output so far does not follow the guide"]


BAD_GUIDES = [
    (json_guide({"type": "what"}), "the root: 'type'"),
    (json_guide({"not": {}}), "the root: 'not' cannot be enforced"),
    (json_guide({"properties": {"ids": {"items": {"pattern": "(?=a)"}}}}), "properties.ids.items: 'pattern'"),
    (json_guide({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "'$ref' refers to itself"),
    (json_guide({"$ref": "file:///etc/hostname"}), "'$ref' names 'file:///etc/hostname'"),
    (Guide(GuideKind.REGEX, "(a"), "regex"),
    (Guide(GuideKind.REGEX, r"[^\x00-\x{10FFFF}]"), "no text follows it"),
    (Guide(GuideKind.GRAMMAR, "start: missing"), "missing"),
    (Guide(GuideKind.GRAMMAR, "start: " + "(" * 2000 + '"a"' + ")" * 2000), "nested"),
]


async def test_guides_that_cannot_be_compiled_end_their_requests_alone(driver: EngineDriver, prompts: Prompts) -> None:
    """The clients read why; the engine and the others continue."""
    bad = [(prompts.request(guide), words) for guide, words in BAD_GUIDES]
    good = prompts.request(None, max_tokens=5)
    for request in (*(request for request, _ in bad), good):
        driver.engine.submit(request)
    refusals: dict[str, str] = {}
    while len(refusals) < len(bad) or good.request_id not in driver.ends:
        refusals |= {end.request_id: end.refusal for end in (await driver.step()).ends if end.refusal}
    for request, words in bad:
        assert words in refusals[request.request_id]
        assert len(refusals[request.request_id]) <= 200
        assert driver.ends[request.request_id] is SequenceFinishReason.ERROR
    assert len(driver.tokens[good.request_id]) == 5


async def test_a_cancel_reaches_a_request_whose_guide_is_being_compiled(driver: EngineDriver, prompts: Prompts) -> None:
    """It must end once, as cancelled, however far the compiler is."""
    slow = Guide(GuideKind.JSON_SCHEMA, json.dumps({"type": "integer", "multipleOf": 65537}))
    requests = [prompts.request(slow, max_tokens=5) for _ in range(4)]
    for request in requests:
        driver.engine.submit(request)
        driver.engine.cancel(request.request_id)
    await driver.step_until(lambda: all(request.request_id in driver.ends for request in requests))
    assert {driver.ends[request.request_id] for request in requests} == {SequenceFinishReason.CANCELLED}


async def test_stop_tokens_of_the_client_wait_for_the_guide(driver: EngineDriver, prompts: Prompts) -> None:
    """An ordinary token that also occurs inside the answer must not cut it off in the middle."""
    digit = prompts.tokenizer.encode_now("7")[0]
    request = prompts.request(Guide(GuideKind.REGEX, r"[0-9]{6}7?"), temperature=1.5)
    request = dataclasses.replace(request, stop_token_ids=request.stop_token_ids | {digit})
    [tokens] = await driver.run(request)
    text = prompts.tokenizer.decode([token for token in tokens if token not in driver.engine.info.eos_token_ids])
    assert re.fullmatch(r"[0-689]{6}7?", text)


async def test_without_an_end_token_a_complete_answer_still_ends(driver: EngineDriver, prompts: Prompts) -> None:
    """ignore_eos: nothing can follow, so the sequence must not run on to max_tokens."""
    request = dataclasses.replace(prompts.request(GUIDES["choice"][0]), stop_token_ids=frozenset())
    await driver.run(request)
    assert driver.ends[request.request_id] is SequenceFinishReason.STOP


async def test_structures_in_answers_are_whole_and_continue(driver: EngineDriver, prompts: Prompts) -> None:
    """What the model begins conforms to the schema, and an answer that continues on another shard in the middle of a
    structure becomes the same."""
    tag = {"begin": '{"person": ', "json_schema": json.dumps(PERSON), "end": "}"}
    guide = Guide(GuideKind.STRUCTURAL_TAGS, json.dumps({"tags": [tag], "triggers": ["{"]}))
    # Whether a model as small as this one begins a structure by itself depends on the last bits of its arithmetic.
    begun = prompts.tokenizer.encode_now("{")
    requests = [
        prompts.request(guide, temperature=temperature, max_tokens=120, output_token_ids=begun)
        for temperature in (0.0, 0.3, 0.7, 1.0, 1.0, 1.0)
    ]
    await driver.run(*requests)
    num_whole = 0
    for request in requests:
        text = prompts.tokenizer.decode([*begun, *driver.tokens[request.request_id]])
        _, *structures = text.split('{"person": ')
        for structure in structures:
            arguments, end, _ = structure.partition("}}")
            assert end or structure == structures[-1], text
            num_whole += bool(end)
            assert not end or is_person(arguments + "}"), text
    assert num_whole
    whole = [*begun, *driver.tokens[requests[0].request_id]]
    for cut in (2, len(whole) // 2):
        again = dataclasses.replace(requests[0], request_id=f"again-{cut}", output_token_ids=whole[:cut])
        await driver.run(again)
        assert [*whole[:cut], *driver.tokens[again.request_id]] == whole


async def test_an_engine_without_a_vocabulary_refuses_guides(tmp_path: Path) -> None:
    """It must not answer as if there were none."""
    from tests.fakes.tiny_llama import write_tiny_llama

    engine = TorchEngine(write_tiny_llama(tmp_path), "m", ShardConfig(num_blocks=16, max_model_len=64))
    await engine.start()
    assert Capability.GUIDED not in engine.info.capabilities
    with pytest.raises(EngineError, match="guided decoding"):
        engine.submit(EngineRequest("r", [1], Sampling(), 1, guide=GUIDES["regex"][0]))
    await engine.close()


def test_compiled_guides_are_kept_for_each_tenant_by_itself(model_dir: Path) -> None:
    """How long a schema takes to compile must not tell whether another tenant has sent it, and one tenant's schemas do
    not evict another's."""
    compiler = GuideCompiler(model_dir / "tokenizer.json", 49152, [0, 2])
    guide = json_guide(PERSON)
    compiler.start(guide, [0, 2], scope=1)
    assert compiler._cache.get(1, guide) is not None
    assert compiler._cache.get(2, guide) is None
    compiler.start(guide, [0, 2], scope=2)
    assert compiler._cache.get(1, guide) is not compiler._cache.get(2, guide)
    for number in range(CACHED_GUIDES + 20):
        compiler.start(Guide(GuideKind.CHOICE, json.dumps([str(number)])), [0, 2], scope=3)
    assert compiler._cache.get(1, guide) is not None
    assert len(compiler._cache) == CACHED_GUIDES


async def test_an_engine_keeps_guides_apart_as_it_does_prompts(driver: EngineDriver, prompts: Prompts) -> None:
    """The root hash is what separates tenants in an engine."""
    guide = Guide(GuideKind.CHOICE, json.dumps(["only here"]))
    request = dataclasses.replace(prompts.request(guide, max_tokens=5), root_hash=7)
    await driver.run(request)
    engine = driver.engine
    assert isinstance(engine, TorchEngine)
    assert engine._guides is not None
    assert engine._guides._cache.get(7, guide) is not None
    assert engine._guides._cache.get(8, guide) is None


async def test_guides_are_compiled_in_turns(driver: EngineDriver, prompts: Prompts) -> None:
    """However many slow guides one tenant has sent, another's is compiled meanwhile."""
    engine, done = driver.engine, threading.Event()
    assert isinstance(engine, TorchEngine)
    slow = [engine._compiling.submit("flood", lambda: done.wait(60)) for _ in range(8)]
    request = prompts.request(Guide(GuideKind.CHOICE, json.dumps(["calm"])), max_tokens=5)
    await driver.run(dataclasses.replace(request, tenant="calm"))
    assert not any(one.done() for one in slow)
    done.set()
    assert all(one.result(60) for one in slow)


def test_compiled_guides_are_kept_up_to_a_bound(model_dir: Path) -> None:
    """Everybody may send a schema of his own; memory must not grow with them."""
    compiler = GuideCompiler(model_dir / "tokenizer.json", 49152, [0, 2])
    for number in range(CACHED_GUIDES + 20):
        compiler.start(Guide(GuideKind.CHOICE, json.dumps([str(number)])), [0, 2])
    assert len(compiler._cache) == CACHED_GUIDES
    with pytest.raises(GuideError):
        compiler.start(Guide(GuideKind.REGEX, "("), [0, 2])
    one, two = (compiler.start(GUIDES["choice"][0], [0, 2]) for _ in range(2))
    token = next(i for i in range(49152) if one.mask()[i >> 3] >> (i & 7) & 1)
    before = two.mask().copy()
    one.take([token])
    assert (two.mask() == before).all(), "sequences share a compiled guide, not their place in it"


@pytest.mark.parametrize("is_special", [False, True])
def test_structures_stand_in_free_text(model_dir: Path, tmp_path: Path, is_special: bool) -> None:
    """Strict tools: the model may write what it likes, but what begins as a call is one, be its marker a special token
    or spelled out; and other special tokens stay free."""
    plain = tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    if is_special:
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    compiler = GuideCompiler(path, tokenizer.get_vocab_size(), [0, 2])

    def allowed(text: str, writer: Tokenizer) -> tuple[str, bool]:
        """The part of the text that the guide allows, and whether the answer may end there."""
        state, ids = compiler.start(tags_guide(), [0, 2]), writer.encode(text).ids
        taken = 0
        while taken < len(ids) and state.take(ids[taken : taken + 1]):
            taken += 1
        may_end = taken == len(ids) and bool(state.mask()[0] & 1)
        return writer.decode(ids[:taken], skip_special_tokens=False), may_end

    call = CALL_BEGIN + PERSON_TEXT + CALL_END
    tree = call.replace('"f"', '"g"').replace(PERSON_TEXT, '{"child": {"child": {}}}')
    for writer in (plain, tokenizer):
        for text in ("", "hello", f"Look:\n{call}", f"{call}\n{tree} and {call} done", "a < b <tool", "<|im_start|>x"):
            assert allowed(text, writer) == (text, True), text
        assert allowed(call[:-5], writer)[1] is False
        for text in ("a <tool_call> b", "<tool_call>{", call.replace('"age"', '"size"'), call.replace('"f"', '"h"')):
            assert allowed(text, writer)[0] != text, text
        assert not allowed(tree.replace("{}", "[]"), writer)[0].endswith("</tool_call>")


def test_choices_are_taken_letter_by_letter(tokenizer: ModelTokenizer, compiler: GuideCompiler) -> None:
    """Nothing in a choice is a pattern: a dot is a dot, and a special token's name is text."""
    for choice in ("a.c", "[x]*", 'tab\t"q" \\\\ /x/ #&~-', "日本\u2028", "{1,2}|()^$?+"):
        state = compiler.start(Guide(GuideKind.CHOICE, json.dumps([choice, "zz"], ensure_ascii=False)), [0, 2])
        assert state.take(tokenizer.encode_now(choice)), choice
        assert state.mask()[0] & 1, "the end of the sequence may follow"
        wrong = compiler.start(Guide(GuideKind.CHOICE, json.dumps([choice])), [0, 2])
        assert not wrong.take(tokenizer.encode_now("axc"))


def test_an_answer_in_json_cannot_lose_itself_in_white_space(
    tokenizer: ModelTokenizer, compiler: GuideCompiler
) -> None:
    """JSON allows any amount of it, of which small models draw more and more until their tokens are used up; compact,
    on one line, and indented are all there is to say."""
    person = {"name": "Al", "age": 3, "tags": ["red", "blue"]}
    compact = json.dumps(person, separators=(",", ":"))
    for text in (compact, json.dumps(person), json.dumps(person, indent=2), json.dumps(person, indent="\t")):
        state = compiler.start(json_guide(PERSON), [0, 2])
        assert state.take(tokenizer.encode_now(text)), text
        assert state.mask()[0] & 1, "it is complete"
    for text in ("{" + 40 * " ", "{" + 40 * "\n", "{" + 20 * " \n"):
        assert not compiler.start(json_guide(PERSON), [0, 2]).take(tokenizer.encode_now(text))


@pytest.mark.parametrize("kind", [GuideKind.JSON_SCHEMA, GuideKind.STRUCTURAL_TAGS])
def test_an_answer_in_json_has_no_properties_that_its_schema_does_not_mention(
    tokenizer: ModelTokenizer, compiler: GuideCompiler, kind: GuideKind
) -> None:
    """Clients leave `additionalProperties` out, and small models then added properties until their tokens were used
    up."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    for more, closes in (({}, True), ({"additionalProperties": True}, False)):
        text = json.dumps(schema | more)
        tags = {"tags": [{"begin": "@", "json_schema": text, "end": ""}], "triggers": ["@"]}
        begin = "@" if kind is GuideKind.STRUCTURAL_TAGS else ""
        guide = Guide(kind, json.dumps(tags) if begin else text)
        assert compiler.start(guide, [0, 2]).take(tokenizer.encode_now(begin + '{"city": "Oslo"}'))
        longer = tokenizer.encode_now(begin + '{"city": "Oslo", "size": 1}')
        assert compiler.start(guide, [0, 2]).take(longer) is not closes
