"""A router that drains: running requests continue until its deadline, and then end so that another router resumes
them."""

from __future__ import annotations

from kvloom.v1.error_reason_pb2 import ErrorReason
from router.core.actions import CancelOnShard, RequestEnded
from router.core.events import DrainEnded, DrainStarted
from tests.fakes.core_rig import CoreRig, has, sent

DRAINING = ErrorReason.ERROR_REASON_DRAINING


def test_what_runs_and_what_waits_ends_as_draining_at_the_deadline() -> None:
    """Delivered tokens are counted, and nothing is left on the shards."""
    rig = CoreRig()
    rig.add_shard(max_batch=2)
    rig.submit("runs", slots=(1, 2))
    rig.submit("waits", slots=(3,))
    rig.start("s0", 1)
    rig.handle(DrainStarted())
    assert not sent(rig.step("s0", (1, [8], "b"))).finishes
    actions = rig.handle(DrainEnded())
    ended = {finish.slot: finish for finish in sent(actions).finishes}
    assert set(ended) == {1, 2, 3}
    assert all(finish.error is not None and finish.error.reason == DRAINING for finish in ended.values())
    assert ended[1].num_output_tokens == 2
    assert has(actions, CancelOnShard)
    assert {action.request_id for action in actions if isinstance(action, RequestEnded)} == {"runs", "waits"}


def test_new_requests_are_refused_as_draining_from_the_start() -> None:
    """Requests that were in transit when the drain began must go elsewhere too."""
    rig = CoreRig()
    rig.add_shard()
    rig.handle(DrainStarted())
    (finish,) = sent(rig.submit("late")).finishes
    assert finish.error is not None
    assert finish.error.reason == DRAINING
