"""Models that routes and shadows name and that nothing serves: requests would pass them by without a word."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvloom_common.config import ConfigError, KvloomConfig
from kvloom_common.models.configured import configured_models
from kvloom_common.models.model_routes import models_of
from kvloom_common.trust.fabric_trust import FabricTrust
from tools.supervisor.readiness import edge_reason
from tools.supervisor.supervised_process import ProcessState, ProcessStatus


def names_elsewhere(config: KvloomConfig) -> dict[str, str]:
    """The models that routes and shadows name and that this machine does not have, each with the first place that
    names it. Other machines of the fleet may have them."""
    try:
        models = configured_models(config)
    except ConfigError:
        models = []
    own = {name for model in models for name in (model.name, *model.aliases, model.succeeds)}
    named = {name: f"the route {route.name}" for route in reversed(config.routes) for name in models_of(route)}
    for shadow in reversed(config.shadows):
        named |= {shadow.candidate: f"the shadow of {shadow.model}", shadow.model: f"the shadow {shadow.candidate}"}
    return {name: place for name, place in named.items() if name.partition(":")[0] not in own and name not in own}


async def unserved_models(config: KvloomConfig, statuses: Sequence[ProcessStatus], trust: FabricTrust) -> list[str]:
    """One sentence for each such model that no edge of this machine can serve either. Without an edge here it is not
    known which names other machines serve."""
    edges = [status for status in statuses if status.role == "edge" and status.state == ProcessState.READY]
    named = names_elsewhere(config)
    if not edges or not named:
        return []
    reasons = await asyncio.gather(*(edge_reason(edges[0], trust, name) for name in named))
    return [
        f"{place} names the model {name}, which nothing serves"
        for (name, place), reason in zip(named.items(), reasons, strict=True)
        if reason.startswith(f"{edges[0].name}: ")  # and not because it does not answer
    ]
