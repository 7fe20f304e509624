"""TensorRT-LLM's parameter classes, with the fields of all releases; `of_release` gives those of one. Unknown arguments
are refused, as pydantic's `extra="forbid"` does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from shard_server.engines.tensorrt_llm.versions import Release


@dataclasses.dataclass(frozen=True)
class Field:
    """Like pydantic's FieldInfo, with the library's marking of what is deprecated."""

    default: Any = None
    json_schema_extra: dict[str, str] | None = None


class StrictModel:
    """Like a pydantic model: fields with defaults, `model_fields`, ValueError for anything else."""

    model_fields: ClassVar[dict[str, Any]] = {}

    def __init__(self, **values: Any) -> None:
        unknown = values.keys() - self.model_fields.keys()
        if unknown:
            raise ValueError(f"{type(self).__name__}: extra inputs are not permitted: {sorted(unknown)}")
        for name, default in self.model_fields.items():
            setattr(self, name, values.get(name, default.default if isinstance(default, Field) else default))


def of_release(model: type[StrictModel], release: Release) -> type[StrictModel]:
    """The class with the fields and defaults of one release."""
    name = model.__name__
    fields = {key: value for key, value in model.model_fields.items() if key in release.arguments(name)}
    fields |= release.defaults.get(name, {})
    for ignored in release.ignores.get(name, ()):
        fields[ignored] = Field(fields[ignored], {"status": "deprecated"})
    return type(name, (model,), {"model_fields": fields})


class KvCacheConfig(StrictModel):
    model_fields: ClassVar[dict[str, Any]] = {
        "enable_block_reuse": True,
        "max_tokens": None,
        "max_attention_window": None,
        "free_gpu_memory_fraction": 0.9,
        "host_cache_size": None,
        "event_buffer_max_size": 0,
        "enable_partial_reuse": True,
        "copy_on_partial_reuse": True,
        "dtype": "auto",
        "tokens_per_block": 32,
        "secondary_offload_min_priority": None,
        "disk_cache_size": None,
        "kv_events_config": None,
    }


class CudaGraphConfig(StrictModel):
    model_fields: ClassVar[dict[str, Any]] = {"batch_sizes": None, "max_batch_size": 0, "enable_padding": False}


class CacheTransceiverConfig(StrictModel):
    model_fields: ClassVar[dict[str, Any]] = {
        "backend": None,
        "max_tokens_in_buffer": None,
        "kv_transfer_timeout_ms": None,
    }


class SchedulerConfig(StrictModel):
    model_fields: ClassVar[dict[str, Any]] = {
        "capacity_scheduler_policy": "GUARANTEED_NO_EVICT",
        "context_chunking_policy": None,
        "dynamic_batch_config": None,
        "waiting_queue_policy": "fcfs",
    }


class KvCacheRetentionConfig:
    """It is one of C++, so its arguments are checked by type."""

    @dataclasses.dataclass
    class TokenRangeRetentionConfig:
        token_start: int
        token_end: int | None = None
        priority: int = 35
        duration_ms: Any = None

    def __init__(
        self,
        token_range_retention_configs: list[TokenRangeRetentionConfig],
        decode_retention_priority: int = 35,
        decode_duration_ms: Any = None,
    ) -> None:
        for priority in (decode_retention_priority, *(one.priority for one in token_range_retention_configs)):
            if not isinstance(priority, int) or not 0 <= priority <= 100:
                raise TypeError("incompatible constructor arguments")
        self.token_range_retention_configs = token_range_retention_configs
        self.decode_retention_priority = decode_retention_priority
        self.decode_duration_ms = decode_duration_ms


@dataclasses.dataclass(kw_only=True)
class SchedulingParams:
    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = None


class KvCacheConnectorConfig(StrictModel):
    model_fields: ClassVar[dict[str, Any]] = {
        "connector_module": None,
        "connector_scheduler_class": None,
        "connector_worker_class": None,
        "connector": None,
    }


class NGramDecodingConfig(StrictModel):
    model_fields: ClassVar[dict[str, Any]] = {
        "max_draft_len": None,
        "max_matching_ngram_size": 2,
        "is_public_pool": True,
        "allow_advanced_sampling": False,
    }


class EagleDecodingConfig(StrictModel):
    model_fields: ClassVar[dict[str, Any]] = {
        "max_draft_len": None,
        "speculative_model_dir": None,
        "speculative_model": None,
        "eagle3_one_model": True,
        "allow_advanced_sampling": False,
    }


class Eagle3DecodingConfig(EagleDecodingConfig):
    pass


class MTPDecodingConfig(StrictModel):
    model_fields: ClassVar[dict[str, Any]] = {
        "num_nextn_predict_layers": 1,
        "max_draft_len": None,
        "allow_advanced_sampling": False,
    }


class DraftTargetDecodingConfig(StrictModel):
    model_fields: ClassVar[dict[str, Any]] = {
        "max_draft_len": None,
        "speculative_model_dir": None,
        "speculative_model": None,
        "allow_advanced_sampling": False,
    }


@dataclasses.dataclass
class LoraConfig:
    lora_dir: list[str] = dataclasses.field(default_factory=list)
    max_lora_rank: int = 64
    lora_target_modules: list[str] = dataclasses.field(default_factory=list)
    max_loras: int | None = None
    max_cpu_loras: int | None = None


class LoRARequest:
    def __init__(self, lora_name: str, lora_int_id: int, lora_path: str) -> None:
        if not Path(lora_path).exists():
            raise ValueError(f"lora_path ({lora_path}) does not exist.")
        self.lora_name = lora_name
        self.lora_int_id = lora_int_id
        self.lora_path = lora_path


@dataclasses.dataclass(kw_only=True)
class GuidedDecodingParams:
    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


@dataclasses.dataclass(kw_only=True)
class DisaggregatedParams:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None


@dataclasses.dataclass(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: Any = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    exclude_input_from_output: bool = True
    return_perf_metrics: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.max_tokens, int):
            raise TypeError("max_tokens must be an int")
        if self.n > 1 and self.is_greedy:
            raise ValueError("Greedy decoding in the LLM API does not allow multiple returns")

    @property
    def is_greedy(self) -> bool:
        return (self.temperature, self.top_p, self.top_k) == (None, None, None)


def llm_args_class(release: Release, without: Iterable[str]) -> type[StrictModel]:
    """TorchLlmArgs of a release that also lacks some arguments."""
    names = release.arguments("LLM") - set(without)
    return type("TorchLlmArgs", (StrictModel,), {"model_fields": dict.fromkeys(sorted(names))})
