"""The symbols and arguments of TensorRT-LLM that this adapter may use, of all releases together; versions.py says which
release lacks which. tests/unit/shard_server/tensorrt_llm/test_names.py checks the adapter against them, so that a wrong
name fails there and not on an operator's machine.
"""

from __future__ import annotations

from typing import Final

SYMBOLS: Final = frozenset(
    {
        "tensorrt_llm.LLM",
        "tensorrt_llm.SamplingParams",
        "tensorrt_llm.__version__",
        "tensorrt_llm.executor.LoRARequest",
        "tensorrt_llm.executor.result.Logprob",
        "tensorrt_llm.executor.utils.RequestError",
        "tensorrt_llm.llmapi.CacheTransceiverConfig",
        "tensorrt_llm.llmapi.CudaGraphConfig",
        "tensorrt_llm.llmapi.DisaggregatedParams",
        "tensorrt_llm.llmapi.DraftTargetDecodingConfig",
        "tensorrt_llm.llmapi.Eagle3DecodingConfig",
        "tensorrt_llm.llmapi.EagleDecodingConfig",
        "tensorrt_llm.llmapi.GuidedDecodingParams",
        "tensorrt_llm.llmapi.KvCacheConfig",
        "tensorrt_llm.llmapi.KvCacheRetentionConfig",
        "tensorrt_llm.llmapi.SchedulerConfig",
        "tensorrt_llm.scheduling_params.SchedulingParams",
        "tensorrt_llm.llmapi.MTPDecodingConfig",
        "tensorrt_llm.llmapi.NGramDecodingConfig",
        "tensorrt_llm.llmapi.llm_args.KvCacheConnectorConfig",
        "tensorrt_llm.llmapi.llm_args.TorchLlmArgs",
        "tensorrt_llm.llmapi.llm_args.AutoDecodingConfig",
        "tensorrt_llm.llmapi.llm_args.DFlashDecodingConfig",
        "tensorrt_llm.llmapi.llm_args.PARDDecodingConfig",
        "tensorrt_llm.llmapi.llm_args.SADecodingConfig",
        "tensorrt_llm._torch.peft.lora.config.LoraConfig",
        "tensorrt_llm.lora_helper.LoraConfig",
    }
)
"""Where things are imported from."""

_SPECULATION: Final = frozenset(
    {"max_draft_len", "speculative_model_dir", "speculative_model", "allow_advanced_sampling"}
)
_EAGLE: Final = _SPECULATION | {"eagle3_one_model"}

ARGUMENTS: Final[dict[str, frozenset[str]]] = {
    "LLM": frozenset(
        {
            "model",
            "tokenizer",
            "skip_tokenizer_init",
            "trust_remote_code",
            "tensor_parallel_size",
            "dtype",
            "revision",
            "pipeline_parallel_size",
            "context_parallel_size",
            "enable_attention_dp",
            "backend",
            "max_batch_size",
            "max_num_tokens",
            "max_seq_len",
            "enable_chunked_prefill",
            "scheduler_config",
            "disable_overlap_scheduler",
            "stream_interval",
            "guided_decoding_backend",
            "speculative_config",
            "enable_lora",
            "lora_config",
            "peft_cache_config",
            "kv_cache_config",
            "cache_transceiver_config",
            "cuda_graph_config",
            "enable_iter_perf_stats",
            "return_perf_metrics",
            "num_postprocess_workers",
            "orchestrator_type",
            "sampler_type",
            "moe_expert_parallel_size",
            "moe_tensor_parallel_size",
            "gpus_per_node",
            "kv_connector_config",
            "telemetry_config",
        }
    ),
    "LLM.generate_async": frozenset(
        {
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
            "conversation_params",
            "priority",
        }
    ),
    "LLM.get_stats": frozenset({"timeout"}),
    "LLM.get_kv_cache_events": frozenset({"timeout"}),
    "SamplingParams": frozenset(
        {
            "end_id",
            "pad_id",
            "max_tokens",
            "bad",
            "stop",
            "stop_token_ids",
            "include_stop_str_in_output",
            "embedding_bias",
            "n",
            "best_of",
            "use_beam_search",
            "top_k",
            "top_p",
            "top_p_min",
            "seed",
            "temperature",
            "min_tokens",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "prompt_ignore_length",
            "length_penalty",
            "no_repeat_ngram_size",
            "min_p",
            "logprobs",
            "prompt_logprobs",
            "guided_decoding",
            "ignore_eos",
            "detokenize",
            "add_special_tokens",
            "skip_special_tokens",
            "exclude_input_from_output",
            "return_perf_metrics",
        }
    ),
    "SchedulerConfig": frozenset(
        {"capacity_scheduler_policy", "context_chunking_policy", "dynamic_batch_config", "waiting_queue_policy"}
    ),
    "SchedulingParams": frozenset({"attention_dp_rank", "attention_dp_relax"}),
    "GuidedDecodingParams": frozenset({"json", "regex", "grammar", "json_object", "structural_tag"}),
    "KvCacheConfig": frozenset(
        {
            "enable_block_reuse",
            "max_tokens",
            "max_attention_window",
            "free_gpu_memory_fraction",
            "host_cache_size",
            "event_buffer_max_size",
            "enable_partial_reuse",
            "copy_on_partial_reuse",
            "dtype",
            "tokens_per_block",
            "secondary_offload_min_priority",
            "disk_cache_size",
            "disk_cache_path",
            "use_kv_cache_manager_v2",
            "kv_events_config",
        }
    ),
    "CudaGraphConfig": frozenset({"batch_sizes", "max_batch_size", "enable_padding"}),
    "KvCacheConnectorConfig": frozenset(
        {
            "connector_module",
            "connector_scheduler_class",
            "connector_worker_class",
            "connector",
            "server_url",
        }
    ),
    "CacheTransceiverConfig": frozenset({"backend", "max_tokens_in_buffer", "kv_transfer_timeout_ms"}),
    "NGramDecodingConfig": _SPECULATION | {"max_matching_ngram_size", "is_public_pool"},
    "EagleDecodingConfig": _EAGLE,
    "Eagle3DecodingConfig": _EAGLE,
    "MTPDecodingConfig": _SPECULATION | {"num_nextn_predict_layers"},
    "DraftTargetDecodingConfig": _SPECULATION,
    "LoraConfig": frozenset({"lora_dir", "max_lora_rank", "max_loras", "max_cpu_loras", "lora_target_modules"}),
    "LoRARequest": frozenset({"lora_name", "lora_int_id", "lora_path"}),
    "DisaggregatedParams": frozenset(
        {
            "request_type",
            "first_gen_tokens",
            "ctx_request_id",
            "opaque_state",
            "draft_tokens",
            "disagg_request_id",
            "ctx_dp_rank",
            "ctx_info_endpoint",
            "schedule_style",
            "first_gen_log_probs",
        }
    ),
}
"""Arguments of constructors and methods; those of configs are also their attributes."""
