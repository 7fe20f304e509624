"""LoRA adapters by name. TensorRT-LLM identifies them by number, loads one at its first use and never unloads it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvloom_common.text.model_checksum import ChecksumError, model_checksum
from shard_server.engines.base import AdapterError, AdapterInfo, AdaptersState, AdapterState, EngineError
from shard_server.engines.tensorrt_llm.api import TensorRtLlm


class AdapterTable:
    """Implements `shard_server.engines.base.Adapters`. The engine calls `request_of` for a sequence that begins, and
    `release` when it has ended.

    `paths` maps the names of the first adapters to directories. Raises EngineError for a missing directory, which
    TensorRT-LLM would report only at the first request. Their numbers are in the order of the names, so shards of one
    configuration agree. A number is never used again: the library would answer with the weights that it has loaded."""

    def __init__(self, library: TensorRtLlm, paths: Mapping[str, str], max_rank: int = 64, max_loras: int = 4) -> None:
        self._library = library
        self._max_rank, self._max_loras = max_rank, max_loras
        self._requests: dict[str, Any] = {}
        self._infos: dict[str, AdapterInfo] = {}
        self._used: set[str] = set()
        """The adapters that the library has loaded, as far as one can tell: those that a sequence had."""
        self._users: dict[str, str] = {}
        """By request id: the adapters of sequences that have not ended."""
        self._removals: dict[str, asyncio.Event] = {}
        self._num_numbers = self._num_loads = 0
        self._on_change: Callable[[], None] = lambda: None
        for name, path in sorted(paths.items()):
            try:
                self._register(_read(name, path, max_rank))
            except AdapterError as error:
                raise EngineError(f"shard.tensorrt_llm.lora.adapters.{name}: {error}") from error

    # -- operators ----------------------------------------------------------------------------------------------------

    def state(self) -> AdaptersState:
        return AdaptersState(
            adapters=[AdapterState(info, name in self._used) for name, info in self._infos.items()],
            max_loaded=self._max_loras,
            load_seconds=0.0,
            num_loads=self._num_loads,
            num_evictions=0,
            running=sorted(set(self._users.values())),
            waiting=[],
        )

    def find(self, name: str) -> AdapterInfo | None:
        return self._infos.get(name)

    def listen(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    async def add(self, name: str, path: str, *, load_now: bool = False) -> AdapterState:
        """Adds as `Adapters.add` does; but the library loads weights at their first use only."""
        if load_now:
            raise AdapterError("TensorRT-LLM loads adapters at their first use, and not before")
        info = await asyncio.to_thread(_read, name, path, self._max_rank)
        known = self._infos.get(name)
        if name in self._removals or (known is not None and known.checksum != info.checksum):
            raise AdapterError(f"another adapter has the name {name!r}: unload it first")
        if known is None:
            self._register(info)
            self._on_change()
        return AdapterState(info, name in self._used)

    async def remove(self, name: str) -> None:
        gone = self._removals.get(name)
        if gone is None:
            if self._infos.pop(name, None) is None:
                raise AdapterError(f"there is no adapter {name!r}")
            gone = self._removals[name] = asyncio.Event()
            self._take_removed(name)
            self._on_change()
        await gone.wait()

    # -- sequences ----------------------------------------------------------------------------------------------------

    def request_of(self, name: str) -> Any | None:
        """The LoRARequest of an adapter; None for "" (the model itself). Raises EngineError for an unknown name."""
        if not name:
            return None
        if name not in self._infos:
            raise EngineError(f"adapter {name!r} is not configured here")
        return self._requests[name]

    def use(self, request_id: str, name: str) -> None:
        """A sequence with this adapter has begun."""
        self._users[request_id] = name
        if name not in self._used:
            self._used.add(name)
            self._num_loads += 1
        self._on_change()

    def release(self, request_id: str) -> None:
        """A sequence has ended; those without an adapter are ignored."""
        name = self._users.pop(request_id, None)
        if name is not None:
            self._take_removed(name)
            self._on_change()

    def _register(self, info: AdapterInfo) -> None:
        make = self._library.symbol("executor.LoRARequest")
        self._num_numbers += 1
        self._requests[info.name] = make(lora_name=info.name, lora_int_id=self._num_numbers, lora_path=info.path)
        self._infos[info.name] = info
        self._used.discard(info.name)

    def _take_removed(self, name: str) -> None:
        if name in self._removals and name not in self._users.values():
            del self._requests[name]
            self._removals.pop(name).set()


def _read(name: str, path: str, max_rank: int) -> AdapterInfo:
    """Raises AdapterError."""
    if not Path(path).is_dir():
        raise AdapterError("there is no such directory")
    try:
        content = json.loads((Path(path) / "adapter_config.json").read_bytes())
        rank = int(content["r"])
        checksum = model_checksum(Path(path))
    except (OSError, ValueError, KeyError, TypeError, ChecksumError) as error:
        raise AdapterError("adapter_config.json is missing or damaged, or the files cannot be read") from error
    if rank > max_rank:
        raise AdapterError(f"its rank is {rank}, and shard.tensorrt_llm.lora.max_rank is {max_rank}")
    return AdapterInfo(name, path, checksum, rank)
