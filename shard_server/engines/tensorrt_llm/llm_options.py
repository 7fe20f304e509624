"""kvloom.toml → arguments of `tensorrt_llm.LLM`.

The constructor rejects unknown arguments, and versions differ. An option at its default is passed if the version has
it; an option that was set and that the version lacks is an error that names the option.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from kvloom_common.config import ShardConfig, TensorRtLlmConfig, TensorRtSpeculationConfig
from shard_server.engines.base import EngineError
from shard_server.engines.tensorrt_llm.api import TensorRtLlm

_SECTION = "shard.tensorrt_llm"
_DEFAULTS = TensorRtLlmConfig()


@dataclasses.dataclass(frozen=True, slots=True)
class _Option:
    """One argument, and the configuration key that it comes from."""

    argument: str
    value: Any
    key: str
    is_set: bool
    """True when the operator set it: then a version without it is an error."""


def llm_options(library: TensorRtLlm, model_dir: Path, shard: ShardConfig, max_model_len: int) -> dict[str, Any]:
    """Arguments of `LLM`. Raises EngineError that names the option which the installed version lacks or refuses."""
    config = shard.tensorrt_llm
    if shard.queue_order != "fcfs":
        raise EngineError(f"shard.queue_order: TensorRT-LLM has no {shard.queue_order}, only the order of arrival")
    _check_combinations(library, config)
    known = _arguments_of_llm(library)
    arguments: dict[str, Any] = {"model": str(model_dir)}
    for option in _options(library, shard, max_model_len):
        if known is None or option.argument in known:
            arguments[option.argument] = option.value
        elif option.is_set:
            raise EngineError(f"{option.key}: TensorRT-LLM {library.version}'s LLM has no {option.argument}")
    for argument, value in config.extra_llm_options.items():
        if argument in arguments:
            raise EngineError(f"{_SECTION}.extra_llm_options: {argument} is set by kvloom already")
        if known is not None and argument not in known:
            raise EngineError(f"{_SECTION}.extra_llm_options: TensorRT-LLM {library.version}'s LLM has no {argument}")
        arguments[argument] = value
    return arguments


def _check_combinations(library: TensorRtLlm, config: TensorRtLlmConfig) -> None:
    """Raises EngineError for what the library accepts one by one, and fails with together, or refuses late."""
    backend = config.cache_transceiver.backend
    if backend not in ("off", *library.release.transceivers):
        raise EngineError(
            f"{_SECTION}.cache_transceiver.backend: TensorRT-LLM {library.version} has no {backend}, only "
            f"{', '.join(sorted(library.release.transceivers))}"
        )
    if config.speculation.method == "off":
        return
    if config.sampler_type == "TRTLLMSampler":
        raise EngineError(f"{_SECTION}.sampler_type: TRTLLMSampler cannot verify drafts, so it excludes speculation")
    if config.pipeline_parallel_size > 1:
        raise EngineError(f"{_SECTION}.speculation.method: drafts exclude pipeline_parallel_size > 1")


def _arguments_of_llm(library: TensorRtLlm) -> frozenset[str] | None:
    """None: unknown; the constructor itself will tell."""
    if library.find("llmapi.llm_args.TorchLlmArgs") is None:
        return library.arguments_of("LLM")
    return library.arguments_of("llmapi.llm_args.TorchLlmArgs")


def _options(library: TensorRtLlm, shard: ShardConfig, max_model_len: int) -> list[_Option]:
    config = shard.tensorrt_llm

    def plain(argument: str, field: str) -> _Option:
        value = getattr(config, field)
        return _Option(argument, value, f"{_SECTION}.{field}", value != getattr(_DEFAULTS, field))

    options = [
        # The shard tokenizes; only the guides' compilers need a tokenizer in there.
        _Option("skip_tokenizer_init", config.guided_decoding_backend == "off", _SECTION, True),
        _Option("backend", "pytorch", _SECTION, False),
        # Without it there are no load figures but our own counts.
        _Option("enable_iter_perf_stats", True, _SECTION, False),
        _Option("max_batch_size", shard.max_batch, "shard.max_batch", True),
        _Option("max_seq_len", max_model_len, "shard.max_model_len", True),
        _Option("kv_cache_config", _kv_cache(library, shard), f"{_SECTION}.kv_cache", True),
        plain("tensor_parallel_size", "tensor_parallel_size"),
        plain("pipeline_parallel_size", "pipeline_parallel_size"),
        plain("enable_attention_dp", "attention_dp"),
        plain("dtype", "dtype"),
        plain("trust_remote_code", "trust_remote_code"),
        plain("max_num_tokens", "max_num_tokens"),
        plain("enable_chunked_prefill", "chunked_prefill"),
        plain("stream_interval", "stream_interval"),
        plain("sampler_type", "sampler_type"),
    ]
    overlapped = {"off", *library.release.overlapped_speculation}
    if not config.overlap_scheduler or config.speculation.method not in overlapped:
        # The others draft between steps: there is nothing to overlap with.
        options.append(
            _Option("disable_overlap_scheduler", True, f"{_SECTION}.overlap_scheduler", not config.overlap_scheduler)
        )
    if config.waiting_queue_policy != "fcfs":
        policy = config.waiting_queue_policy
        key = f"{_SECTION}.waiting_queue_policy"
        scheduler = library.build("llmapi.SchedulerConfig", key, waiting_queue_policy=policy)
        options.append(_Option("scheduler_config", scheduler, key, True))
    if config.cuda_graphs:
        graphs = library.build(
            "llmapi.CudaGraphConfig", f"{_SECTION}.cuda_graphs", max_batch_size=shard.max_batch, enable_padding=True
        )
        options.append(_Option("cuda_graph_config", graphs, f"{_SECTION}.cuda_graphs", False))
    else:
        options.append(_Option("cuda_graph_config", None, f"{_SECTION}.cuda_graphs", True))
    if config.guided_decoding_backend != "off":
        options.append(plain("guided_decoding_backend", "guided_decoding_backend"))
    if config.speculation.method != "off":
        speculation = _speculation(library, config.speculation)
        options.append(_Option("speculative_config", speculation, f"{_SECTION}.speculation", True))
    if config.lora.enabled:
        options.append(_Option("enable_lora", True, f"{_SECTION}.lora.enabled", True))
        options.append(_Option("lora_config", _lora(library, config), f"{_SECTION}.lora", True))
    if config.cache_transceiver.backend != "off":
        transceiver = _cache_transceiver(library, config)
        options.append(_Option("cache_transceiver_config", transceiver, f"{_SECTION}.cache_transceiver", True))
    parallelism = ("moe_expert_parallel_size", "moe_tensor_parallel_size", "gpus_per_node")
    options += [plain(name, name) for name in parallelism if getattr(config, name)]
    if config.kv_connector != _DEFAULTS.kv_connector:
        options.append(_Option("kv_connector_config", _kv_connector(library, config), f"{_SECTION}.kv_connector", True))
    return options


def _kv_connector(library: TensorRtLlm, config: TensorRtLlmConfig) -> Any:
    connector = config.kv_connector
    if connector.preset:
        arguments = {"connector": connector.preset}
    else:
        arguments = {
            "connector_module": connector.module,
            "connector_scheduler_class": connector.scheduler_class,
            "connector_worker_class": connector.worker_class,
        }
    return library.build("llmapi.llm_args.KvCacheConnectorConfig", f"{_SECTION}.kv_connector", **arguments)


def _kv_cache(library: TensorRtLlm, shard: ShardConfig) -> Any:
    config = shard.tensorrt_llm.kv_cache
    optional: dict[str, Any] = {}
    if shard.num_blocks:
        optional["max_tokens"] = shard.num_blocks * shard.block_size
    if config.host_cache_bytes:
        optional["host_cache_size"] = config.host_cache_bytes
    if config.secondary_offload_min_priority:
        optional["secondary_offload_min_priority"] = config.secondary_offload_min_priority
    if config.disk_cache_bytes:
        optional["disk_cache_size"] = config.disk_cache_bytes
    return library.build(
        "llmapi.KvCacheConfig",
        f"{_SECTION}.kv_cache",
        enable_block_reuse=config.block_reuse,
        enable_partial_reuse=config.partial_reuse,
        free_gpu_memory_fraction=config.free_gpu_memory_fraction,
        # 0 would mean: no events at all.
        event_buffer_max_size=config.event_buffer_max_size,
        dtype=config.dtype,
        tokens_per_block=shard.block_size,
        **optional,
    )


def _speculation(library: TensorRtLlm, config: TensorRtSpeculationConfig) -> Any:
    option = f"{_SECTION}.speculation"
    match config.method:
        case "ngram":
            return library.build(
                "llmapi.NGramDecodingConfig",
                option,
                max_draft_len=config.max_draft_len,
                max_matching_ngram_size=config.max_matching_ngram_size,
                # The default is one pool for all: what one tenant wrote would be proposed to another.
                is_public_pool=False,
            )
        case "mtp":
            path = "llmapi.MTPDecodingConfig"
            # 1.2.1's number of draft tokens is that of the layers; later the layers are read from the model.
            by_layers = library.knows(path, "num_nextn_predict_layers")
            length = {"num_nextn_predict_layers" if by_layers else "max_draft_len": config.max_draft_len}
            return library.build(path, option, **length, **_sampling_of_speculation(library, path))
        case "eagle3":
            # Newer versions have a class of its own; in older ones Eagle 3 is what EagleDecodingConfig does.
            is_new = library.find("llmapi.Eagle3DecodingConfig") is not None
            path = "llmapi.Eagle3DecodingConfig" if is_new else "llmapi.EagleDecodingConfig"
        case _:
            path = "llmapi.DraftTargetDecodingConfig"
    if not config.draft_model:
        raise EngineError(f"{option}.draft_model: {config.method} needs one")
    name = "speculative_model" if library.knows(path, "speculative_model") else "speculative_model_dir"
    arguments = {"max_draft_len": config.max_draft_len, name: config.draft_model}
    return library.build(path, option, **arguments, **_sampling_of_speculation(library, path))


def _sampling_of_speculation(library: TensorRtLlm, path: str) -> dict[str, Any]:
    """Without this, versions that have it verify drafts greedily, whatever the temperature of a request is."""
    name = "allow_advanced_sampling"
    return {name: True} if library.knows(path, name) else {}


def _lora(library: TensorRtLlm, config: TensorRtLlmConfig) -> Any:
    optional: dict[str, Any] = {}
    if config.lora.target_modules:
        optional["lora_target_modules"] = config.lora.target_modules
    elif config.lora.adapters:
        optional["lora_dir"] = [config.lora.adapters[min(config.lora.adapters)]]
    else:
        # Its executor would die of an assertion.
        raise EngineError(
            f'{_SECTION}.lora: write target_modules = ["attn_q", "attn_k", "attn_v"] (the modules that adapters '
            "change), or name an adapter's directory in adapters"
        )
    return library.build(
        "lora_helper.LoraConfig",
        f"{_SECTION}.lora",
        max_lora_rank=config.lora.max_rank,
        max_loras=config.lora.max_loras,
        max_cpu_loras=config.lora.max_cpu_loras,
        **optional,
    )


def _cache_transceiver(library: TensorRtLlm, config: TensorRtLlmConfig) -> Any:
    transceiver = config.cache_transceiver
    optional: dict[str, Any] = {}
    if transceiver.max_tokens_in_buffer:
        optional["max_tokens_in_buffer"] = transceiver.max_tokens_in_buffer
    return library.build(
        "llmapi.CacheTransceiverConfig",
        f"{_SECTION}.cache_transceiver",
        backend=transceiver.backend,
        kv_transfer_timeout_ms=transceiver.timeout_ms,
        **optional,
    )
