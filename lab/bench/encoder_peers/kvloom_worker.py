"""Our own engine as a contender of `kvloom-lab bench encoder-peers`: the whole engine, with its queue and pooling."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np

from kvloom_common.config import ShardConfig, TorchConfig
from lab.bench.encoder_peers.onnx_worker import serve
from shard_server.engines.base import EngineRequest, Pooling, PoolingKind, Sampling, StepOutput
from shard_server.engines.torch_engine.engine import TorchEngine


class KvloomEncoder:
    """`settings` are keys of `shard.torch`, as JSON; the others have their defaults."""

    def __init__(self, model_dir: str, num_threads: int, settings: str) -> None:
        torch = msgspec.convert({**json.loads(settings), "num_threads": num_threads}, TorchConfig)
        self._engine = TorchEngine(Path(model_dir), "model", ShardConfig(torch=torch))
        self._runner = asyncio.Runner()
        self._runner.run(self._engine.start())
        self._steps: AsyncIterator[StepOutput] = self._engine.steps()
        self._num_requests = 0
        self.version = f"kvloom {version('kvloom')}, {self._engine.info.description}"

    def run(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Implements `Encoder.run`."""
        return self._runner.run(self._run(texts))

    async def _run(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        places: dict[str, int] = {}
        for place, text in enumerate(texts):
            self._num_requests += 1
            request_id = str(self._num_requests)
            places[request_id] = place
            pooling = Pooling(kind=PoolingKind.MEAN, normalize=True)
            self._engine.submit(EngineRequest(request_id, text, Sampling(), 0, pooling=pooling))
        vectors: dict[int, list[float]] = {}
        while len(vectors) < len(texts):
            for end in (await anext(self._steps)).ends:
                assert end.embedding is not None, end
                vectors[places[end.request_id]] = np.frombuffer(end.embedding, "<f4").tolist()
        return [vectors[place] for place in range(len(texts))]


if __name__ == "__main__":
    serve(lambda: KvloomEncoder(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
