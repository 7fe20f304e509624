"""Planted bugs in fleets of several models, and in models that are loaded and unloaded while traffic runs."""

from __future__ import annotations

from typing import Any

import msgspec

from kvloom.adapters import Adapter
from kvloom.errors import KvloomError
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR
from lab.dst.checkers import (
    EndsJustified,
    FleetReported,
    IndexExact,
    ModelsKeptApart,
    UnloadsHarmless,
    WithdrawalsKept,
)
from router.core import live as live_requests
from router.core.admission import arrivals
from router.core.core import RouterCore
from router.core.dispatch import refusals
from router.core.dispatch.attempt_sender import AttemptSender
from router.core.events import LoadReported, Request
from router.core.fleet.fleet import Fleet, Shard
from router.core.fleet.shard_adapters import ShardAdapters
from router.core.live import LiveRequest
from router.core.shard_event_handler import ShardEventHandler
from tests.lab.dst.planted_bugs.registry import Patch, caught_by


@caught_by(ModelsKeptApart)
def places_requests_on_shards_of_any_model(patch: Patch) -> None:
    """Placement does not ask which model a shard serves."""
    patch.setattr(Fleet, "_find_ready", lambda self, _model: [s for s in self.shards.values() if not s.is_draining])


@caught_by(ModelsKeptApart)
def places_requests_on_shards_without_their_adapter(patch: Patch) -> None:
    """Placement asks whether a shard has an adapter of this name, and not which."""

    def has(self: ShardAdapters, adapter: Adapter) -> bool:
        return adapter.name in self._states

    patch.setattr(ShardAdapters, "has", has)


@caught_by(ModelsKeptApart)
def forgets_adapters_in_prefill_chunks(patch: Patch) -> None:
    """The first part of a long prompt is computed by the model alone."""
    original = AttemptSender.send_prefill_chunk

    def send(self: AttemptSender, live: LiveRequest, *args: Any) -> None:
        whole = live.request
        live.request = msgspec.structs.replace(whole, adapter=None)
        original(self, live, *args)
        live.request = whole

    patch.setattr(AttemptSender, "send_prefill_chunk", send)


@caught_by(IndexExact)
def shares_blocks_between_adapters(patch: Patch) -> None:
    """The router believes that KV of one adapter is of use to another."""
    original = live_requests.root_hash
    patch.setattr(live_requests, "root_hash", lambda model, _checksum, salt: original(model, "", salt))


@caught_by(WithdrawalsKept)
def takes_requests_for_withdrawn_models(patch: Patch) -> None:
    """A model that is about to be unloaded still takes new requests."""
    patch.setattr(Fleet, "is_withdrawn", lambda _self, _model: False)


@caught_by(WithdrawalsKept)
def never_forgets_withdrawn_models(patch: Patch) -> None:
    """The last shard of a withdrawn model leaves, and its clients are told to try again later."""
    patch.setattr(Fleet, "remove", lambda self, shard_id: self.shards.pop(shard_id))


@caught_by(FleetReported)
def lists_withdrawn_models_for_ever(patch: Patch) -> None:
    """Requests for a model that has been unloaded are refused as they should be, but clients still see it."""
    original = Fleet.remove

    def remove(self: Fleet, shard_id: str) -> Shard:
        shard = self.shards[shard_id]
        known = self._models.get(shard.description.model)
        original(self, shard_id)
        if known is not None:
            self._models[shard.description.model] = known
        return shard

    def knows(self: Fleet, model: str) -> bool:
        return any(shard.description.model == model for shard in self.shards.values()) or not self._has_served

    patch.setattr(Fleet, "remove", remove)
    patch.setattr(Fleet, "knows", knows)


@caught_by(EndsJustified, first_seed=70)
def forgets_models_with_their_first_withdrawn_shard(patch: Patch) -> None:
    """The first withdrawn shard that leaves takes its model along, although others of it are left."""
    original = Fleet.remove

    def remove(self: Fleet, shard_id: str) -> Shard:
        shard = original(self, shard_id)
        if shard.is_withdrawn:
            self.forgotten = {*self.forgotten, shard.description.model}
        return shard

    original_add = Fleet.add

    def add(self: Fleet, description: Any) -> Shard:
        self.forgotten = self.forgotten - {description.model}
        return original_add(self, description)

    original_knows = Fleet.knows
    patch.setattr(Fleet, "forgotten", frozenset(), raising=False)
    patch.setattr(Fleet, "remove", remove)
    patch.setattr(Fleet, "add", add)
    patch.setattr(Fleet, "knows", lambda self, model: model not in self.forgotten and original_knows(self, model))


@caught_by(EndsJustified)
def forgets_models_during_outages(patch: Patch) -> None:
    """A model whose last shard has crashed counts as unloaded."""
    original = Fleet.remove

    def remove(self: Fleet, shard_id: str) -> Shard:
        self.shards[shard_id].is_withdrawn = True
        return original(self, shard_id)

    patch.setattr(Fleet, "remove", remove)


@caught_by(UnloadsHarmless)
def ends_what_runs_on_withdrawn_shards(patch: Patch) -> None:
    """A withdrawal ends the running answers of the model instead of letting them end."""
    original = ShardEventHandler._on_load
    original_init = RouterCore.__init__

    def init(self: RouterCore, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        self._fleet.lifecycle = self._lifecycle

    def on_load(self: ShardEventHandler, event: Any, now: float) -> None:
        original(self, event, now)
        shard = self._fleet.shards.get(event.shard_id)
        if shard is not None and shard.is_withdrawn:
            error = refusals._model_not_found("The model is being withdrawn.")
            for choice in list(shard.choices.values()):
                self._fleet.lifecycle.end(choice, FINISH_REASON_ERROR, error, now)

    patch.setattr(Fleet, "lifecycle", None, raising=False)
    patch.setattr(RouterCore, "__init__", init)
    patch.setattr(ShardEventHandler, "_on_load", on_load)


@caught_by(UnloadsHarmless)
def drains_withdrawn_shards(patch: Patch) -> None:
    """A withdrawn shard is treated as one that drains, so that what was admitted and waits for it finds no shard."""
    original = ShardEventHandler._on_load

    def on_load(self: ShardEventHandler, event: LoadReported, now: float) -> None:
        load = msgspec.structs.replace(event.load, draining=event.load.draining or event.load.withdrawn)
        original(self, LoadReported(event.shard_id, load), now)

    patch.setattr(ShardEventHandler, "_on_load", on_load)


@caught_by(EndsJustified)
def breaks_off_answers_that_other_routers_began(patch: Patch) -> None:
    """A withdrawn model refuses everything that arrives, also the rest of an answer whose router has died."""
    original = refusals.check_servable

    def check_servable(request: Request, fleet: Fleet, *, may_wait: bool) -> KvloomError | None:
        choices = tuple(msgspec.structs.replace(choice, output_token_ids=()) for choice in request.choices)
        return original(msgspec.structs.replace(request, choices=choices), fleet, may_wait=may_wait)

    patch.setattr(arrivals, "check_servable", check_servable)


@caught_by(EndsJustified, first_seed=60)
def withdraws_models_with_their_first_shard(patch: Patch) -> None:
    """One withdrawn shard is enough for a model to take no new requests."""

    def is_withdrawn(self: Fleet, model: str) -> bool:
        return any(shard.is_withdrawn for shard in self.shards.values() if shard.description.model == model)

    patch.setattr(Fleet, "is_withdrawn", is_withdrawn)


@caught_by(EndsJustified)
def never_takes_withdrawals_back(patch: Patch) -> None:
    """A shard stays withdrawn when the operator has changed their mind."""
    original = ShardEventHandler._on_load

    def on_load(self: ShardEventHandler, event: Any, now: float) -> None:
        shard = self._fleet.shards.get(event.shard_id)
        was_withdrawn = shard is not None and shard.is_withdrawn
        original(self, event, now)
        if shard is not None:
            shard.is_withdrawn = shard.is_withdrawn or was_withdrawn

    patch.setattr(ShardEventHandler, "_on_load", on_load)
