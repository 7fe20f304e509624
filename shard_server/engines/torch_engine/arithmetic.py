"""Chooses what an engine on a CPU computes with: the types of numbers and weights, and the kernels.

"auto" means the fastest that keeps the model's quality: compiled kernels, with the packed weights of a GGUF file, or
with bf16 or int8 weights, as measured on this machine (form_choice.py); where compiled kernels cannot run, torch's
operators, in float32 unless the CPU multiplies bf16. Where memory does not suffice, the weights are int8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.weights import OnProgress
from shard_server.engines.torch_engine.config import AttentionConfig, LlamaConfig
from shard_server.engines.torch_engine.forward import Kernels, TorchKernels
from shard_server.engines.torch_engine.operators.linear import INVARIANT_ROWS
from shard_server.engines.torch_engine.weight_form import NOT_PACKED, PackedFiles, WeightForm

if TYPE_CHECKING:
    from shard_server.engines.torch_engine.kernels.form_choice import MeasuredForm
    from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool

CheckMemory = Callable[[torch.dtype, WeightForm], None]
"""Raises EngineError if memory does not suffice."""
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
    weights: WeightForm
    kernels: Kernels
    reason: str = ""
    """Why the weights have that form, for people; empty where they were asked for"""

    @property
    def variant(self) -> str:
        """Two engines compute the same bits from the same weights only if these are equal."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype if self.weights is WeightForm.DTYPE else self.weights.value}/{self.kernels.arithmetic}"

    @property
    def description(self) -> str:
        dtype = "float32" if self.dtype == torch.float32 else "bf16"
        weights = dtype if self.weights is WeightForm.DTYPE else self.weights.value
        reason = f" ({self.reason})" if self.reason else ""
        if "torch" in self.kernels.arithmetic:
            return f"{self.kernels.label}, {weights} weights{reason}, {dtype} arithmetic"
        is_float = self.kernels.arithmetic.startswith("float32")
        return f"{self.kernels.label}, {weights} weights{reason}, {'float32' if is_float else weights} arithmetic"


def choose_arithmetic(
    config: LlamaConfig,
    wanted: ArithmeticChoice,
    block_size: int,
    check_memory: CheckMemory,
    on_progress: OnProgress,
    packed: PackedFiles = NOT_PACKED,
) -> Arithmetic:
    """`packed`: the packed weights that the model's files hold. Raises EngineError if memory never suffices, or if the
    wanted kernels or weights cannot be had here."""

    def why_not() -> str | None:
        from shard_server.engines.torch_engine.kernels.compiled_forward import why_not_compiled

        return why_not_compiled(config, block_size)

    threads = compiled_threads(config, wanted, why_not, on_progress)
    _check_weights(wanted.weights, packed, has_compiled=threads is not None)
    measured = None
    if wanted.weights == "auto" and threads is not None:
        from shard_server.engines.torch_engine.kernels.form_choice import fastest_form

        measured = fastest_form(threads, may_be_packed=packed.is_there, on_progress=on_progress)
    candidates = _candidates(wanted, measured, has_compiled=threads is not None)
    dtype, form = _affordable(candidates, check_memory, on_progress)
    reason = measured.reason if measured is not None and measured.form is form else ""
    if threads is not None:
        from shard_server.engines.torch_engine.core_share import CoreShare
        from shard_server.engines.torch_engine.kernels.compiled_forward import CompiledKernels
        from shard_server.engines.torch_engine.kernels.packed_weights import in_own_memory
        from shard_server.engines.torch_engine.kernels.program import cache_dir
        from shard_server.engines.torch_engine.kernels.shared_weights import SharedWeights

        cores = CoreShare(wanted.shared_cores, cache_dir() / "cores") if wanted.shared_cores else None
        kept = SharedWeights(cache_dir() / "weights") if wanted.shares_weights else in_own_memory
        are_grouped = form is WeightForm.INT4 or (form is WeightForm.PACKED and packed.is_whole)
        kernels = CompiledKernels(
            threads, int8_weights=form is WeightForm.INT8, are_grouped=are_grouped, cores=cores, kept=kept
        )
        return Arithmetic(dtype, form, kernels, reason)
    max_rows = INVARIANT_ROWS if wanted.deterministic else None
    return Arithmetic(dtype, form, TorchKernels(dtype, max_rows, int8_weights=form is WeightForm.INT8))


def _check_weights(wanted: str, packed: PackedFiles, *, has_compiled: bool) -> None:
    """Raises EngineError for weights that cannot be had."""
    if wanted in ("packed", "int4") and not has_compiled:
        raise EngineError(
            f"{wanted} weights need compiled kernels, which cannot run here; set shard.torch.weights to auto"
        )
    if wanted == "packed" and not packed.is_there:
        raise EngineError(
            "packed weights are those of a GGUF file of 4 to 8 bits, which this model is not; "
            "set shard.torch.weights to auto"
        )


def compiled_threads(
    config: AttentionConfig, wanted: ArithmeticChoice, why_not: Callable[[], str | None], on_progress: OnProgress
) -> ThreadPool | None:
    """None: torch's operators compute. `on_progress` is called with the reason, which is `why_not`'s if that gives one.
    Raises EngineError if kernels are wanted that cannot run here."""
    if wanted.kernels == "torch":
        return None
    threads = None
    try:
        from shard_server.engines.torch_engine.kernels.compiled_forward import checked_threads

        reason = "they are for bfloat16" if wanted.dtype == "float32" else why_not()
    except ImportError as error:
        reason = str(error)
    else:
        if reason is None:
            threads = checked_threads(wanted.kernels, config, on_progress)
            reason = "none runs here"
    if threads is None:
        on_progress(f"torch's operators compute, compiled kernels are left out: {reason}")
        if wanted.kernels != "auto":
            raise EngineError(f"kernels {wanted.kernels!r} cannot run here; set shard.torch.kernels to auto")
    return threads


def _candidates(
    wanted: ArithmeticChoice, measured: MeasuredForm | None, *, has_compiled: bool
) -> Iterator[tuple[torch.dtype, WeightForm]]:
    """(dtype, weights) in the order of preference."""
    if wanted.dtype != "auto":
        dtypes = [DTYPES[wanted.dtype]]
    elif has_compiled or _multiplies_bf16():
        dtypes = [torch.bfloat16]
    else:
        dtypes = [torch.float32, torch.bfloat16]
    if wanted.weights not in ("auto", "dtype"):
        yield dtypes[-1], WeightForm(wanted.weights)
        return
    if measured is not None and measured.form is not WeightForm.DTYPE:
        yield dtypes[-1], measured.form
    for dtype in dtypes:
        yield dtype, WeightForm.DTYPE
    if wanted.weights == "auto":
        yield dtypes[-1], WeightForm.INT8


def _affordable(
    candidates: Iterator[tuple[torch.dtype, WeightForm]], check_memory: CheckMemory, on_progress: OnProgress
) -> tuple[torch.dtype, WeightForm]:
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
