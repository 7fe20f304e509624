"""The library's releases as the fake plays them: the classes with their fields and defaults, and how each behaves.

This table was written from the library's sources and reference pages and shares nothing with the adapter: neither its
known_names.py nor its versions.py. Where the two disagree, test_versions.py fails, and somebody has to read the library
again. tests/unit/shard_server/tensorrt_llm/test_names.py checks that nothing here imports the adapter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal


class Required:
    """The default of a field that has none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Alias:
    """The default of a field that has a second name."""

    name: str
    default: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Deprecated:
    """The default of a field that has no effect any more."""

    default: Any = None


Fields = Mapping[str, Any]
"""Names and defaults."""

_KV_CACHE: Final = {
    "enable_block_reuse": True,
    "max_tokens": None,
    "max_attention_window": None,
    "free_gpu_memory_fraction": 0.9,
    "host_cache_size": None,
    "cross_kv_cache_fraction": None,
    "secondary_offload_min_priority": None,
    "event_buffer_max_size": 0,
    "attention_dp_events_gather_period_ms": 5,
    "enable_partial_reuse": True,
    "copy_on_partial_reuse": True,
    "use_uvm": False,
    "max_gpu_total_bytes": 0,
    "dtype": "auto",
    "mamba_ssm_cache_dtype": "auto",
    "tokens_per_block": 32,
    "use_kv_cache_manager_v2": False,
    "max_util_for_resume": 0.95,
}
_SPECULATION: Final = {
    "max_draft_len": None,
    "max_total_draft_tokens": None,
    "speculative_model": Alias("speculative_model_dir"),
    "max_concurrency": None,
    "draft_len_schedule": None,
    "load_format": None,
    "acceptance_window": None,
    "acceptance_length_threshold": None,
    "allow_advanced_sampling": False,
}
_EAGLE: Final = _SPECULATION | {
    "eagle_choices": None,
    "use_dynamic_tree": False,
    "dynamic_tree_max_topK": None,
    "eagle3_one_model": True,
    "eagle3_layers_to_capture": None,
}
_NGRAM: Final = _SPECULATION | {
    "max_matching_ngram_size": 0,
    "is_keep_all": True,
    "is_use_oldest": True,
    "is_public_pool": True,
}
_MTP: Final = _SPECULATION | {
    "num_nextn_predict_layers": 1,
    "use_relaxed_acceptance_for_thinking": False,
    "relaxed_topk": 1,
    "relaxed_delta": 0.0,
    "use_mtp_vanilla": False,
}
_CONNECTOR: Final = {
    "connector_module": Required,
    "connector_scheduler_class": Required,
    "connector_worker_class": Required,
}
_TRANSCEIVER: Final = {"backend": None, "max_tokens_in_buffer": None, "kv_transfer_timeout_ms": None}
_SCHEDULER: Final = {
    "capacity_scheduler_policy": "GUARANTEED_NO_EVICT",
    "context_chunking_policy": None,
    "dynamic_batch_config": None,
}
_GRAPHS: Final = {"batch_sizes": None, "max_batch_size": 0, "enable_padding": False}
_LLM: Final = {
    "model": Required,
    "tokenizer": None,
    "skip_tokenizer_init": False,
    "trust_remote_code": False,
    "tensor_parallel_size": 1,
    "dtype": "auto",
    "revision": None,
    "tokenizer_revision": None,
    "pipeline_parallel_size": 1,
    "context_parallel_size": 1,
    "gpus_per_node": None,
    "moe_cluster_parallel_size": None,
    "moe_tensor_parallel_size": None,
    "moe_expert_parallel_size": None,
    "enable_attention_dp": False,
    "enable_lm_head_tp_in_adp": False,
    "load_format": "auto",
    "enable_lora": False,
    "lora_config": None,
    "kv_cache_config": None,
    "enable_chunked_prefill": False,
    "guided_decoding_backend": None,
    "iter_stats_max_iterations": None,
    "peft_cache_config": None,
    "scheduler_config": None,
    "cache_transceiver_config": None,
    "sparse_attention_config": None,
    "speculative_config": None,
    "kv_connector_config": None,
    "max_batch_size": None,
    "max_seq_len": None,
    "max_num_tokens": 8192,
    "num_postprocess_workers": 0,
    "return_perf_metrics": False,
    "orchestrator_type": None,
    "backend": None,
    "cuda_graph_config": None,
    "attention_dp_config": None,
    "disable_overlap_scheduler": False,
    "moe_config": None,
    "attn_backend": "TRTLLM",
    "enable_iter_perf_stats": False,
    "stream_interval": 1,
    "torch_compile_config": None,
    "model_kwargs": None,
}
_SAMPLING: Final = {
    "end_id": None,
    "pad_id": None,
    "max_tokens": 32,
    "bad": None,
    "bad_token_ids": None,
    "stop": None,
    "stop_token_ids": None,
    "include_stop_str_in_output": False,
    "embedding_bias": None,
    "n": 1,
    "best_of": None,
    "use_beam_search": False,
    "top_k": None,
    "top_p": None,
    "top_p_min": None,
    "seed": None,
    "temperature": None,
    "min_tokens": None,
    "repetition_penalty": None,
    "presence_penalty": None,
    "frequency_penalty": None,
    "prompt_ignore_length": None,
    "length_penalty": None,
    "no_repeat_ngram_size": None,
    "min_p": None,
    "logprobs": None,
    "prompt_logprobs": None,
    "guided_decoding": None,
    "ignore_eos": False,
    "detokenize": True,
    "add_special_tokens": True,
    "skip_special_tokens": True,
    "exclude_input_from_output": True,
    "return_perf_metrics": False,
}
_HANDOFF: Final = ("request_type", "first_gen_tokens", "ctx_request_id", "opaque_state", "draft_tokens")
_GENERATE: Final = (
    "inputs",
    "sampling_params",
    "lora_request",
    "prompt_adapter_request",
    "streaming",
    "kv_cache_retention_config",
    "disaggregated_params",
    "trace_headers",
    "scheduling_params",
    "cache_salt",
)


@dataclasses.dataclass(frozen=True, slots=True)
class LibraryRelease:
    """A release of TensorRT-LLM."""

    name: str
    classes: Mapping[str, Fields]
    """Those of `tensorrt_llm.llmapi.llm_args`, by name."""
    lora_module: str
    """Where LoraConfig is defined. An older place still works in newer releases, with a warning."""
    sampling: Fields
    handoff: tuple[str, ...]
    """The fields of DisaggregatedParams."""
    generate: tuple[str, ...]
    """The arguments of LLM.generate_async."""
    has_capacity: bool
    """True when LLM has get_kv_cache_capacity."""
    context_only_finish: Literal["not_finished", "length"]
    context_only_needs_serial_scheduler: bool
    """True when the executor raises for a context-only request while the overlap scheduler is on. The worker catches
    errors of requests only, and ends."""
    logprobs_with_one_model: Literal["assert", "skip"]
    """What the sampler of one-model speculation does with a request for log-probabilities: an assertion, of which all
    running requests die, or none are given."""
    one_model: frozenset[str]
    """The decoding types with a sampler of their own."""
    needs_draft_model: frozenset[str]
    sampler_applies: frozenset[str]
    """The parameters of SamplingParams that the default sampler applies; the others are ignored."""
    has_cpp_sampler: bool
    """True when `sampler_type` can choose TRTLLMSampler, which applies all of them."""
    ignore_eos_drops_stop_words: bool
    tells_salts: bool
    stats_per_rank: bool
    has_error_budget: bool
    reports_usage: bool
    """True when the constructor reports its configuration to NVIDIA unless an environment variable forbids it."""
    transceivers: tuple[str, ...]
    waiting_queue_policies: tuple[str, ...]


RELEASE_1_2: Final = LibraryRelease(
    name="1.2.1",
    classes={
        "TorchLlmArgs": _LLM | {"sampler_type": "auto"},
        "KvCacheConfig": _KV_CACHE,
        "CudaGraphConfig": _GRAPHS,
        "CacheTransceiverConfig": _TRANSCEIVER,
        "SchedulerConfig": _SCHEDULER,
        "KvCacheConnectorConfig": _CONNECTOR,
        "NGramDecodingConfig": _NGRAM,
        "EagleDecodingConfig": _EAGLE,
        "MTPDecodingConfig": _MTP,
        "DraftTargetDecodingConfig": _SPECULATION,
        "AutoDecodingConfig": _SPECULATION,
    },
    lora_module="tensorrt_llm.lora_helper",
    sampling=_SAMPLING,
    handoff=_HANDOFF,
    generate=_GENERATE,
    has_capacity=False,
    context_only_finish="not_finished",
    context_only_needs_serial_scheduler=True,
    logprobs_with_one_model="assert",
    one_model=frozenset({"MTP", "Eagle", "Eagle3"}),
    needs_draft_model=frozenset({"Eagle", "Eagle3", "Draft_Target"}),
    sampler_applies=frozenset({"temperature", "top_k", "top_p", "min_p", "embedding_bias", "min_tokens"}),
    has_cpp_sampler=True,
    ignore_eos_drops_stop_words=False,
    tells_salts=False,
    stats_per_rank=False,
    has_error_budget=False,
    reports_usage=False,
    transceivers=("DEFAULT", "UCX", "NIXL", "MPI"),
    waiting_queue_policies=(),
)

_NEWEST_SPECULATION: Final = {"allow_advanced_sampling": Deprecated(False), "use_rejection_sampling": False}

NEWEST: Final = LibraryRelease(
    name="1.4.0rc4",
    classes={
        "TorchLlmArgs": _LLM | {"telemetry_config": None},
        "KvCacheConfig": _KV_CACHE
        | {
            "disk_cache_size": None,
            "disk_cache_path": None,
            "disk_prefetch_num_reqs": 0,
            "kv_events_config": None,
            "kv_cache_event_hash_algo": "auto",
            "block_reuse_policy": "all_reusable",
        },
        "CudaGraphConfig": _GRAPHS,
        "CacheTransceiverConfig": _TRANSCEIVER | {"kv_transfer_timeout_ms": 60_000, "transceiver_runtime": None},
        "SchedulerConfig": _SCHEDULER | {"waiting_queue_policy": "fcfs"},
        "KvCacheConnectorConfig": {
            "connector": None,
            "connector_module": None,
            "connector_scheduler_class": None,
            "connector_worker_class": None,
            "server_url": None,
        },
        "NGramDecodingConfig": _NGRAM | {"max_matching_ngram_size": 2} | _NEWEST_SPECULATION,
        "EagleDecodingConfig": _EAGLE | _NEWEST_SPECULATION,
        "Eagle3DecodingConfig": _EAGLE | _NEWEST_SPECULATION,
        "MTPDecodingConfig": _MTP | {"num_nextn_predict_layers": Deprecated(1)} | _NEWEST_SPECULATION,
        "DraftTargetDecodingConfig": _SPECULATION | _NEWEST_SPECULATION,
        "AutoDecodingConfig": _SPECULATION | _NEWEST_SPECULATION,
        "PARDDecodingConfig": _SPECULATION | {"mask_token_id": None} | _NEWEST_SPECULATION,
        "SADecodingConfig": _SPECULATION
        | {"max_matching_ngram_size": -1, "enable_global_pool": False}
        | _NEWEST_SPECULATION,
    },
    lora_module="tensorrt_llm._torch.peft.lora.config",
    sampling=_SAMPLING,
    handoff=(
        *_HANDOFF,
        "disagg_request_id",
        "ctx_dp_rank",
        "ctx_info_endpoint",
        "schedule_style",
        "first_gen_log_probs",
    ),
    generate=(*_GENERATE, "conversation_params", "priority"),
    has_capacity=True,
    context_only_finish="length",
    context_only_needs_serial_scheduler=False,
    logprobs_with_one_model="skip",
    one_model=frozenset({"MTP", "Eagle", "Eagle3", "Draft_Target", "PARD", "SA"}),
    needs_draft_model=frozenset({"Eagle", "Eagle3", "Draft_Target", "PARD"}),
    sampler_applies=frozenset(
        {
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "embedding_bias",
            "min_tokens",
            "seed",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "prompt_ignore_length",
        }
    ),
    has_cpp_sampler=False,
    ignore_eos_drops_stop_words=True,
    tells_salts=True,
    stats_per_rank=True,
    has_error_budget=True,
    reports_usage=True,
    transceivers=("DEFAULT", "UCX", "NIXL", "MPI", "MOONCAKE"),
    waiting_queue_policies=("fcfs", "priority"),
)
"""The newest line whose sources or pages were read."""
