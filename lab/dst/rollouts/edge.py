"""A process that tells requests which version of a model they get: an edge, or a router that takes `Generate` calls.

Its routes, its catalogue and how it follows a rollout are the product's. It learns from routers which models there are.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, cast

from kvloom.errors import KvloomError
from kvloom.router_link.members import merged_fleet
from kvloom.v1.router_service_pb2 import FleetState
from kvloom_common.config import KvloomConfig, ModelConfig
from kvloom_common.discovery.records import RolloutRecord
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.models.model_routes import ModelRoutes, RouteFacts
from kvloom_common.models.rollout_follower import RolloutFollower
from kvloom_common.models.served_model import ServedModel, adapters_by_model
from kvloom_common.models.succession import SuccessionFollower, fallback_models
from kvloom_common.trust.seal import PLAIN
from lab.dst.environment import Environment
from lab.dst.rollouts.registry import RolloutClient, RolloutStore
from lab.dst.script import ScriptedSampling
from lab.dst.told import Told
from lab.dst.virtual_loop import VirtualLoop
from router.convert import fleet_to_proto
from router.core.actions import FleetChanged
from router.core.events import Request

_CARD_SECONDS: Final = 0.2
"""How long the card of a model takes at most."""

Cards = Callable[[str], ModelConfig]
"""The configuration of a model, which its card has."""


class SimEdge:
    def __init__(self, env: Environment, name: str, store: RolloutStore, cards: Cards) -> None:
        self._env = env
        self._cards = cards
        self._rng = random.Random(f"{env.scenario.seed} {name}")
        self.name = name
        self.is_harmless = env.scenario.is_harmless
        self.loop = VirtualLoop(env.timeline)
        self.registry = RolloutClient(env, store, self.loop)
        self.routes = ModelRoutes()
        self.rollouts: Mapping[str, RolloutRecord] = {}
        """The rollouts that it knows, by each name that their requests may have."""
        self._catalogue = Catalogue()
        self._fleets: dict[str, FleetState] = {}
        """By router."""
        self._served: set[str] = set()
        self.fleet = FleetState()
        """The state that all routers report."""
        self._fleet_changed = asyncio.Event()
        follower = RolloutFollower(KvloomConfig(), PLAIN, self.routes, self._on_rollouts, report=_keep_silent)
        self.loop.start(follower.follow(self.registry))
        self.loop.start(SuccessionFollower(self._catalogue, self.routes, self).watch())

    @property
    def now(self) -> float:
        return self._env.timeline.now

    @property
    def connected_since(self) -> float | None:
        return self.registry.connected_since

    # -- what it knows ------------------------------------------------------------------------------------------------

    def _on_rollouts(self, records: Collection[RolloutRecord]) -> None:
        self.rollouts = {name: record for record in records for name in record.names}
        shares = ", ".join(f"{record.new} {record.share:g}" for record in records)
        self._env.record_note(self.name, f"knows of {shares or 'no rollout'}")

    def knows(self, model: str) -> bool:
        """True when requests for the model can be sent to a router."""
        found = self._catalogue.by_name.get(model)
        return model in self._served and found is not None and found.name == model

    def take_fleet(self, router: str, fleet: FleetChanged) -> None:
        """A router has reported its fleet."""
        self._fleets[router] = fleet_to_proto(fleet)
        self._follow_fleet()

    def lose_router(self, router: str) -> None:
        if self._fleets.pop(router, None) is not None:
            self._follow_fleet()

    def _follow_fleet(self) -> None:
        """Follows the fleet as CatalogueFollower does. Cards come after a while."""
        self.fleet = merged_fleet(self._fleets.values())
        self._fleet_changed.set()
        self._fleet_changed = asyncio.Event()
        served = {model.name for model in self.fleet.models}
        if not served:
            return
        for model in sorted(self._served - served):
            self._catalogue.remove(model)
        for model in sorted(served - self._served):
            self._env.timeline.after(self._rng.random() * _CARD_SECONDS, self._take_card, model)
        self._served = served

    async def wait_fleet_change(self) -> None:
        await self._fleet_changed.wait()

    def _take_card(self, model: str) -> None:
        if model in self._served:
            config = self._cards(model)
            # Nothing here is tokenized.
            tokenizer = cast(Any, None)
            served = ServedModel(model, tokenizer, aliases=tuple(config.aliases), succeeds=config.succeeds)
            self._catalogue.add(served)

    # -- what it tells ------------------------------------------------------------------------------------------------

    def tell(self, request: Request) -> Told:
        """The versions of the model that the request names, best first. What continues an answer stays with the version
        that has begun it."""
        is_continued = request.has_output
        session = request.session_key or request.tenant
        found = [request.model] if is_continued else self.versions_of(request.model, share_key(request))
        rollout = self.rollouts.get(request.model)
        is_chosen = not is_continued and (rollout is None or self._has_both(rollout))
        assert isinstance(request.sampling, ScriptedSampling)
        models = tuple(self._found(found))
        script_key = request.sampling.script_key
        return Told(script_key, request.model, session, models, rollout, is_continued, is_chosen)

    def _has_both(self, rollout: RolloutRecord) -> bool:
        """True when both versions can be sent requests. A router may take the old one for withdrawn although it is not:
        a load report was lost, or the process has missed the end of the rollout."""
        is_withdrawn = any(model.withdrawn for model in self.fleet.models if model.name == rollout.old)
        return self.knows(rollout.old) and self.knows(rollout.new) and not is_withdrawn

    def fallback_models(self, passed: Sequence[tuple[str, KvloomError]]) -> Sequence[str]:
        return list(fallback_models(passed, self._catalogue.by_name))

    def versions_of(self, name: str, key: str) -> Sequence[str]:
        if name not in self.routes.by_name:
            return self._found([name])
        facts = RouteFacts(0, frozenset(), is_batch=False, share_key=key)
        served = adapters_by_model(self._catalogue.by_name.values())
        return self._found(self.routes.choose(name, (), facts, served).models)

    def _found(self, names: Sequence[str]) -> Sequence[str]:
        """The models that it has, each once. A router refuses a name that stands for none."""
        by_name = self._catalogue.by_name
        return list(dict.fromkeys(by_name[name].name for name in names if name in by_name)) or [names[0]]


def share_key(request: Request) -> str:
    """Returns the key by which edges and routers draw the version: the session, or else the caller."""
    return request.session_key or request.tenant


def _keep_silent(*_args: Any, **_fields: Any) -> None:
    pass
