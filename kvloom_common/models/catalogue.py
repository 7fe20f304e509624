"""The models whose requests a process can take. They come and go while it runs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from typing import Final, Protocol

import grpc.aio
import structlog

from kvloom.adapters import Adapter, adapter_names, full_name
from kvloom.errors import KvloomError
from kvloom.v1.router_service_pb2 import FleetState
from kvloom_common.config import ConfigError, KvloomConfig
from kvloom_common.models.card_service import fetch_card
from kvloom_common.models.configured import MAX_MODELS, configured_models
from kvloom_common.models.model_card import ModelCardError, PackedCard
from kvloom_common.models.served_model import ServedModel, load_served_model, served_model_of
from kvloom_common.process.service import StartError

log = structlog.get_logger()

RETRY_SECONDS: Final = 1.0

FetchCard = Callable[[], Awaitable[bytes]]
"""Fetches a packed card. Raises KvloomError, ModelCardError."""


class Catalogue:
    """The models by name. It lives on the event loop."""

    def __init__(self, models: Iterable[ServedModel] = ()) -> None:
        self.by_name: dict[str, ServedModel] = {}
        """By name and alias, and with adapters by their names. It is always the same object, and changes as models and
        adapters come and go."""
        self._models: dict[str, ServedModel] = {}
        self._adapters: dict[str, Mapping[str, str]] = {}
        """By model, which need not have a card: the checksums of its adapters by name."""
        self._adapter_names: dict[str, tuple[str, str]] = {}
        self._loading: dict[str, asyncio.Lock] = {}
        """By checksum: cards that are being fetched."""
        for model in models:
            self.add(model)

    def add(self, model: ServedModel) -> None:
        """Add a model, or replace that of the same name."""
        self._models[model.name] = model
        self._index()

    def remove(self, name: str) -> None:
        """Requests that run keep the tokenizer, whose threads end with its last user."""
        if self._models.pop(name, None) is not None:
            self._index()

    def set_adapters(self, adapters: Mapping[str, Mapping[str, str]]) -> None:
        """From now on the models have these adapters: by model, their checksums by name."""
        if adapters != self._adapters:
            self._adapters = dict(adapters)
            self._adapter_names = adapter_names(adapters)
            self._index()

    def adapter_named(self, name: str) -> tuple[str, Adapter] | None:
        """The adapter for which a name stands, with the name of its model, of which there may be no card."""
        found = self._adapter_names.get(name)
        if found is None:
            return None
        model, adapter = found
        return model, Adapter(adapter, self._adapters[model][adapter])

    def _index(self) -> None:
        """A name has precedence over an alias, a model over the one that succeeds it, and all over adapters' names."""
        self.by_name.clear()
        for model in sorted(self._models.values(), key=lambda model: model.succeeds not in self._models):
            self.by_name.update(dict.fromkeys(model.aliases, model))
        self.by_name.update(self._models)
        if self._adapters:
            self._index_adapters()

    def _index_adapters(self) -> None:
        names = dict(self._adapter_names)
        for alias, model in self.by_name.items():
            for adapter in self._adapters.get(model.name, ()):
                names.setdefault(full_name(alias, adapter), (model.name, adapter))
        for name, (model, adapter) in names.items():
            if model in self._models and name not in self.by_name:
                checksum = self._adapters[model][adapter]
                self.by_name[name] = self._models[model].with_adapter(Adapter(adapter, checksum))

    def successors(self, withdrawn: Container[str]) -> dict[str, str]:
        """By name and alias of the withdrawn models, the models that succeed them."""
        return {
            alias: model.name
            for model in self._models.values()
            if model.succeeds in withdrawn and model.name not in withdrawn
            for alias in model.aliases
            if (holder := self.by_name.get(alias)) is not None and holder.name == model.succeeds
        }

    def card(self, name: str) -> PackedCard | None:
        model = self.by_name.get(name)
        return None if model is None else model.card

    def has(self, name: str, checksum: str) -> bool:
        """True when the model is the one whose card has this checksum."""
        model = self._models.get(name)
        return model is not None and model.card is not None and model.card.checksum == checksum

    async def ensure(self, name: str, checksum: str, fetch: FetchCard) -> None:
        """Return once the model is the one whose card has this checksum, which is fetched if necessary. Raises
        KvloomError, and ModelCardError if the card cannot be used."""
        if self.has(name, checksum):
            return
        if name not in self._models and len(self._models) >= MAX_MODELS:
            raise ModelCardError(f"there are {MAX_MODELS} models already")
        lock = self._loading.setdefault(checksum, asyncio.Lock())
        try:
            async with lock:
                if not self.has(name, checksum):
                    await self._fetch(name, checksum, fetch)
        finally:
            if not lock.locked():
                self._loading.pop(checksum, None)

    async def _fetch(self, name: str, checksum: str, fetch: FetchCard) -> None:
        packed = await fetch()
        try:
            model = await asyncio.to_thread(served_model_of, packed, checksum)
        except (OSError, ValueError, ConfigError) as error:
            raise ModelCardError(f"the card of {name} cannot be used: {error}") from error
        if model.name != name:
            raise ModelCardError(f"the card of {name} is that of {model.name}")
        self.add(model)
        log.info("model_card_fetched", model=name, checksum=checksum[:12], num_bytes=len(packed))

    def release_caches(self) -> None:
        """Free the memory of texts that were tokenized before."""
        for model in self._models.values():
            model.tokenizer.release_caches()

    def close(self) -> None:
        for model in self._models.values():
            model.tokenizer.close()


def load_catalogue(config: KvloomConfig) -> Catalogue:
    """The configured models whose files this machine has; the others are fetched when a shard serves them. Blocks.
    Raises StartError, ConfigError."""
    catalogue = Catalogue()
    for model in configured_models(config):
        if model.path:
            try:
                catalogue.add(load_served_model(model))
            except (OSError, ValueError) as error:
                raise StartError(f"cannot load the tokenizer of {model.name}: {error}") from error
    return catalogue


def adapters_of(fleet: FleetState) -> dict[str, Mapping[str, str]]:
    """By model, the checksums of its adapters by name."""
    return {info.name: {one.name: one.checksum for one in info.adapters} for info in fleet.models if info.adapters}


class CardSource(Protocol):
    """Where an edge gets its cards: its link to the routers."""

    @property
    def fleet(self) -> FleetState: ...

    async def wait_fleet_change(self) -> None: ...

    def channel_to(self, model: str) -> grpc.aio.Channel:
        """Raises KvloomError."""
        ...


@dataclasses.dataclass(slots=True)
class CatalogueFollower:
    """Keeps a catalogue in step with the models that routers serve."""

    catalogue: Catalogue
    source: CardSource
    retry_seconds: float = RETRY_SECONDS
    _seen: set[str] = dataclasses.field(default_factory=set)
    """The models that the routers serve."""
    _failed: set[str] = dataclasses.field(default_factory=set)
    """The checksums of cards that could not be fetched, which has been reported."""

    async def watch(self) -> None:
        """Follow changes until cancelled."""
        while True:
            fleet = self.source.fleet
            is_complete = await self._follow(fleet)
            if self.source.fleet is not fleet:
                continue
            try:
                async with asyncio.timeout(None if is_complete else self.retry_seconds):
                    await self.source.wait_fleet_change()
            except TimeoutError:
                pass

    async def _follow(self, fleet: FleetState) -> bool:
        """Returns whether the catalogue now has the cards of all models."""
        is_complete = True
        for info in fleet.models:
            if info.card_checksum:
                is_complete &= await self._ensure(info.name, info.card_checksum)
        if fleet.models:  # none: the routers cannot be reached
            served = {info.name for info in fleet.models}
            for name in self._seen - served:
                self.catalogue.remove(name)
                log.info("model_withdrawn", model=name)
            self._seen = served
            self.catalogue.set_adapters(adapters_of(fleet))
        return is_complete

    async def _ensure(self, name: str, checksum: str) -> bool:
        try:
            await self.catalogue.ensure(name, checksum, lambda: self._fetch(name, checksum))
        except (KvloomError, ModelCardError) as error:
            if checksum not in self._failed:
                log.warning("model_card_fetch_failed", model=name, cause=str(error))
                self._failed.add(checksum)
            return False
        self._failed.discard(checksum)
        return True

    async def _fetch(self, name: str, checksum: str) -> bytes:
        return await fetch_card(self.source.channel_to(name), name, checksum)
