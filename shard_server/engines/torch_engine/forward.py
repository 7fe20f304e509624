"""A forward pass over one step's rows, with torch's operators or with compiled kernels (compiled_forward.py)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from shard_server.engines.torch_engine.attention import GRAINS, Extent, PagedAttention
from shard_server.engines.torch_engine.checkpoint.weights import OnProgress
from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.invariance import attention_is_invariant
from shard_server.engines.torch_engine.kernels.int8_linear import Int8Linears
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.linear import MakesLinears, TorchLinears, common_row_granularity
from shard_server.engines.torch_engine.model import LlamaModel


class Forward(Protocol):
    """Forward passes of one model over one KV cache."""

    multiplies_single_rows: bool
    """Whether several rows of one sequence are cheaper when they are computed as rows of different sequences."""

    def plan(self, decodes: Sequence[Extent], prefills: Sequence[Extent]) -> Any:
        """The plan of attention for a step. `decodes` have one new token each; their rows are 0, 1, 2 ...; the rows of
        `prefills` follow."""
        ...

    def logits(self, token_ids: list[int], positions: list[int], logit_rows: list[int], plan: Any) -> torch.Tensor:
        """float32 [len(logit_rows), vocab_size]. Writes the KV of all rows."""
        ...

    def is_invariant(self) -> bool:
        """Whether this machine computes a row bit for bit the same in every batch. Measured; called before `logits`."""
        ...


class Kernels(Protocol):
    """A factory of linear layers and forward passes that fit together."""

    linears: MakesLinears

    def forward(self, model: LlamaModel, config: LlamaConfig, cache: KvCache) -> Forward:
        """Forward passes of `model`, which was built with `linears`."""
        ...


def find_compiled_kernels(
    config: LlamaConfig, dtype: torch.dtype, block_size: int, on_progress: OnProgress, *, int8_weights: bool
) -> Kernels | None:
    """The compiled kernels, or None if they cannot run here; `on_progress` is then called with the reason."""
    try:
        from shard_server.engines.torch_engine.kernels.compiled_forward import CompiledKernels, why_not_compiled
    except ImportError as error:
        reason: str | None = str(error)
    else:
        reason = why_not_compiled(config, dtype, block_size)
        if reason is None:
            on_progress("compiled kernels (some seconds when they are compiled first)")
            return CompiledKernels(int8_weights=int8_weights)
    on_progress(f"torch's kernels, the compiled ones are left out: {reason}")
    return None


class TorchKernels:
    """torch's operators. Raises EngineError if this CPU's int8 products are not exact."""

    def __init__(self, dtype: torch.dtype, max_rows: int | None, *, int8_weights: bool) -> None:
        """`max_rows` limits the rows of one product; see linear.py."""
        self.linears: MakesLinears = Int8Linears(dtype) if int8_weights else TorchLinears(max_rows)

    def forward(self, model: LlamaModel, config: LlamaConfig, cache: KvCache) -> TorchForward:
        return TorchForward(model, config, cache)


class TorchForward:
    def __init__(self, model: LlamaModel, config: LlamaConfig, cache: KvCache) -> None:
        self._model, self._config, self._cache = model, config, cache
        self._attention = PagedAttention(config, cache, GRAINS[cache.dtype][0])
        self._row_granularity = 1
        self.multiplies_single_rows = self._attention.multiplies_single_rows

    def plan(self, decodes: Sequence[Extent], prefills: Sequence[Extent]) -> Any:
        return self._attention.plan(decodes, prefills)

    def logits(self, token_ids: list[int], positions: list[int], logit_rows: list[int], plan: Any) -> torch.Tensor:
        padding = [0] * (self._rounded(plan.num_rows) - len(token_ids))
        logits = self._model.forward(
            torch.tensor(token_ids + padding),
            torch.tensor(positions + padding),
            torch.tensor(logit_rows + [0] * (self._rounded(len(logit_rows)) - len(logit_rows)), dtype=torch.int64),
            plan.token_rows,
            functools.partial(self._attention.attend, plan),
            self._cache,
        )
        return logits[: len(logit_rows)]

    def is_invariant(self) -> bool:
        config, cache = self._config, self._cache
        granularity = common_row_granularity(self._model.distinct_products, cache.dtype)
        if granularity is None:
            return False
        for grain in GRAINS[cache.dtype]:
            make = functools.partial(PagedAttention, grain=grain)
            if attention_is_invariant(config, cache.dtype, cache.block_size, make):
                self._row_granularity = granularity
                self._attention = make(config, cache)
                return True
        return False

    def _rounded(self, num_rows: int) -> int:
        return -(-num_rows // self._row_granularity) * self._row_granularity
