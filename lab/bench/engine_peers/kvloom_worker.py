"""Our own engine as a contender of `kvloom-lab bench engine-peers`: measured like the others, in its own process."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from kvloom_common.config import ShardConfig, TorchConfig
from lab.bench.engine_peers.worker import serve
from shard_server.engines.base import EngineRequest, Sampling, StepOutput
from shard_server.engines.torch_engine.engine import TorchEngine

_WINDOW = 2048
"""The context window that the others have."""
_NUM_BLOCKS = 640
"""10,240 tokens: a third more than the largest batch needs. Blocks cached for later prompts count as memory, and no
prompt comes twice."""


class KvloomDriver:
    """`settings` are keys of `shard.torch`, as JSON; the others have their defaults."""

    def __init__(self, model_dir: str, num_threads: int, max_batch: int, settings: str) -> None:
        torch = msgspec.convert({**json.loads(settings), "num_threads": num_threads}, TorchConfig)
        config = ShardConfig(torch=torch, max_batch=max_batch, max_model_len=_WINDOW, num_blocks=_NUM_BLOCKS)
        self._engine = TorchEngine(Path(model_dir), "model", config)
        self._runner = asyncio.Runner()
        self._runner.run(self._engine.start())
        self._steps: AsyncIterator[StepOutput] = self._engine.steps()
        self._num_requests = 0
        # Without the speeds of the warm-up, which is not what is compared here.
        self.version = f"kvloom {version('kvloom')}, {self._engine.info.description.partition(' threads')[0]} threads"

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[float]]:
        """Implements `Driver.run`."""
        return self._runner.run(self._run(prompts, max_tokens))

    async def _run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[float]]:
        times: dict[str, list[float]] = {}
        for prompt in prompts:
            self._num_requests += 1
            request_id = str(self._num_requests)
            times[request_id] = []
            self._engine.submit(EngineRequest(request_id, prompt, Sampling(temperature=0.0), max_tokens))
        num_ended = 0
        while num_ended < len(prompts):
            output = await anext(self._steps)
            now = time.perf_counter()
            num_ended += len(output.ends)
            for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
                times[request_id] += [now] * len(token_ids)
        return list(times.values())


if __name__ == "__main__":
    serve(lambda: KvloomDriver(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
