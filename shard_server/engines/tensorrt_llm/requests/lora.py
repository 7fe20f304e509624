"""LoRA adapters by name. TensorRT-LLM identifies them by number, loads one at its first use and never unloads it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from shard_server.engines.base import AdapterError, AdapterInfo, AdaptersState, AdapterState, EngineError
from shard_server.engines.tensorrt_llm.api import TensorRtLlm
from shard_server.engines.tensorrt_llm.requests.adapter_files import AdapterCheck


class AdapterTable:
    """Implements `shard_server.engines.base.Adapters`. The engine calls `request_of` for a sequence that begins,
    `on_start` with its first token, and `release` when it has ended.

    `paths` maps the names of the first adapters to directories. Raises EngineError for one that the library could not
    load, which it would find out at the first request, and end. Their numbers are in the order of the names, so shards
    of one configuration agree. A number is never used again: the library would answer with the weights that it has
    loaded. `prove` generates a token with a LoRARequest, and raises EngineError if that fails."""

    def __init__(
        self,
        library: TensorRtLlm,
        paths: Mapping[str, str],
        check: AdapterCheck,
        max_loras: int,
        prove: Callable[[Any], Awaitable[None]],
    ) -> None:
        self._library = library
        self._check, self._max_loras, self._prove = check, max_loras, prove
        self._requests: dict[str, Any] = {}
        self._infos: dict[str, AdapterInfo] = {}
        self._loaded: set[str] = set()
        """The adapters that the library has loaded: those with which a token was generated."""
        self._poison: dict[str, str] = {}
        """By checksum: why adapters are refused that the library has failed to load."""
        self._users: dict[str, str] = {}
        """By request id: the adapters of sequences that have not ended."""
        self._removals: dict[str, asyncio.Event] = {}
        self._num_numbers = self._num_loads = 0
        self._on_change: Callable[[], None] = lambda: None
        for name, path in sorted(paths.items()):
            try:
                self._register(check.read(name, path))
            except AdapterError as error:
                raise EngineError(f"shard.tensorrt_llm.adapters.{name}: {error}") from error

    # -- operators ----------------------------------------------------------------------------------------------------

    def state(self) -> AdaptersState:
        return AdaptersState(
            adapters=[AdapterState(info, name in self._loaded) for name, info in self._infos.items()],
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
        """Adds as `Adapters.add` does. With `load_now`, a token is generated with it; if that fails, the adapter is
        refused from then on, under any name."""
        info = await asyncio.to_thread(self._check.read, name, path)
        if info.checksum in self._poison:
            raise AdapterError(f"it was tried before, and {self._poison[info.checksum]}")
        known = self._infos.get(name)
        if name in self._removals or (known is not None and known.checksum != info.checksum):
            raise AdapterError(f"another adapter has the name {name!r}: unload it first")
        if known is None:
            self._register(info)
            self._on_change()
        if load_now and name not in self._loaded:
            await self._load(info, is_new=known is None)
        return AdapterState(info, name in self._loaded)

    async def _load(self, info: AdapterInfo, *, is_new: bool) -> None:
        try:
            await self._prove(self._requests[info.name])
        except EngineError as error:
            self._poison[info.checksum] = f"TensorRT-LLM failed to load it: {error}"
            if is_new and self._infos.pop(info.name, None) is not None:
                del self._requests[info.name]
                self._on_change()
            raise AdapterError(self._poison[info.checksum]) from error
        self._note_loaded(info.name)

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
        self._on_change()

    def on_start(self, request_id: str) -> None:
        """A sequence has its first token; those without an adapter are ignored."""
        name = self._users.get(request_id)
        if name is not None and name not in self._loaded:
            self._note_loaded(name)

    def _note_loaded(self, name: str) -> None:
        self._loaded.add(name)
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
        self._loaded.discard(info.name)

    def _take_removed(self, name: str) -> None:
        if name in self._removals and name not in self._users.values():
            del self._requests[name]
            self._removals.pop(name).set()
