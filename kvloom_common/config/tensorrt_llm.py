"""The configuration of TensorRT-LLM."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvloom_common.config.section import PositiveFloat, PositiveInt, Section


class TensorRtKvCacheConfig(Section):
    """TensorRT-LLM's KV cache."""

    free_gpu_memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """The share of the memory that is free once the weights are loaded. If `shard.num_blocks` is set too, the smaller
    of the two limits applies."""
    dtype: str = "auto"
    """auto, fp8, ..."""
    block_reuse: bool = True
    partial_reuse: bool = True
    retention_by_class: bool = False
    """True evicts blocks of requests whose class can wait before those of interactive ones, and blocks of more urgent
    ones after them."""
    host_cache_bytes: Annotated[int, Meta(ge=0)] = 0
    """The size of a second tier in host memory. 0: there is none."""
    secondary_offload_min_priority: Annotated[int, Meta(ge=0, le=100)] = 0
    """Blocks of a lower priority are not kept in the second tier. 0: the library's default."""
    disk_cache_bytes: Annotated[int, Meta(ge=0)] = 0
    """The size of a third tier on disk, in versions newer than 1.2.1. 0: there is none."""
    event_buffer_max_size: PositiveInt = 65_536
    """How many KV events may wait for the shard. Beyond that they are lost, and the shard resynchronises."""


class TensorRtSpeculationConfig(Section):
    """TensorRT-LLM's speculative decoding."""

    method: Literal["off", "ngram", "eagle3", "mtp", "draft_target"] = "off"
    max_draft_len: PositiveInt = 4
    max_matching_ngram_size: PositiveInt = 4
    """For ngram only. The pool of n-grams is never shared between requests."""
    draft_model: str = ""
    """The directory or name of the draft model, for eagle3 and draft_target."""


class TensorRtLoraConfig(Section):
    """TensorRT-LLM's LoRA adapters."""

    enabled: bool = False
    max_rank: PositiveInt = 64
    max_loras: PositiveInt = 4
    max_cpu_loras: PositiveInt = 32
    adapters: dict[str, str] = {}
    """The adapters' directories, by adapter name."""
    target_modules: list[str] = []
    """The modules that adapters may change, by TensorRT-LLM's names. Empty: those that the first of `adapters` has."""


class TensorRtCacheTransceiverConfig(Section):
    """The transfer of KV between a prefill engine and a decode engine."""

    backend: Literal["off", "DEFAULT", "UCX", "NIXL", "MPI", "MOONCAKE"] = "off"
    """MOONCAKE only in versions newer than 1.2.1."""
    max_tokens_in_buffer: Annotated[int, Meta(ge=0)] = 0
    """0: the library's default."""
    timeout_ms: PositiveInt = 60_000
    """Without a timeout, a peer that cannot be reached would block the engine."""


class TensorRtKvConnectorConfig(Section):
    """TensorRT-LLM's connector to a KV store outside of the engine. By default there is none."""

    preset: str = ""
    """A name that the library knows, such as lmcache, in versions newer than 1.2.1."""
    module: str = ""
    """The Python module of a connector, instead of a preset."""
    scheduler_class: str = ""
    worker_class: str = ""

    def __post_init__(self) -> None:
        named = [bool(self.module), bool(self.scheduler_class), bool(self.worker_class)]
        if any(named) and (self.preset or not all(named)):
            raise ValueError("kv_connector takes preset, or module, scheduler_class and worker_class together")


class TensorRtLlmConfig(Section):
    """The settings of TensorRT-LLM (docs/tensorrt-llm.md). Block size, number of blocks, batch size and context window
    are those of `shard`."""

    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    moe_expert_parallel_size: Annotated[int, Meta(ge=0)] = 0
    """Over how many GPUs the experts of a mixture are divided. 0: the library's default."""
    moe_tensor_parallel_size: Annotated[int, Meta(ge=0)] = 0
    """Over how many GPUs each expert is divided. 0: the library's default."""
    gpus_per_node: Annotated[int, Meta(ge=0)] = 0
    """GPUs of one machine, for an engine on several (`shard.launcher`). 0: those that the library finds."""
    attention_dp: bool = False
    attention_dp_follows_prefix: bool = False
    """True runs a request on the rank that holds most of its prompt's blocks, unless that rank is full."""
    waiting_queue_policy: Literal["fcfs", "priority"] = "fcfs"
    """How TensorRT-LLM orders waiting requests: as they have come, or by the rank of their class. The latter needs a
    version newer than 1.2.1."""
    dtype: str = "auto"
    trust_remote_code: bool = False
    max_num_tokens: PositiveInt = 8192
    """The maximum number of tokens of one step. Without chunked prefill, a prompt cannot be longer either."""
    chunked_prefill: bool = True
    overlap_scheduler: bool = True
    cuda_graphs: bool = True
    stream_interval: PositiveInt = 1
    guided_decoding_backend: Literal["off", "xgrammar", "llguidance"] = "off"
    sampler_type: Literal["auto", "TorchSampler", "TRTLLMSampler"] = "auto"
    penalties: bool = False
    """True says that the chosen sampler applies penalties (docs/tensorrt-llm.md). Otherwise requests with penalties are
    rejected, naming the parameter."""
    extra_llm_options: dict[str, Any] = {}
    """Further arguments of `LLM`, passed unchanged."""
    start_timeout_seconds: PositiveFloat = 3600.0
    probe_interval_seconds: PositiveFloat = 30.0
    """How often an idle engine generates one token, to show that it still can."""
    probe_timeout_seconds: PositiveFloat = 30.0
    stall_timeout_seconds: PositiveFloat = 120.0
    """An engine that has work and makes no progress for this long counts as dead."""
    max_failed_requests: PositiveInt = 8
    """After so many requests in a row that TensorRT-LLM has failed, it must generate one token to count as alive."""
    loop_timeout_seconds: Annotated[float, Meta(ge=0)] = 60.0
    """When TensorRT-LLM blocks the shard's event loop for this long, the process ends. 0: it never does."""
    cancel_timeout_seconds: PositiveFloat = 10.0
    """A cancelled sequence that TensorRT-LLM does not end within this time is cut off."""
    unread_timeout_seconds: PositiveFloat = 30.0
    """When the engine's output is not read for this long, its sequences are aborted."""
    kv_cache: TensorRtKvCacheConfig = msgspec.field(default_factory=TensorRtKvCacheConfig)
    speculation: TensorRtSpeculationConfig = msgspec.field(default_factory=TensorRtSpeculationConfig)
    lora: TensorRtLoraConfig = msgspec.field(default_factory=TensorRtLoraConfig)
    kv_connector: TensorRtKvConnectorConfig = msgspec.field(default_factory=TensorRtKvConnectorConfig)
    cache_transceiver: TensorRtCacheTransceiverConfig = msgspec.field(default_factory=TensorRtCacheTransceiverConfig)
