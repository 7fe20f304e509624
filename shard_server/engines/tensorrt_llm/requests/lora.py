"""LoRA adapters by name. TensorRT-LLM identifies them by number, loads one at its first use and never unloads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shard_server.engines.base import EngineError
from shard_server.engines.tensorrt_llm.api import TensorRtLlm


class AdapterTable:
    """`paths` maps adapter names to directories. Raises EngineError for a missing directory, which TensorRT-LLM would
    report only at the first request. Numbers are in the order of the names, so shards of one configuration agree."""

    def __init__(self, library: TensorRtLlm, paths: Mapping[str, str]) -> None:
        self._requests: dict[str, Any] = {}
        if not paths:
            return
        make = library.symbol("executor.LoRARequest")
        for number, (name, path) in enumerate(sorted(paths.items()), start=1):
            if not Path(path).is_dir():
                raise EngineError(f"shard.tensorrt_llm.lora.adapters.{name}: there is no directory {path}")
            self._requests[name] = make(lora_name=name, lora_int_id=number, lora_path=path)

    def request_of(self, name: str) -> Any | None:
        """The LoRARequest of an adapter; None for "" (the model itself). Raises EngineError for an unknown name."""
        if not name:
            return None
        request = self._requests.get(name)
        if request is None:
            raise EngineError(f"adapter {name!r} is not configured here")
        return request
