"""The load of an engine, from its Prometheus metrics by the names of vLLM, SGLang and TensorRT-LLM. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from kvloom_common.metrics.exposition import samples_in

_SUMS: Final = {
    "vllm:num_requests_running": "num_running",
    "vllm:num_requests_waiting": "num_waiting",
    "vllm:inter_token_latency_seconds_sum": "itl_seconds_sum",
    "vllm:inter_token_latency_seconds_count": "itl_count",
    "sglang:num_running_reqs": "num_running",
    "sglang:num_queue_reqs": "num_waiting",
    "sglang:inter_token_latency_seconds_sum": "itl_seconds_sum",
    "sglang:inter_token_latency_seconds_count": "itl_count",
    "trtllm_num_requests_running": "num_running",
    "trtllm_num_requests_waiting": "num_waiting",
}
"""The sum counts where there are several samples, as of an engine with data-parallel ranks."""
_HIGHEST: Final = {
    "vllm:kv_cache_usage_perc": "kv_usage",
    "sglang:token_usage": "kv_usage",
    "trtllm_kv_cache_utilization": "kv_usage",
    "trtllm_kv_cache_tokens_per_block": "block_size",
    "trtllm_kv_cache_max_blocks": "num_blocks",
}
_INFO_LABELS: Final = {
    "vllm:cache_config_info": ("block_size", "num_gpu_blocks"),
    "sglang:cache_config_info": ("page_size", "num_pages"),
}
_WANTED: Final = (*_SUMS, *_HIGHEST, *_INFO_LABELS)


MAX_SIZE: Final = 2**24
"""An engine that claims more blocks, or tokens in one, is not believed."""


class ScrapedLoad(msgspec.Struct):
    """The load of an engine at one time, as its metrics say it."""

    num_running: float = 0.0
    num_waiting: float = 0.0
    kv_usage: float = 0.0
    """The share of its KV blocks that sequences hold."""
    block_size: int = 0
    """In tokens; 0: not known. The same holds for `num_blocks`."""
    num_blocks: int = 0
    itl_seconds_sum: float = 0.0
    """The sum of all times between two tokens since its start; the next field is their number."""
    itl_count: float = 0.0

    def mean_itl_seconds(self, before: ScrapedLoad | None) -> float:
        """The mean time between two tokens since then; 0: there was none."""
        num = self.itl_count - before.itl_count if before is not None else 0.0
        return (self.itl_seconds_sum - before.itl_seconds_sum) / num if before is not None and num > 0 else 0.0


def engine_load_in(text: str) -> ScrapedLoad:
    """Raises ValueError if the text is malformed, or has none of an engine's metrics."""
    lines = [line for line in text.splitlines() if line.startswith(_WANTED)]  # an engine has a thousand others
    found: dict[str, float] = {}
    for sample in samples_in("\n".join(lines) + "\n"):
        name = sample.name
        if name in _SUMS:
            found[_SUMS[name]] = found.get(_SUMS[name], 0.0) + sample.value
        elif name in _HIGHEST:
            found[_HIGHEST[name]] = max(found.get(_HIGHEST[name], 0.0), sample.value)
        elif name in _INFO_LABELS:
            for label, field in zip(_INFO_LABELS[name], ("block_size", "num_blocks"), strict=True):
                value = sample.labels.get(label, "")
                if value.isdecimal():
                    found[field] = float(value)
    if "num_running" not in found:
        raise ValueError("it has no metrics of an engine, such as vllm:num_requests_running")
    for field in ("block_size", "num_blocks"):
        if not 0 < found.get(field, 0.0) <= MAX_SIZE:
            found[field] = 0.0
    return msgspec.convert(found, ScrapedLoad, strict=False)
