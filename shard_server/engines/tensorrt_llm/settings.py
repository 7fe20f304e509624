"""The settings that kvloom itself reads of `shard.tensorrt_llm.options`, the arguments of the library's LLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from kvloom_common.config import ShardConfig
from shard_server.engines.base import EngineError

OPTIONS: Final = "shard.tensorrt_llm.options"
NO_EVICTION: Final = "GUARANTEED_NO_EVICT"
PREFILL_ROLES: Final = ("prefill", "both")
"""Roles of shards that compute prompts for others."""
DEFAULT_MAX_RANK: Final = 64
DEFAULT_MAX_LORAS: Final = 4


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRtSettings:
    """The options that decide how the adapter behaves, with the library's defaults for those that are absent."""

    tensor_parallel_size: int
    attention_dp: bool
    guided_decoding_backend: str
    """"" without guides."""
    decoding_type: str
    """That of speculation, in capital letters without underscores; "" without one."""
    transceiver: str
    """The backend with which KV is handed over; "" for none."""
    block_reuse: bool
    reserves_output: bool
    """True when a sequence is admitted only if there are blocks for all of its tokens."""
    orders_by_priority: bool
    sampler_type: str
    has_lora: bool
    max_rank: int
    max_loras: int
    target_modules: frozenset[str]
    """The library's names of the modules that adapters may change; empty: those of the first adapter."""
    computes_prompts: bool
    """True when the shard's role makes it compute prompts for others."""
    disables_overlap: bool
    """True when the operator has turned the overlap scheduler off."""

    @classmethod
    def of(cls, shard: ShardConfig) -> TensorRtSettings:
        """Raises EngineError for a value of the wrong type."""
        options = shard.tensorrt_llm.options
        lora = table(options, "lora_config")
        scheduler = table(options, "scheduler_config")
        return cls(
            tensor_parallel_size=_value(options, "tensor_parallel_size", int, 1),
            attention_dp=_value(options, "enable_attention_dp", bool, False),
            guided_decoding_backend=_value(options, "guided_decoding_backend", str, ""),
            decoding_type=decoding_type(table(options, "speculative_config")),
            transceiver=_value(table(options, "cache_transceiver_config"), "backend", str, ""),
            block_reuse=_value(table(options, "kv_cache_config"), "enable_block_reuse", bool, True),
            reserves_output=_value(scheduler, "capacity_scheduler_policy", str, NO_EVICTION) == NO_EVICTION,
            orders_by_priority=_value(scheduler, "waiting_queue_policy", str, "") == "priority",
            sampler_type=_value(options, "sampler_type", str, "auto"),
            has_lora=_value(options, "enable_lora", bool, False) or bool(lora) or bool(shard.tensorrt_llm.adapters),
            max_rank=_value(lora, "max_lora_rank", int, DEFAULT_MAX_RANK),
            max_loras=_value(lora, "max_loras", int, DEFAULT_MAX_LORAS),
            target_modules=frozenset(_value(lora, "lora_target_modules", list, [])),
            computes_prompts=shard.role in PREFILL_ROLES,
            disables_overlap=_value(options, "disable_overlap_scheduler", bool, False),
        )

    @property
    def num_ranks(self) -> int:
        """The number of ranks with a KV cache and statistics of their own."""
        return self.tensor_parallel_size if self.attention_dp else 1

    @property
    def is_serial(self) -> bool:
        """True when the overlap scheduler is off where versions need that to compute prompts for others."""
        return self.computes_prompts or self.disables_overlap

    @property
    def num_vocab_parts(self) -> int:
        """Among how many GPUs the model's output layer is divided: its width is a multiple of this."""
        return self.tensor_parallel_size // self.num_ranks


def table(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested table of the options; empty if it is absent or `false`. Raises EngineError for anything else."""
    found = options.get(name) or {}
    if not isinstance(found, Mapping):
        raise EngineError(f"{OPTIONS}.{name}: it is a table, or false for none")
    return found


def decoding_type(speculation: Mapping[str, Any]) -> str:
    """The decoding_type of a speculative_config, in capital letters without underscores; "" without one. Raises
    EngineError if it is missing."""
    if not speculation:
        return ""
    name = speculation.get("decoding_type")
    if not isinstance(name, str):
        raise EngineError(f'{OPTIONS}.speculative_config needs a decoding_type, such as "NGram" or "Eagle3"')
    return name.upper().replace("_", "")


def _value(options: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    found = options.get(name, default)
    if not isinstance(found, kind):
        raise EngineError(f"{OPTIONS}: {name} is {found!r}, and must be of the type {kind.__name__}")
    return found
