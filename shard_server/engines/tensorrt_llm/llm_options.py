"""`shard.tensorrt_llm.options` → arguments of `tensorrt_llm.LLM`.

What the operator writes is passed on, nested tables as the library's own classes, so that they refuse what they do not
know before weights are loaded. kvloom adds its own defaults below, and what it must set above; an option that it must
set is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvloom_common.config import ShardConfig
from shard_server.engines.base import EngineError
from shard_server.engines.tensorrt_llm.api import TensorRtLlm
from shard_server.engines.tensorrt_llm.settings import (
    DEFAULT_MAX_LORAS,
    DEFAULT_MAX_RANK,
    OPTIONS,
    TensorRtSettings,
    table,
)

OWNED: Final[Mapping[str, str]] = {
    "model": "model.path",
    "tokenizer": "the shard, which tokenizes",
    "skip_tokenizer_init": "the shard, which tokenizes",
    "backend": "the adapter, which is written for one",
    "orchestrator_type": "the adapter, which is written for one",
    "enable_iter_perf_stats": "the adapter, which reads them",
    "max_batch_size": "shard.max_batch",
    "max_seq_len": "shard.max_model_len",
    "kv_cache_config.tokens_per_block": "shard.block_size",
    "kv_cache_config.max_tokens": "shard.num_blocks",
    "kv_cache_config.kv_events_config": "the adapter: what is pushed cannot be fetched as well",
    "speculative_config.is_public_pool": "the adapter: a shared pool would propose one tenant's text to another",
    "speculative_config.enable_global_pool": "the adapter: a shared pool would propose one tenant's text to another",
}
"""Options that kvloom sets, and from what."""

NESTED: Final[Mapping[str, str]] = {
    "kv_cache_config": "llmapi.KvCacheConfig",
    "cuda_graph_config": "llmapi.CudaGraphConfig",
    "scheduler_config": "llmapi.SchedulerConfig",
    "cache_transceiver_config": "llmapi.CacheTransceiverConfig",
    "kv_connector_config": "llmapi.llm_args.KvCacheConnectorConfig",
}
"""Options with a class that the adapter knows. The library checks the tables of others when it is constructed."""

SPECULATION: Final[Mapping[str, tuple[str, ...]]] = {
    "NGRAM": ("llmapi.NGramDecodingConfig",),
    "MTP": ("llmapi.MTPDecodingConfig",),
    "EAGLE": ("llmapi.EagleDecodingConfig",),
    # In older versions Eagle 3 is what EagleDecodingConfig does.
    "EAGLE3": ("llmapi.Eagle3DecodingConfig", "llmapi.EagleDecodingConfig"),
    "DRAFTTARGET": ("llmapi.DraftTargetDecodingConfig",),
    "AUTO": ("llmapi.llm_args.AutoDecodingConfig",),
    "PARD": ("llmapi.llm_args.PARDDecodingConfig",),
    "SA": ("llmapi.llm_args.SADecodingConfig",),
    "DFLASH": ("llmapi.llm_args.DFlashDecodingConfig",),
}
"""The classes of decoding types, the first that a version has."""
LORA: Final = ("_torch.peft.lora.config.LoraConfig", "lora_helper.LoraConfig")
"""The second one is where versions up to 1.2.1 have it; later it only warns."""

EVENT_BUFFER: Final = 65_536
"""How many KV events may wait for the shard. Beyond that they are lost, and the shard resynchronises."""
TRANSFER_TIMEOUT_MS: Final = 60_000
"""Without a timeout, a peer that cannot be reached would block the engine."""
MAX_CPU_LORAS: Final = 32


def llm_options(library: TensorRtLlm, model_dir: Path, shard: ShardConfig, max_model_len: int) -> dict[str, Any]:
    """Arguments of `LLM`. Raises EngineError that names the option which kvloom sets, or which the installed version
    lacks or refuses."""
    settings, given = TensorRtSettings.of(shard), shard.tensorrt_llm.options
    if shard.queue_order != "fcfs":
        raise EngineError(f"shard.queue_order: TensorRT-LLM has no {shard.queue_order}, only the order of arrival")
    _check_owned(given)
    _check_combinations(library, settings, given)
    known = _arguments_of_llm(library)
    for name in given:
        if known is not None and name not in known:
            raise EngineError(f"{OPTIONS}.{name}: TensorRT-LLM {library.version}'s LLM has no {name}")
    arguments = _defaults(library, settings) | {name: value for name, value in given.items() if value != {}}
    for name in {*arguments, "kv_cache_config"}:
        arguments[name] = _nested(library, settings, shard, name, arguments.get(name))
    arguments |= {
        "model": str(model_dir),
        # The shard tokenizes; only the guides' compilers need a tokenizer in there.
        "skip_tokenizer_init": not settings.guided_decoding_backend,
        "backend": "pytorch",
        # Without it there are no load figures but our own counts.
        "enable_iter_perf_stats": True,
        "max_batch_size": shard.max_batch,
        "max_seq_len": max_model_len,
    }
    return {name: value for name, value in arguments.items() if known is None or name in known}


def _check_owned(given: Mapping[str, Any]) -> None:
    for path, owner in OWNED.items():
        name, _, inner = path.partition(".")
        if inner in table(given, name) if inner else name in given:
            raise EngineError(f"{OPTIONS}.{path} is set by kvloom, from {owner}")


def _check_combinations(library: TensorRtLlm, settings: TensorRtSettings, given: Mapping[str, Any]) -> None:
    """Raises EngineError for what the library accepts one by one, and fails with together, or refuses late."""
    release = library.release
    if settings.transceiver and settings.transceiver not in release.transceivers:
        raise EngineError(
            f"{OPTIONS}.cache_transceiver_config.backend: TensorRT-LLM {library.version} has no "
            f"{settings.transceiver}, only {', '.join(sorted(release.transceivers))}"
        )
    serial = given.get("disable_overlap_scheduler")
    if serial is False and settings.computes_prompts and release.hands_over_serially:
        raise EngineError(
            f"{OPTIONS}.disable_overlap_scheduler: the first prompt that it computes for another shard would end "
            f"TensorRT-LLM {library.version} (shard.role)"
        )
    cache = table(given, "kv_cache_config")
    if cache.get("event_buffer_max_size") == 0 and settings.block_reuse:
        raise EngineError(f"{OPTIONS}.kv_cache_config.event_buffer_max_size: 0 would hide the cache from routers")
    if cache.get("disk_cache_size") and not cache.get("use_kv_cache_manager_v2"):
        raise EngineError(f"{OPTIONS}.kv_cache_config.disk_cache_size needs use_kv_cache_manager_v2 = true")
    if not settings.decoding_type:
        return
    if settings.sampler_type == "TRTLLMSampler":
        raise EngineError(f"{OPTIONS}.sampler_type: TRTLLMSampler cannot verify drafts, so it excludes speculation")
    if given.get("pipeline_parallel_size", 1) > 1:
        raise EngineError(f"{OPTIONS}.speculative_config: drafts exclude pipeline_parallel_size > 1")


def _arguments_of_llm(library: TensorRtLlm) -> frozenset[str] | None:
    """None: unknown; the constructor itself will tell."""
    if library.find("llmapi.llm_args.TorchLlmArgs") is None:
        return library.arguments_of("LLM")
    return library.arguments_of("llmapi.llm_args.TorchLlmArgs")


def _defaults(library: TensorRtLlm, settings: TensorRtSettings) -> dict[str, Any]:
    """kvloom's own, where they differ from the library's."""
    release = library.release
    found: dict[str, Any] = {"enable_chunked_prefill": True, "cuda_graph_config": {}}
    drafts_between_steps = settings.decoding_type and settings.decoding_type not in release.overlapped_speculation
    if drafts_between_steps or (settings.computes_prompts and release.hands_over_serially):
        found["disable_overlap_scheduler"] = True
    if settings.has_lora:
        found |= {"enable_lora": True, "lora_config": {}}
    return found


def _nested(library: TensorRtLlm, settings: TensorRtSettings, shard: ShardConfig, name: str, value: Any) -> Any:
    """The value of an option: an instance of the library's class, where it has a known one."""
    if value is False and (name in NESTED or name in ("speculative_config", "lora_config")):
        return None
    option = f"{OPTIONS}.{name}"
    given: Any = value or {}
    match name:
        case "kv_cache_config":
            inner = {"event_buffer_max_size": EVENT_BUFFER, **given, "tokens_per_block": shard.block_size}
            if shard.num_blocks:
                inner["max_tokens"] = shard.num_blocks * shard.block_size
            return library.build(NESTED[name], option, **inner)
        case "cuda_graph_config":
            inner = {"enable_padding": True, **given}
            return library.build(NESTED[name], option, **({"max_batch_size": shard.max_batch} | inner))
        case "cache_transceiver_config":
            return library.build(NESTED[name], option, **{"kv_transfer_timeout_ms": TRANSFER_TIMEOUT_MS, **given})
        case "speculative_config":
            return _speculation(library, settings.decoding_type, given)
        case "lora_config":
            return _lora(library, settings, shard, given)
        case _ if name in NESTED:
            return library.build(NESTED[name], option, **given)
        case _:
            return value


def _speculation(library: TensorRtLlm, decoding_type: str, given: Mapping[str, Any]) -> Any:
    option = f"{OPTIONS}.speculative_config"
    path = next((path for path in SPECULATION.get(decoding_type, ()) if library.find(path) is not None), None)
    if path is None:
        raise EngineError(f"{option}: TensorRT-LLM {library.version} has no decoding_type {given['decoding_type']}")
    arguments = {name: value for name, value in given.items() if name != "decoding_type"}
    # The library's default is one pool for all: what one tenant wrote would be proposed to another.
    for pool in ("is_public_pool", "enable_global_pool"):
        if library.knows(path, pool):
            arguments[pool] = False
    # Without this, versions that have it verify drafts greedily, whatever the temperature of a request is.
    if library.knows(path, "allow_advanced_sampling"):
        arguments.setdefault("allow_advanced_sampling", True)
    return library.build(path, option, **arguments)


def _lora(library: TensorRtLlm, settings: TensorRtSettings, shard: ShardConfig, given: Mapping[str, Any]) -> Any:
    adapters = shard.tensorrt_llm.adapters
    arguments: dict[str, Any] = {
        "max_lora_rank": DEFAULT_MAX_RANK,
        "max_loras": DEFAULT_MAX_LORAS,
        "max_cpu_loras": MAX_CPU_LORAS,
        **given,
    }
    if not (settings.target_modules or arguments.get("lora_dir")):
        if not adapters:
            # Its executor would die of an assertion.
            raise EngineError(
                f'{OPTIONS}.lora_config: write lora_target_modules = ["attn_q", "attn_k", "attn_v"] (the modules that '
                "adapters change), or name an adapter's directory in shard.tensorrt_llm.adapters"
            )
        arguments["lora_dir"] = [adapters[min(adapters)]]
    path = next((path for path in LORA if library.find(path) is not None), LORA[-1])
    return library.build(path, f"{OPTIONS}.lora_config", **arguments)
