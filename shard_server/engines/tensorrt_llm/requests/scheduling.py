"""How urgent a request is to TensorRT-LLM, how long its blocks are kept, and on which rank it runs best.

Ranks of classes are kvloom's: the lower, the more urgent (docs/concepts/scheduling.md). TensorRT-LLM's priorities are
the other way round, and a request of INTERACTIVE_RANK has the library's own defaults.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from kvloom_common.class_rank import INTERACTIVE_RANK
from kvloom_common.config import TensorRtLlmConfig
from shard_server.engines.base import EngineError, EngineRequest
from shard_server.engines.tensorrt_llm.api import TensorRtLlm
from shard_server.engines.tensorrt_llm.settings import OPTIONS, TensorRtSettings

DEFAULT_PRIORITY: Final = 0.5
"""The library's, in its range from 0 to 1: the higher, the sooner a request leaves the queue."""
DEFAULT_RETENTION: Final = 35
"""The library's, in its range from 0 to 100: blocks with a lower one are evicted first."""
_GENERATE: Final = "LLM.generate_async"


@dataclasses.dataclass(frozen=True, slots=True)
class RequestScheduling:
    """Chooses the arguments of generate_async that requests get. `of` has checked that the version takes them."""

    library: TensorRtLlm
    by_class: bool
    retains_by_class: bool
    follows_prefix: bool
    traces: bool

    @classmethod
    def of(cls, library: TensorRtLlm, config: TensorRtLlmConfig, settings: TensorRtSettings) -> RequestScheduling:
        """Raises EngineError that names the option which the version lacks."""
        wanted = {
            "priority": ("options.scheduler_config.waiting_queue_policy", settings.orders_by_priority),
            "kv_cache_retention_config": ("retention_by_class", config.retention_by_class),
            "scheduling_params": ("attention_dp_follows_prefix", config.attention_dp_follows_prefix),
        }
        for argument, (field, is_set) in wanted.items():
            if is_set and not library.knows(_GENERATE, argument):
                raise EngineError(
                    f"shard.tensorrt_llm.{field}: TensorRT-LLM {library.version}'s generate_async has no {argument}"
                )
        if config.attention_dp_follows_prefix and not settings.attention_dp:
            raise EngineError(f"shard.tensorrt_llm.attention_dp_follows_prefix needs {OPTIONS}.enable_attention_dp")
        is_set = [is_set for _, is_set in wanted.values()]
        return cls(library, is_set[0], is_set[1], is_set[2], library.knows(_GENERATE, "trace_headers"))

    def arguments(self, request: EngineRequest, rank: int | None) -> dict[str, Any]:
        """Those of a request; `rank` is the one that holds most of its prefix, None: none does."""
        found: dict[str, Any] = {}
        if self.by_class:
            found["priority"] = by_rank(DEFAULT_PRIORITY, request.class_rank)
        if self.retains_by_class and request.class_rank != INTERACTIVE_RANK:
            found["kv_cache_retention_config"] = self._retention(round(by_rank(DEFAULT_RETENTION, request.class_rank)))
        if rank is not None:
            make = self.library.symbol("scheduling_params.SchedulingParams")
            # Relaxed: another rank takes it if this one is full.
            found["scheduling_params"] = make(attention_dp_rank=rank, attention_dp_relax=True)
        if self.traces and request.traceparent:
            found["trace_headers"] = {"traceparent": request.traceparent}
        return found

    def _retention(self, priority: int) -> Any:
        """Retains all tokens of its prompt and its output at this priority, for as long as they are cached."""
        make = self.library.symbol("llmapi.KvCacheRetentionConfig")
        whole_prompt = make.TokenRangeRetentionConfig(0, None, priority, None)
        return make([whole_prompt], priority)


def by_rank(default: float, class_rank: int) -> float:
    """A priority that falls with the rank: twice `default` for rank 0, `default` for INTERACTIVE_RANK, and towards 0
    for those that can wait."""
    return 2 * default / (1 + max(0, class_rank))
