"""TorchEngine around a fake model: what crosses between the event loop and the compute thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvloom_common.config import ShardConfig
from shard_server.engines.base import (
    Capability,
    EngineError,
    EngineRequest,
    Sampling,
    SequenceFinishReason,
    StepOutput,
)
from shard_server.engines.torch_engine.engine import MAX_UNREAD_OUTPUTS, TorchEngine
from tests.fakes.fake_model_runner import VOCAB_SIZE, FakeModelRunner, logits_of

TIMEOUT_SECONDS = 20


class Started:
    """An engine on a fake runner that the test can hold before any step."""

    def __init__(self, **config: Any) -> None:
        self.runner: FakeModelRunner | None = None
        self.go = threading.Event()
        self.go.set()
        self.stepped = threading.Semaphore(0)
        self.before_run: Callable[[list[Any]], None] = lambda batch: None
        config = {"block_size": 4, "num_blocks": 64, "max_batch": 8, "max_waiting": 8} | config
        self.engine = TorchEngine(
            *(Path(), "fake", ShardConfig(**config)), load_runner=self._load, max_loaded_adapters=0
        )

    def _load(self, model_dir: Path, **options: Any) -> Any:
        self.runner = FakeModelRunner(model_dir, **options)
        return self.runner

    def watch(self) -> None:
        """From now on (the engine's warm-up does not count) steps are counted and can be held."""
        assert self.runner is not None
        self.runner.batches.clear()
        self.runner.before_run = self._before_run

    def _before_run(self, batch: list[Any]) -> None:
        self.stepped.release()
        assert self.go.wait(TIMEOUT_SECONDS)
        self.before_run(batch)


@contextlib.asynccontextmanager
async def started(**config: Any) -> AsyncIterator[Started]:
    bench = Started(**config)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        await bench.engine.start()
        bench.watch()
        try:
            yield bench
        finally:
            bench.go.set()
            await bench.engine.close()


def make_request(name: str, max_tokens: int = 5, **changes: Any) -> EngineRequest:
    request = EngineRequest(name, [1, 2, 3], Sampling(temperature=0.0), max_tokens)
    return dataclasses.replace(request, **changes)


async def read_until_end(engine: TorchEngine, *names: str) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    left = set(names)
    async for output in engine.steps():
        outputs.append(output)
        left -= {end.request_id for end in output.ends}
        if not left:
            break
    return outputs


async def read_all(engine: TorchEngine, outputs: list[StepOutput]) -> None:
    async for output in engine.steps():
        outputs.append(output)  # noqa: PERF401  (what came before an error must be kept)


def tokens_of(outputs: list[StepOutput], name: str) -> list[int]:
    return [
        token
        for output in outputs
        for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True)
        if request_id == name
        for token in token_ids
    ]


def greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(tokens).argmax()))
    return tokens[len(prompt) :]


async def test_a_request_is_answered_and_an_idle_engine_wakes_for_the_next() -> None:
    """The whole way there and back, twice, with idleness in between."""
    async with started() as bench:
        for name in ("a", "b"):
            bench.engine.submit(make_request(name))
            outputs = await read_until_end(bench.engine, name)
            assert tokens_of(outputs, name) == greedy([1, 2, 3], 5)
            assert outputs[0].starts[0].request_id == name
            assert outputs[-1].ends[0].reason is SequenceFinishReason.LENGTH


async def test_info_is_what_the_runner_and_the_configuration_say() -> None:
    """Routers plan with it; the window is never larger than what the blocks can hold."""
    async with started(num_blocks=16, max_model_len=400) as bench:
        info = bench.engine.info
        assert (info.engine, info.model, info.block_size, info.num_blocks) == ("torch", "fake", 4, 16)
        assert (info.max_batch, info.max_model_len, info.vocab_size) == (8, 64, VOCAB_SIZE)
        assert info.capabilities == frozenset(Capability) - {
            Capability.GUIDED,
            Capability.STRUCTURAL_TAGS,  # there is no vocabulary
            Capability.RERANK,  # encoders have these three
            Capability.SCORE,
            Capability.CROSS_ENCODE,
            Capability.VISION,
            Capability.ADAPTERS,  # the runner cannot compute with them
            Capability.KV_HANDOFF,
            Capability.HANDOFF_LOGPROBS,
        }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [1] * 250, "max_tokens": 7}, "window"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_token_ids": [VOCAB_SIZE]}, "vocabulary"),
        ({"prompt_token_ids": [-1]}, "vocabulary"),
        ({"output_token_ids": [VOCAB_SIZE]}, "vocabulary"),
        ({"output_token_ids": [1] * 6}, "output tokens"),
        ({"request_id": "live"}, "in use"),
    ],
)
async def test_what_can_never_run_is_refused(changes: dict[str, Any], message: str) -> None:
    """At submit, by name, without harm to what runs."""
    async with started() as bench:
        bench.engine.submit(make_request("live"))
        with pytest.raises(EngineError, match=message):
            bench.engine.submit(dataclasses.replace(make_request("bad"), **changes))
        outputs = await read_until_end(bench.engine, "live")
        assert len(tokens_of(outputs, "live")) == 5


async def test_the_queue_is_bounded() -> None:
    """Every queue is; beyond max_batch + max_waiting a submit is refused."""
    async with started(max_batch=2, max_waiting=3) as bench:
        bench.go.clear()
        for index in range(5):
            bench.engine.submit(make_request(f"r{index}"))
        with pytest.raises(EngineError, match="queued"):
            bench.engine.submit(make_request("one-more"))


async def test_a_cancel_takes_effect_within_two_steps() -> None:
    """From the step in progress when the client left: that one ends, the next begins without the sequence."""
    async with started() as bench:
        bench.engine.submit(make_request("gone", 200))
        bench.engine.submit(make_request("stays", 200, prompt_token_ids=[7, 8]))
        async for output in bench.engine.steps():
            if tokens_of([output], "gone") and tokens_of([output], "stays"):
                break
        bench.go.clear()
        await asyncio.to_thread(bench.stepped.acquire)
        while bench.stepped.acquire(blocking=False):
            pass
        assert bench.runner is not None
        num_batches = len(bench.runner.batches)
        bench.engine.cancel("gone")
        bench.engine.cancel("gone")
        bench.engine.cancel("never-was")
        bench.go.set()
        outputs = await read_until_end(bench.engine, "gone")
        assert outputs[-1].ends[0].reason is SequenceFinishReason.CANCELLED
        assert all(len(batch) == 1 for batch in bench.runner.batches[num_batches + 2 :])
        bench.engine.submit(make_request("gone"))  # the name is free again
        bench.engine.cancel("stays")
        await read_until_end(bench.engine, "gone", "stays")


async def test_an_engine_with_unread_output_pauses() -> None:
    """Unread output is bounded: the engine computes no more than it can deliver, and continues when it is read."""
    async with started() as bench:
        bench.engine.submit(make_request("a", 200))
        for _ in range(MAX_UNREAD_OUTPUTS):
            await asyncio.to_thread(bench.stepped.acquire)
        await asyncio.sleep(0.05)  # sleep: it would run on within microseconds
        assert not bench.stepped.acquire(blocking=False)
        outputs = await read_until_end(bench.engine, "a")
        assert tokens_of(outputs, "a") == greedy([1, 2, 3], 200)


async def test_an_exception_in_a_step_ends_steps_with_an_engine_error() -> None:
    """The shard must learn that its engine is dead, after having got what was computed before."""
    async with started() as bench:

        def explode(batch: list[Any]) -> None:
            if batch[0].num_computed_tokens == 5:
                raise ValueError("broken kernel")

        bench.before_run = explode
        bench.engine.submit(make_request("a", 20))
        outputs: list[StepOutput] = []
        with pytest.raises(EngineError, match="broken kernel"):
            await read_all(bench.engine, outputs)
        assert tokens_of(outputs, "a") == greedy([1, 2, 3], 3)
        with pytest.raises(EngineError, match="no longer running"):
            bench.engine.submit(make_request("b"))


async def test_a_model_that_cannot_be_loaded_fails_start() -> None:
    """With the reason, and close still works."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError("no such directory")

    engine = TorchEngine(Path(), "fake", ShardConfig(), load_runner=refuse)
    with pytest.raises(EngineError, match="no such directory"):
        await engine.start()
    with pytest.raises(EngineError, match="not started"):
        engine.submit(make_request("a"))
    await engine.close()


async def test_close_ends_steps_and_joins_the_thread() -> None:
    """Also in the middle of work, also twice."""
    before = {*threading.enumerate()}
    async with started() as bench:
        bench.engine.submit(make_request("a", 200))
        num_outputs = 0
        async for _ in bench.engine.steps():
            num_outputs += 1
            if num_outputs == 3:
                await bench.engine.close()
        assert num_outputs == 3
        await bench.engine.close()
        assert not [thread for thread in {*threading.enumerate()} - before if thread.name == "torch-engine"]


async def test_close_wakes_a_reader_that_waits() -> None:
    """An idle shard must be able to stop."""
    async with started() as bench:
        reader = asyncio.create_task(read_until_end(bench.engine, "nothing"))
        await asyncio.sleep(0)
        await bench.engine.close()
        assert await reader == []


async def test_many_sequences_from_start_to_end() -> None:
    """Through the thread, more than the batch holds, with reuse: every token is right and none is lost."""
    async with started(max_batch=4, max_waiting=64, num_blocks=40) as bench:
        prompts = {f"r{i}": [5, 6, 7, 8, 9, i + 1, i % 3 + 1] for i in range(24)}
        for name, prompt in prompts.items():
            bench.engine.submit(make_request(name, 12, prompt_token_ids=prompt))
        outputs = await read_until_end(bench.engine, *prompts)
        for name, prompt in prompts.items():
            assert tokens_of(outputs, name) == greedy(prompt, 12)
        assert outputs[-1].load.num_available_blocks == 40
