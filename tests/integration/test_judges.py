"""Models of the fabric judge prompts. What they do not say for certain, and in time, is not taken for a yes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from safety_svc.guardrails import FAILURES_TO_OPEN
from safety_svc.metrics import FLAGS
from shard_server.engines.base import EngineRequest, SequenceEnd, SequenceFinishReason, StepOutput
from tests.fakes.screened_world import ScreenedWorld, WritingEngine, screened_world, showing_tokenizer
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

POLICY = "JUDGE BY THIS POLICY"
NUM_TURNS = 6
BLOCK = 16
"""Tokens in a block of the cache."""


class JudgingEngine(WritingEngine):
    """One model for both: of prompts with the policy it says if they have the word `bad`, or misbehaves."""

    def __init__(self) -> None:
        self.tokenizer = showing_tokenizer()
        super().__init__(self.tokenizer)
        self.fault = ""
        self.reply = "fine"
        self.judged: list[str] = []
        self.requests: list[EngineRequest] = []
        self.answered: list[str] = []

    def submit(self, request: EngineRequest) -> None:
        prompt = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        if POLICY not in prompt:
            self.answered.append(prompt)
            self.answer = self.tokenizer.encode_now(self.reply)
            super().submit(request)
            return
        self.judged.append(prompt)
        self.requests.append(request)
        text = '{"violation": 1}' if "bad" in prompt else '{"violation": 0}'
        match self.fault:
            case "hang":
                return
            case "fail":
                self.put(StepOutput(ends=[SequenceEnd(request.request_id, SequenceFinishReason.ERROR)]))
                return
            case "garble":
                text = "It depends."
        self.answer = self.tokenizer.encode_now(text)
        super().submit(request)


@contextlib.asynccontextmanager
async def fabric(
    redis_url: str,
    folder: Path,
    on_failure: str = "refuse",
    mode: str = "gate",
    model: str = "tiny",
    applies_to: Sequence[str] = ("prompt",),
    timeout_seconds: float = 10.0,
) -> AsyncIterator[tuple[ScreenedWorld, JudgingEngine]]:
    (folder / "policy.toml").write_text(
        f'[[rules]]\nname = "guard"\nkind = "judge"\nmessage = "The judge says no."\nmodel = "{model}"\n'
        f'format = "gpt_oss_safeguard"\npolicy = "{POLICY}"\ntimeout_seconds = {timeout_seconds}\n'
        f"applies_to = {json.dumps(applies_to)}\n"
        f'mode = "{mode}"\non_failure = "{on_failure}"\n[[rules]]\nname = "own"\nphrases = ["own word"]\n'
    )
    engine = JudgingEngine()
    async with screened_world(redis_url, folder / "policy.toml", engine) as world:
        yield world, engine


async def chat(world: ScreenedWorld, text: str) -> tuple[int, str]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    status, answer = await world.post("/v1/chat/completions", body)
    error = json.loads(answer).get("error")
    return status, "" if error is None else error["code"]


async def test_a_model_judges_prompts(router_redis_url: str, tmp_path: Path) -> None:
    """It reads the rendered prompt, after our own rules; its own requests are judged by nobody, and on no bill. The
    same model may be judge and judged, however many ask at a time."""
    async with fabric(router_redis_url, tmp_path) as (world, engine):
        assert await chat(world, "good") == (200, "")
        assert await chat(world, "bad") == (400, "content_filter")
        assert await chat(world, "own word") == (400, "content_filter")
        assert len(engine.judged) == 2
        assert engine.answered[0] in engine.judged[0]
        outcomes = await asyncio.gather(*(chat(world, text) for text in ("good", "bad") * 8))
        assert outcomes == [(200, ""), (400, "content_filter")] * 8
        assert len(engine.judged) == 2 + 16
        counted = [sample for family in world.router.metrics.collect() for sample in family.samples]
        ended = sum(one.value for one in counted if one.name == "kvloom_router_requests_total")
        assert ended == 3 + 16


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens the beginnings have in common."""
    return next(i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])


async def test_a_verdict_computes_what_is_new_in_the_conversation(router_redis_url: str, tmp_path: Path) -> None:
    """The judge reads each turn behind the same words as the last one, and in one cache, so that only what is new, the
    end of its template and a part of a block are computed."""
    messages: list[dict[str, str]] = []
    async with fabric(router_redis_url, tmp_path) as (world, engine):
        for turn in range(NUM_TURNS):
            messages += [{"role": role, "content": f"{role} {turn} " * 15} for role in ("assistant", "user")]
            status, answer = await world.post("/v1/chat/completions", {"model": "tiny", "messages": messages})
            assert status == 200, answer
    assert len({request.root_hash for request in engine.requests}) == 1
    read = [list(request.prompt_token_ids) for request in engine.requests]
    computed = [len(now) - num_common(before, now) // BLOCK * BLOCK for before, now in pairwise(read)]
    new = [len(now) - len(before) for before, now in pairwise(read)]
    end = len(world.tokenizer.encode_now("<|im_end|>\n<|im_start|>assistant\n"))
    assert all(own <= more + 2 * end + BLOCK for own, more in zip(computed, new, strict=True))


@pytest.mark.parametrize(("on_failure", "outcome"), [("refuse", (503, "safety_unavailable")), ("allow", (200, ""))])
async def test_a_judge_that_fails(
    router_redis_url: str, tmp_path: Path, on_failure: str, outcome: tuple[int, str]
) -> None:
    """Garbled, failed, hung: fail closed means closed, also where the fabric lets texts through without a safety
    service. What a text may cause opens no breaker; what hangs does, and is asked again later."""
    async with fabric(router_redis_url, tmp_path, on_failure, timeout_seconds=0.5) as (world, engine):
        world.router.server._core._verdicts._safety_required = False
        engine.fault = "garble"
        for _ in range(FAILURES_TO_OPEN + 1):
            assert await chat(world, "good") == outcome
        engine.fault = ""
        assert await chat(world, "good") == (200, "")
        engine.fault = "fail"
        for _ in range(FAILURES_TO_OPEN - 1):
            assert await chat(world, "good") == outcome
        engine.fault = "hang"
        assert await chat(world, "good") == outcome
        asked = len(engine.judged)
        engine.fault = ""
        assert await chat(world, "good") == outcome
        assert len(engine.judged) == asked
        assert await chat(world, "own word") == (400, "content_filter")


@pytest.mark.parametrize(("on_failure", "outcome"), [("refuse", (503, "safety_unavailable")), ("allow", (200, ""))])
async def test_a_judge_that_dies(
    router_redis_url: str, tmp_path: Path, on_failure: str, outcome: tuple[int, str]
) -> None:
    """Its process ends while it judges. The answer is there already, and waits for nothing but the verdict."""
    async with fabric(router_redis_url, tmp_path, on_failure, timeout_seconds=0.2) as (world, engine):
        engine.fault = "hang"
        asked = asyncio.create_task(chat(world, "good"))
        await eventually(lambda: engine.judged and engine.answered, "the judgement's beginning")
        await world.stop_shard()
        assert await asked == outcome


async def test_a_judge_that_is_not_there(router_redis_url: str, tmp_path: Path) -> None:
    """No shard serves it, or none any more: closed at once, and not only at the deadline."""
    async with fabric(router_redis_url, tmp_path, model="nobody") as (world, _):
        assert await chat(world, "good") == (503, "safety_unavailable")


async def test_a_judge_that_is_only_watched(router_redis_url: str, tmp_path: Path) -> None:
    """Its verdicts are noted; its failures change nothing."""
    async with fabric(router_redis_url, tmp_path, mode="monitor") as (world, engine):
        assert await chat(world, "bad") == (200, "")
        engine.fault = "garble"
        assert await chat(world, "bad") == (200, "")


async def test_answers_are_watched(router_redis_url: str, tmp_path: Path) -> None:
    """Once they have ended, and without delaying them; what is found is noted as of an answer."""
    flags = FLAGS.labels("answer", "guard")
    before = flags.total
    async with fabric(router_redis_url, tmp_path, mode="monitor", applies_to=("prompt", "answer")) as (world, engine):
        assert await chat(world, "good") == (200, "")
        engine.reply = "a bad answer"
        assert await chat(world, "good") == (200, "")
        await eventually(lambda: flags.total == before + 1, "the flag")
        assert len(engine.judged) == 4
        [judged] = [prompt for prompt in engine.judged if "a bad answer" in prompt]
        assert "good" not in judged
