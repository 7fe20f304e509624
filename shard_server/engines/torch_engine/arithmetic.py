"""Chooses what an engine on a CPU computes with: the types of numbers and weights, and the kernels.

"auto" means the fastest that keeps the model as it is: compiled kernels with bf16 weights; where these cannot run,
torch's operators, in float32 unless the CPU multiplies bf16. Only where memory does not suffice are the weights int8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.weights import OnProgress
from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.forward import Kernels, TorchKernels
from shard_server.engines.torch_engine.operators.linear import INVARIANT_ROWS

if TYPE_CHECKING:
    from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclasses.dataclass(frozen=True, slots=True)
class ArithmeticChoice:
    """Holds what the configuration asks for; see kvloom_common.config.TorchConfig."""

    dtype: str = "auto"
    weights: str = "auto"
    kernels: str = "auto"
    deterministic: bool = True
    shared_cores: int = 0
    """Compiled kernels compute with this many threads while no other engine of this user computes, and with fewer
    while some do. 0: with those of torch."""
    shares_weights: bool = False
    """Weights that compiled kernels have packed are shared with the other shards of this machine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arithmetic:
    """Holds what an engine computes with."""

    dtype: torch.dtype
    """The type of numbers between products, and of the KV cache."""
    int8_weights: bool
    kernels: Kernels

    @property
    def variant(self) -> str:
        """Two engines compute the same bits from the same weights only if these are equal."""
        return f"{self._weights}/{self.kernels.arithmetic}"

    @property
    def description(self) -> str:
        dtype = "float32" if self.dtype == torch.float32 else "bf16"
        weights = "int8" if self.int8_weights else dtype
        if "torch" in self.kernels.arithmetic:
            return f"{self.kernels.label}, {weights} weights, {dtype} arithmetic"
        is_float = self.kernels.arithmetic.startswith("float32")
        return f"{self.kernels.label}, {weights} weights, {'float32' if is_float else weights} arithmetic"

    @property
    def _weights(self) -> str:
        return "int8" if self.int8_weights else str(self.dtype).removeprefix("torch.")


def choose_arithmetic(
    config: LlamaConfig,
    wanted: ArithmeticChoice,
    block_size: int,
    check_memory: Callable[[torch.dtype, bool], None],
    on_progress: OnProgress,
) -> Arithmetic:
    """`check_memory(dtype, int8_weights)` raises EngineError if memory does not suffice. Raises EngineError if it never
    does, or if the wanted kernels cannot run here."""
    threads = _compiled_threads(config, wanted, block_size, on_progress)
    if threads is None and wanted.kernels not in ("auto", "torch"):
        raise EngineError(f"kernels {wanted.kernels!r} cannot run here; set shard.torch.kernels to auto")
    dtype, int8_weights = _affordable(_candidates(wanted, has_compiled=threads is not None), check_memory, on_progress)
    if threads is not None:
        from shard_server.engines.torch_engine.core_share import CoreShare
        from shard_server.engines.torch_engine.kernels.compiled_forward import CompiledKernels
        from shard_server.engines.torch_engine.kernels.packed_linear import in_own_memory
        from shard_server.engines.torch_engine.kernels.program import cache_dir
        from shard_server.engines.torch_engine.kernels.shared_weights import SharedWeights

        cores = CoreShare(wanted.shared_cores, cache_dir() / "cores") if wanted.shared_cores else None
        kept = SharedWeights(cache_dir() / "weights") if wanted.shares_weights else in_own_memory
        kernels = CompiledKernels(threads, int8_weights=int8_weights, cores=cores, kept=kept)
        return Arithmetic(dtype, int8_weights, kernels)
    max_rows = INVARIANT_ROWS if wanted.deterministic else None
    return Arithmetic(dtype, int8_weights, TorchKernels(dtype, max_rows, int8_weights=int8_weights))


def _compiled_threads(
    config: LlamaConfig, wanted: ArithmeticChoice, block_size: int, on_progress: OnProgress
) -> ThreadPool | None:
    """None: torch's operators compute. `on_progress` is called with the reason."""
    if wanted.kernels == "torch":
        return None
    threads = None
    try:
        from shard_server.engines.torch_engine.kernels.compiled_forward import checked_threads, why_not_compiled
    except ImportError as error:
        reason: str | None = str(error)
    else:
        reason = "they are for bfloat16" if wanted.dtype == "float32" else why_not_compiled(config, block_size)
        if reason is None:
            threads = checked_threads(wanted.kernels, config, on_progress)
            reason = "none runs here"
    if threads is None:
        on_progress(f"torch's operators compute, compiled kernels are left out: {reason}")
    return threads


def _candidates(wanted: ArithmeticChoice, *, has_compiled: bool) -> Iterator[tuple[torch.dtype, bool]]:
    """(dtype, int8 weights) in the order of preference."""
    if wanted.dtype != "auto":
        dtypes = [DTYPES[wanted.dtype]]
    elif has_compiled or _multiplies_bf16():
        dtypes = [torch.bfloat16]
    else:
        dtypes = [torch.float32, torch.bfloat16]
    for dtype in dtypes:
        if wanted.weights != "int8":
            yield dtype, False
    if wanted.weights != "dtype":
        yield dtypes[-1], True


def _affordable(
    candidates: Iterator[tuple[torch.dtype, bool]],
    check_memory: Callable[[torch.dtype, bool], None],
    on_progress: OnProgress,
) -> tuple[torch.dtype, bool]:
    error: EngineError | None = None
    for candidate in candidates:
        try:
            check_memory(*candidate)
        except EngineError as new_error:
            error = new_error
        else:
            if error is not None:
                on_progress(f"smaller numbers than preferred: {error}")
            return candidate
    assert error is not None
    raise error


def _multiplies_bf16() -> bool:
    """True when torch's operators are faster in bf16 than in float32. Elsewhere oneDNN emulates bf16."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
