"""Models that engines of several tests compute with, one after another: loading one is most of an engine's start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shard_server.engines.torch_engine.model_runner import ModelRunner

MAX_IDLE = 2
"""So many are kept: each holds its weights and its KV blocks."""


class LoadedModels:
    """A new engine on a lent model has everything of its own but the weights and the memory of the KV blocks; what an
    earlier engine left in those must not matter to it anyway."""

    def __init__(self) -> None:
        self._idle: list[tuple[object, ModelRunner]] = []
        """The last used come first."""

    @contextlib.contextmanager
    def lending(self) -> Iterator[Callable[..., ModelRunner]]:
        """What TorchEngine takes as `load_runner`; every call gives another runner, until the end of the context. By
        then the engines must be closed."""
        lent: list[tuple[object, ModelRunner]] = []

        def load_runner(
            model_dir: Path, *, num_threads: int, on_progress: Callable[[str], None], **options: Any
        ) -> ModelRunner:
            key = (model_dir, num_threads, sorted(options.items()))
            runner = self._taken(key)
            if runner is None:
                runner = ModelRunner(model_dir, num_threads=num_threads, on_progress=on_progress, **options)
            else:
                torch.set_num_threads(num_threads)  # of this thread: another one has loaded the model
            lent.append((key, runner))
            return runner

        try:
            yield load_runner
        finally:
            self._idle = [*lent, *self._idle][:MAX_IDLE]
            # pytest keeps the instance of every test, which may have kept `load_runner`, until the end of the run.
            lent.clear()

    def _taken(self, key: object) -> ModelRunner | None:
        for index, (idle_key, runner) in enumerate(self._idle):
            if idle_key == key:
                del self._idle[index]
                return runner
        return None
