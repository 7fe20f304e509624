"""Which variants of the Triton kernels a GPU needs, found without one: Triton compiles for a GPU that is only named."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_server.engines.torch_engine.block_pool import BlockPool
from shard_server.engines.torch_engine.checkpoint.weights import load_weights
from shard_server.engines.torch_engine.config import load_config
from shard_server.engines.torch_engine.device.attention import piece_tokens, prompts_of, triton_attention
from shard_server.engines.torch_engine.device.runner import DeviceOptions, DeviceRunner
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.model_runner import ScheduledSequence
from shard_server.engines.torch_engine.operators.attention import Extent
from shard_server.engines.torch_engine.scheduler import Scheduler
from shard_server.engines.torch_engine.step_loop import StepLoop
from tests.fakes.tiny_llama import write_tiny_llama
from tests.integration.test_torch_device_runner import NUM_BLOCKS, random_steps

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes that a program may have, by the generation of the GPU (A100, L40S, H100)."""


class NamedGpu:
    """Stands in for Triton's driver: a GPU of some generation, on which nothing runs."""

    def __init__(self, generation: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", generation, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


@pytest.fixture
def generation() -> int:
    return 90


@pytest.fixture
def variants(generation: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What was about to be compiled, by its key; nothing is, and no kernel runs."""
    from triton import knobs
    from triton.runtime import driver

    from shard_server.engines.torch_engine.device import prompt_kernels, segment_kernels

    found: dict[str, Any] = {}
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where nothing is said

    def on_compile(*, key: str, fn: Any, compile: dict[str, Any], **_rest: Any) -> bool:  # noqa: A002
        found[f"{fn.name} {key}"] = fn, compile
        return True

    for kernel in (prompt_kernels.attend_piece, segment_kernels.attend_segment, segment_kernels.merge_segments):
        kernel.device_caches.clear()
    monkeypatch.setattr(driver, "_active", NamedGpu(generation))
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", on_compile)
    return found


@pytest.mark.parametrize("invariant", [False, True], ids=["fast", "invariant"])
def test_a_mixed_load_needs_no_kernel_that_the_start_has_not_compiled(
    tmp_path: Path, variants: dict[str, Any], invariant: bool
):
    """A request must not wait seconds for a compiler: chunks, cached prefixes, drafts and tables of any width."""
    model_dir = write_tiny_llama(tmp_path, head_dim=64)
    config = load_config(model_dir)
    options = DeviceOptions(torch.device("cpu"), torch.bfloat16, 16, NUM_BLOCKS, 256, 24, invariant)
    attention = functools.partial(triton_attention, max_keys=256)
    runner = DeviceRunner(config, load_weights(model_dir, config), options, make_attention=attention)
    scheduler = Scheduler(BlockPool(NUM_BLOCKS, 16), max_batch=8, max_prefill_tokens_per_step=64)
    StepLoop(runner, scheduler).warm_up(64)
    compiled = set(variants)
    assert compiled
    for num_blocks in (1, 2, 15, 16):
        ids = [0] * (16 * num_blocks)
        runner.run([ScheduledSequence(ids, 0, range(num_blocks), True)])
    for batch in random_steps(1)[:8]:
        runner.run(batch)
    assert set(variants) == compiled


@pytest.mark.long
@pytest.mark.parametrize("generation", SHARED_MEMORY)
def test_kernels_compile_for_every_generation(tmp_path: Path, generation: int, variants: dict[str, Any]):
    """With the heads of Llama-3-8B. What needs more shared memory than the GPU has would fail at its first start."""
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    heads = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    config = load_config(write_tiny_llama(tmp_path, **heads))
    for dtype in (torch.bfloat16, torch.float32):
        cache = KvCache(config, num_blocks=4, block_size=16, dtype=dtype)
        attend = triton_attention(config, cache, 64)
        prompts = prompts_of([Extent(0, 40, 8, [0, 1, 2])], piece_tokens(config, dtype))
        queries = torch.zeros(40, config.query_size, dtype=dtype)
        attend(prompts, 0, queries, None)
        attend(prompts.each_row(), 0, queries, None)
    assert len(variants) == 6
    for kernel, given in variants.values():
        source = ASTSource(kernel.jit_function, given["signature"], given["constants"], given["configs"][0])
        target = NamedGpu(generation).get_current_target()
        done = compile_kernel(source, target=target, options={k: given[k] for k in ("num_warps", "num_stages")})
        assert done.metadata.shared <= SHARED_MEMORY[generation], kernel.name
