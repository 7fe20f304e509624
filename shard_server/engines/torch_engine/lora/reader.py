"""How the torch engine gets its adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shard_server.engines.base import AdapterError, AdapterInfo
from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.lora.peft import LoraWeights, adapter_checksum, read_adapter


class PeftReader:
    """Implements `shard_server.engines.adapters.host.ReadsAdapters`. `make` brings weights into the form that the
    runner computes with."""

    def __init__(self, config: LlamaConfig, max_rank: int, make: Callable[[LoraWeights], Any]) -> None:
        self._config = config
        self._max_rank = max_rank
        self._make = make

    def read(self, name: str, path: str) -> AdapterInfo:
        weights = read_adapter(Path(path), self._config, self._max_rank)
        return AdapterInfo(name, path, adapter_checksum(Path(path)), weights.rank)

    def load(self, adapter: AdapterInfo) -> Any:
        if adapter_checksum(Path(adapter.path)) != adapter.checksum:
            raise AdapterError("its files have changed since it was registered: unload it, and load it again")
        with torch.inference_mode():
            return self._make(read_adapter(Path(adapter.path), self._config, self._max_rank))
