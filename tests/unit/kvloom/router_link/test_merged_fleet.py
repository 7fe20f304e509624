"""What an edge knows of the models, from the reports of several routers."""

from __future__ import annotations

from kvloom.router_link.members import merged_fleet
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo


def test_a_model_is_withdrawn_as_soon_as_one_router_knows_it() -> None:
    """That router refuses new requests already, and it may be the one that gets them. The other one has more shards at
    this moment, so that what it says of them is taken."""
    early = FleetState(models=[ModelInfo(name="m", num_ready_shards=1, withdrawn=True)])
    late = FleetState(models=[ModelInfo(name="m", num_ready_shards=2), ModelInfo(name="n", num_ready_shards=1)])
    for fleets in ([early, late], [late, early]):
        found = {model.name: (model.num_ready_shards, model.withdrawn) for model in merged_fleet(fleets).models}
        assert found == {"m": (2, True), "n": (1, False)}
    assert not late.models[0].withdrawn
