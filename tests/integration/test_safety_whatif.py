"""What `kvloom safety whatif` says of a policy is what happens once that policy is in force."""

from __future__ import annotations

import json
import random
from pathlib import Path

import grpc
import msgspec
from google.protobuf import json_format

from kvloom.v1.router_service_pb2 import GenerateRequest
from safety_svc.policy import load_policy
from safety_svc.whatif import LoggedRequest, SeenByClient
from tests.examples import num_examples
from tests.fakes.screened_world import ScreenedWorld, WritingEngine, screened_world, showing_tokenizer
from tools.safety.command import PolicyReport

pytest_plugins = ("tests.fakes.router_fixtures",)

RULES = """
[[rules]]
name = "codes"
phrases = ["launch code", "zebra"]
confusables = true
mode = "%(mode)s"

[[rules]]
name = "key"
patterns = ['AKIA[0-9A-Z]{16}']
prefixes = ["AKIA"]
max_length = 20
mode = "%(mode)s"

[[rules]]
name = "card"
kind = "pii"
finds = "card"
mode = "%(mode)s"
"""
WORDS = ("the", "launch", "code", "l\u0430unch", "c0de", "zebra", "AKIA", "AKIA0123456789ABCDEF", "4111 1111 1111 1111")
MORE = ("is", "fine", "r\\u0061", "la\u200bunch", "\U0001f642", "4111 1111 1111 1112", "codec", "Launch")
NUM_REQUESTS = num_examples(40)


def some_text(rng: random.Random) -> str:
    return " ".join(rng.choice(rng.choice((WORDS, MORE, MORE))) for _ in range(rng.randint(1, 6)))


async def ask(world: ScreenedWorld, engine: WritingEngine, prompt: str, answer: str) -> LoggedRequest:
    """The request as a client records it: the answer's parts, and what became of it."""
    engine.answer = world.tokenizer.encode_now(answer)
    stub = await world.router.stub()
    wanted = json_format.ParseDict({"model": "tiny", "text": prompt, "stop": {"max_tokens": 200}}, GenerateRequest())
    parts: list[str] = []
    is_cut = False
    try:
        async for response in stub.Generate(wanted):
            for delta in response.deltas:
                parts += [delta.text] if delta.text else []
                is_cut |= delta.HasField("finish") and "CONTENT_FILTER" in str(delta.finish)
    except grpc.aio.AioRpcError:
        return LoggedRequest(prompt=prompt, answers=(answer,), happened=SeenByClient(refused=True))
    cut_at = len("".join(parts)) if is_cut else None
    return LoggedRequest(prompt=prompt, answers=(tuple(parts),), happened=SeenByClient(cut_at=(cut_at,)))


async def test_a_policy_that_is_switched_on_does_what_was_said_of_it(router_redis_url: str, tmp_path: Path) -> None:
    """The log comes from a fabric whose rules only watch. Then the rules are switched on in the running fabric, and the
    same prompts and answers are judged live: no request ends in another way, and no answer at another character."""
    rng, rules = random.Random(7), tmp_path / "policy.toml"
    rules.write_text(RULES % {"mode": "monitor"})
    engine = WritingEngine(showing_tokenizer())
    async with screened_world(router_redis_url, rules, engine) as world:
        log = [await ask(world, engine, some_text(rng), some_text(rng)) for _ in range(NUM_REQUESTS)]
        assert not any(request.happened.refused for request in log)
        rules.write_text(RULES % {"mode": "gate"})
        await world.change_policy()
        live = [await ask(world, engine, request.prompt, "".join(request.answers[0])) for request in log]
    report = PolicyReport(load_policy(rules), masks_prompts=False)
    for line, (logged, happened) in enumerate(zip(log, live, strict=True), 1):
        report.add(line, msgspec.structs.replace(logged, happened=happened.happened))
    effects = {each.effect for each in report.counts}
    assert effects == {"refused", "cut"}, report.counts
    assert not report.changed, json.dumps(msgspec.to_builtins(report.changed))
