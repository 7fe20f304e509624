"""Starts the LLM from the configuration and finds out its size. Everything here runs once, at the start."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog

from kvloom_common.config import ShardConfig
from shard_server.engines.base import Capability, EngineError
from shard_server.engines.tensorrt_llm.api import Llm, TensorRtLlm, load_tensorrt_llm
from shard_server.engines.tensorrt_llm.daemon_thread import call_in_daemon
from shard_server.engines.tensorrt_llm.disaggregation import hands_over_logprobs
from shard_server.engines.tensorrt_llm.health import START_SECONDS
from shard_server.engines.tensorrt_llm.kv_cache.kv_records import as_records
from shard_server.engines.tensorrt_llm.llm_options import llm_options
from shard_server.engines.tensorrt_llm.settings import OPTIONS, TensorRtSettings
from shard_server.engines.tensorrt_llm.stats import IterationStats

log = structlog.get_logger()

FIRST_STATS_SECONDS: Final = 5.0
CAPACITY_SECONDS: Final = 5.0


async def launch(model_dir: Path, shard: ShardConfig, max_model_len: int) -> tuple[TensorRtLlm, Llm]:
    """Import the library and construct the LLM, which takes minutes, in a thread. Raises EngineError."""
    try:
        async with asyncio.timeout(START_SECONDS):
            return await call_in_daemon("tensorrt-llm-start", lambda: _construct(model_dir, shard, max_model_len))
    except TimeoutError as error:
        raise EngineError(f"TensorRT-LLM did not start within {START_SECONDS:g} s") from error


def _construct(model_dir: Path, shard: ShardConfig, max_model_len: int) -> tuple[TensorRtLlm, Llm]:
    library = load_tensorrt_llm()
    options = llm_options(library, model_dir, shard, max_model_len)
    try:
        return library, library.symbol("LLM")(**options)
    except Exception as error:  # pydantic's, CUDA's, MPI's: all mean that this engine cannot start
        raise EngineError(f"TensorRT-LLM {library.version} cannot start: {type(error).__name__}: {error}") from error


async def absorb_first_stats(llm: Llm, stats: IterationStats) -> None:
    """The statistics of the first request include the number of blocks. They may be missing; see `count_blocks`."""

    def fetch() -> list[Any]:
        return list(as_records(llm.get_stats(timeout=FIRST_STATS_SECONDS)))

    try:
        stats.absorb(await call_in_daemon("tensorrt-llm-first-stats", fetch))
    except Exception as error:
        log.warning("trtllm_statistics_refused", error=repr(error))


async def absorb_capacity(llm: Llm, stats: IterationStats, num_ranks: int) -> None:
    """The number of blocks, from versions that say it."""
    get_capacity = getattr(llm, "get_kv_cache_capacity", None)
    if get_capacity is None:
        return
    try:
        async with asyncio.timeout(CAPACITY_SECONDS):
            stats.absorb_capacity(await call_in_daemon("tensorrt-llm-capacity", get_capacity), num_ranks)
    except Exception as error:
        log.warning("trtllm_capacity_withheld", error=repr(error))


def count_blocks(stats: IterationStats, shard: ShardConfig, settings: TensorRtSettings) -> int:
    """The number of KV blocks. Raises EngineError if neither the engine nor the configuration gives it."""
    num_blocks = stats.num_blocks or shard.num_blocks * settings.num_ranks
    if not num_blocks:
        raise EngineError("TensorRT-LLM does not say how many KV blocks it has: set shard.num_blocks")
    return num_blocks


_OF_THE_CPP_SAMPLER: Final = frozenset(
    {Capability.PENALTIES, Capability.REPETITION_PENALTY, Capability.MIN_P, Capability.LOGIT_BIAS}
)


def capabilities_of(library: TensorRtLlm, settings: TensorRtSettings) -> frozenset[Capability]:
    """BATCH_INVARIANT and SEEDED_RESUME are absent because kernels are chosen by batch size: a resumed answer continues
    after exactly the delivered tokens, but not always with the tokens that it would have had. MIN_TOKENS is, because
    samplers keep back only one of the stop tokens; PROMPT_LOGPROBS, because the library gives the likeliest tokens of
    a position, and not always the prompt's own."""
    release = library.release
    found = {Capability.GENERATE, Capability.TOP_K}
    if not settings.decoding_type or settings.decoding_type in release.logprobs_beside:
        found.add(Capability.LOGPROBS)
        # Other kinds of speculation have samplers of their own, which know temperature, top_p and top_k.
        found |= _OF_THE_CPP_SAMPLER if settings.sampler_type == "TRTLLMSampler" else release.sampler
    if settings.block_reuse:
        found.add(Capability.PREFIX_CACHING)
    if settings.has_lora:
        found.add(Capability.ADAPTERS)
    if settings.guided_decoding_backend:
        found.add(Capability.GUIDED)
    if settings.guided_decoding_backend == "xgrammar":
        found.add(Capability.STRUCTURAL_TAGS)
    if settings.transceiver:
        found.add(Capability.KV_HANDOFF)
        if Capability.LOGPROBS in found and hands_over_logprobs(library):
            found.add(Capability.HANDOFF_LOGPROBS)
    return frozenset(found)


def logits_width(model_dir: Path, vocab_size: int, settings: TensorRtSettings) -> int:
    """The number of logits of a position: the vocabulary of the model's config.json, or `vocab_size` without one, as
    the library pads it to divide the output layer evenly among GPUs. Raises EngineError for a damaged config.json."""
    path = model_dir / "config.json"
    if path.exists():
        try:
            content = json.loads(path.read_bytes())
            found = content.get("vocab_size") or content.get("text_config", {}).get("vocab_size")
            vocab_size = int(found or vocab_size)
        except (OSError, ValueError, AttributeError) as error:
            raise EngineError(f"model.path: {path.name} cannot be read: {error}") from error
    return -(-vocab_size // settings.num_vocab_parts) * settings.num_vocab_parts


def check_isolation(library: TensorRtLlm, settings: TensorRtSettings) -> bool:
    """Returns True when requests can carry a cache salt. Raises EngineError if tenants would share their KV."""
    has_salt = library.knows("LLM.generate_async", "cache_salt")
    if not has_salt and settings.block_reuse:
        raise EngineError(
            f"TensorRT-LLM {library.version} takes no cache_salt, so that tenants would share cached prefixes: set "
            f"{OPTIONS}.kv_cache_config.enable_block_reuse = false, or use 1.2.1 or newer"
        )
    return has_salt


async def shut_down(llm: Llm, timeout_seconds: float, on_timeout: Callable[[], None]) -> None:
    """Call the library's own shutdown, which blocks and may hang. After a timeout, `on_timeout` is called."""
    try:
        async with asyncio.timeout(timeout_seconds):
            await call_in_daemon("tensorrt-llm-shutdown", llm.shutdown)
    except TimeoutError:
        on_timeout()
