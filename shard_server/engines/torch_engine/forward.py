"""A forward pass over one step's rows, with torch's operators or with compiled kernels (compiled_forward.py)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.lora.peft import LoraWeights
from shard_server.engines.torch_engine.lora.torch_adapter import AdaptedRows, TorchAdapter
from shard_server.engines.torch_engine.model import LlamaModel
from shard_server.engines.torch_engine.operators.attention import GRAINS, Extent, PagedAttention
from shard_server.engines.torch_engine.operators.int8_linear import Int8Linears
from shard_server.engines.torch_engine.operators.invariance import attention_is_invariant
from shard_server.engines.torch_engine.operators.linear import MakesLinears, TorchLinears, common_row_granularity


class Forward(Protocol):
    """Forward passes of one model over one KV cache."""

    multiplies_single_rows: bool
    """True when several rows of one sequence are cheaper when they are computed as rows of different sequences."""

    def plan(self, decodes: Sequence[Extent], prefills: Sequence[Extent]) -> Any:
        """The plan of attention for a step. `decodes` have one new token each; their rows are 0, 1, 2 ...; the rows of
        `prefills` follow."""
        ...

    def logits(
        self,
        token_ids: list[int],
        positions: list[int],
        logit_rows: list[int],
        plan: Any,
        adapters: Sequence[Any] | None = None,
    ) -> torch.Tensor:
        """float32 [len(logit_rows), vocab_size]. Writes the KV of all rows. `adapters`: what `adapter` gave, by row, or
        None for the model itself; without it, no row has one."""
        ...

    def adapter(self, weights: LoraWeights) -> Any:
        """An adapter in the form that `logits` takes. Called in any thread."""
        ...

    def hidden_states(self, first_row: int, num_rows: int) -> torch.Tensor:
        """float32 [num_rows, hidden_size]: the hidden states of rows of the latest `logits`, after the last norm."""
        ...

    def is_invariant(self) -> bool:
        """Returns True when this machine computes a row bit for bit the same in every batch. Measured; called before
        `logits`."""
        ...


class Kernels(Protocol):
    """A factory of linear layers and forward passes that fit together."""

    linears: MakesLinears
    arithmetic: str
    """Two engines compute the same bits from the same weights only if these are equal."""
    label: str
    """For people: what computes"""
    shares_cores: bool
    """True when the number of threads follows what other engines leave; see core_share.py."""

    def forward(self, model: LlamaModel, config: LlamaConfig, cache: KvCache) -> Forward:
        """Forward passes of `model`, which was built with `linears`."""
        ...


class TorchKernels:
    """torch's operators. Raises EngineError if this CPU's int8 products are not exact."""

    def __init__(self, dtype: torch.dtype, max_rows: int | None, *, int8_weights: bool) -> None:
        """`max_rows` limits the rows of one product; see linear.py."""
        self.linears: MakesLinears = Int8Linears(dtype) if int8_weights else TorchLinears(max_rows)
        capability = torch.backends.cpu.get_cpu_capability()
        self.arithmetic = f"torch-{capability}"
        self.label = f"torch's operators ({capability})"
        self.shares_cores = False

    def forward(self, model: LlamaModel, config: LlamaConfig, cache: KvCache) -> TorchForward:
        return TorchForward(model, config, cache)


class TorchForward:
    def __init__(self, model: LlamaModel, config: LlamaConfig, cache: KvCache) -> None:
        self._model, self._config, self._cache = model, config, cache
        self._attention = PagedAttention(config, cache, GRAINS[cache.dtype][0])
        self._row_granularity = 1
        self._x: torch.Tensor | None = None
        """The last layer's output, for all rows of the latest step."""
        self.multiplies_single_rows = self._attention.multiplies_single_rows

    def plan(self, decodes: Sequence[Extent], prefills: Sequence[Extent]) -> Any:
        return self._attention.plan(decodes, prefills)

    def adapter(self, weights: LoraWeights) -> TorchAdapter:
        return TorchAdapter(weights)

    def logits(
        self,
        token_ids: list[int],
        positions: list[int],
        logit_rows: list[int],
        plan: Any,
        adapters: Sequence[TorchAdapter | None] | None = None,
    ) -> torch.Tensor:
        padding = [0] * (self._rounded(plan.num_rows) - len(token_ids))
        self._x = self._model.last_layer(
            torch.tensor(token_ids + padding),
            torch.tensor(positions + padding),
            plan.token_rows,
            functools.partial(self._attention.attend, plan),
            self._cache,
            None if adapters is None else AdaptedRows(adapters),
        )
        padded_rows = logit_rows + [0] * (self._rounded(len(logit_rows)) - len(logit_rows))
        return self._model.logits(self._x, torch.tensor(padded_rows, dtype=torch.int64))[: len(logit_rows)]

    def hidden_states(self, first_row: int, num_rows: int) -> torch.Tensor:
        assert self._x is not None, "a step comes first"
        return self._model.hidden_states(self._x[first_row : first_row + num_rows])

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
