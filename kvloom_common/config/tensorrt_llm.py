"""The configuration of TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvloom_common.config.section import Section, always

_ARGUMENTS = {
    "attention_dp": "enable_attention_dp",
    "chunked_prefill": "enable_chunked_prefill",
    "cuda_graphs": "cuda_graph_config (false turns them off)",
    "overlap_scheduler": "disable_overlap_scheduler",
    "waiting_queue_policy": "scheduler_config.waiting_queue_policy",
    "kv_cache": "kv_cache_config, with the library's names; retention_by_class is beside options",
    "speculation": "speculative_config, with decoding_type and the library's names",
    "cache_transceiver": "cache_transceiver_config, with the library's names",
    "kv_connector": "kv_connector_config, with the library's names",
    "lora": "lora_config, with the library's names; adapters is beside options",
}
_SAME_NAME = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "moe_expert_parallel_size",
    "moe_tensor_parallel_size",
    "gpus_per_node",
    "dtype",
    "trust_remote_code",
    "max_num_tokens",
    "stream_interval",
    "guided_decoding_backend",
    "sampler_type",
)


class TensorRtLlmConfig(Section):
    """The settings of TensorRT-LLM (docs/how-to/tensorrt-llm.md). Block size, number of blocks, batch size and context
    window are those of `shard`."""

    moved: ClassVar[Mapping[str, str]] = {
        **{name: f"It is now options.{name}" for name in _SAME_NAME},
        **{name: f"It is now options.{there}" for name, there in _ARGUMENTS.items()},
        "extra_llm_options": "Its keys are now those of options",
        "penalties": "It is gone: what the sampler applies is known by the library's version and options.sampler_type",
        **always(
            probe_interval_seconds="30",
            probe_timeout_seconds="30",
            max_failed_requests="8",
            loop_timeout_seconds="60",
            cancel_timeout_seconds="10",
            unread_timeout_seconds="30",
            stall_timeout_seconds="120",
            start_timeout_seconds="3600",
        ),
    }

    options: dict[str, Any] = {}
    """Arguments of the library's `LLM` by its own names, nested as in the configuration file of trtllm-serve, such as
    `kv_cache_config = { free_gpu_memory_fraction = 0.8 }`. They are checked against the library's classes at the start;
    those that kvloom must set are refused by name. `false` in place of a table stands for none."""
    adapters: dict[str, str] = {}
    """The directories of LoRA adapters, by adapter name. Adapters need `options.lora_config`, or `enable_lora` with an
    adapter here."""
    retention_by_class: bool = False
    """True evicts blocks of requests whose class can wait before those of interactive ones, and blocks of more urgent
    ones after them."""
    attention_dp_follows_prefix: bool = False
    """True runs a request on the rank that holds most of its prompt's blocks, unless that rank is full."""
