"""Requests that wait in the router: shards are kept busy with little, the shortest prefill is sent first, no request
starves."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvloom.adapters import Adapter
from kvloom.v1.error_reason_pb2 import ErrorReason
from router.core.actions import Action, CancelOnShard, RequestEnded, SubmitAttempt
from router.core.core_config import NO_OVERLOAD_CONTROL
from router.core.events import (
    AdaptersReported,
    ClientGone,
    LoadReported,
    ShardAdapter,
    ShardDown,
    ShardLoad,
    Tick,
    TierRank,
)
from tests.fakes.core_rig import CoreRig, has, only, submitted

BIG, MIDDLE, SMALL = 40_000, 20_000, 3_000


def make_rig(num_shards: int = 1, **config: object) -> CoreRig:
    rig = CoreRig(**({"prefill_chunks": None} | config))
    for i in range(num_shards):
        rig.add_shard(f"s{i}", block_size=512, max_model_len=10**6, num_blocks=10**4, max_batch=64)
    return rig


def prompt(num_tokens: int, salt: int) -> list[int]:
    """No two prompts begin alike."""
    return [salt, *range(num_tokens - 1)]


def submit(rig: CoreRig, name: str, slot: int, num_tokens: int, **changes: object) -> list[Action]:
    return rig.submit(name, slots=(slot,), prompt_token_ids=prompt(num_tokens, slot), **changes)


def sent(actions: Sequence[Action]) -> list[str]:
    return [action.request.request_id for action in actions if isinstance(action, SubmitAttempt)]


def slot_of(rig: CoreRig, name: str) -> int:
    attempts = [a for a in rig.log if isinstance(a, SubmitAttempt) and a.request.request_id == name]
    return attempts[-1].choices[0].slot


def start(rig: CoreRig, name: str, shard_id: str = "s0") -> list[str]:
    """Its first token arrives; returns the requests that were sent then."""
    return sent(rig.start(shard_id, slot_of(rig, name)))


def test_shortest_prefill_goes_first() -> None:
    """What waits in the router can be overtaken, unlike what waits in an engine."""
    rig = make_rig()
    assert sent(submit(rig, "running", 1, BIG)) == ["running"]
    for slot, (name, size) in enumerate([("middle", MIDDLE), ("small", SMALL), ("big", BIG)], start=2):
        assert sent(submit(rig, name, slot, size)) == []
    assert rig.core.num_queued_requests == 3
    rig.now += 4.0
    assert start(rig, "running") == ["small"]
    rig.now += 0.3
    assert start(rig, "small") == ["middle"]


def test_waiting_makes_up_for_length() -> None:
    """A stream of short prompts cannot starve a long one."""
    rig = make_rig()
    submit(rig, "first", 1, BIG)
    submit(rig, "long", 2, BIG)
    for slot in range(10, 14):
        submit(rig, f"short-{slot}", slot, SMALL)
    rig.now += 4.0  # 10,000 tokens per second, the assumption for a new shard
    queue, order = start(rig, "first"), []
    for slot in range(14, 200):
        rig.now += 0.31
        queue += sent(submit(rig, f"short-{slot}", slot, SMALL))
        queue += sent(rig.handle(Tick()))
        if queue:
            order.append(queue.pop(0))
            queue += start(rig, order[-1])
            queue += sent(rig.finish("s0", slot_of(rig, order[-1])))
        if "long" in queue:
            break
    assert "long" in queue
    assert len(order) > 20, "shorter ones do go before it for a while"


def test_short_prompts_fill_a_step() -> None:
    """Prompts that fit into one engine step together are not sent one by one."""
    rig = make_rig()
    assert [sent(submit(rig, f"r{i}", i, 200)) for i in range(5)] == [[f"r{i}"] for i in range(5)]


def test_shard_gets_more_when_it_must_be_nearly_done() -> None:
    """The clock opens a shard too: waiting for the first token would leave it idle for a round trip."""
    rig = make_rig()
    submit(rig, "a", 1, BIG)
    submit(rig, "b", 2, BIG)
    begun = rig.now
    for _ in range(20):
        deadline = rig.core.next_deadline()
        assert deadline is not None
        assert deadline > rig.now
        rig.now = deadline
        if sent(rig.handle(Tick())) == ["b"]:
            break
    assert rig.core.num_queued_requests == 0
    assert 5.5 < rig.now - begun < 7.5, (
        "40,000 tokens at the 10,000 a second that are assumed of a new shard, and attention"
    )


def test_free_shard_takes_over_what_waits_for_another() -> None:
    """A request that is not sent yet moves to a shard without work."""
    rig = make_rig(2)
    first, _ = submitted(submit(rig, "a", 1, BIG))
    second, _ = submitted(submit(rig, "b", 2, MIDDLE))
    assert {first, second} == {"s0", "s1"}
    for slot in range(3, 7):
        submit(rig, f"r{slot}", slot, BIG)
    rig.now += 2.0
    taken = start(rig, "b", second)
    rig.now += 4.0
    taken += start(rig, taken[0], second)
    rig.now += 4.0
    taken += start(rig, taken[1], second)
    assert len(taken) >= 3, "the shard that is free never stands idle while others wait"


def test_cancelled_while_waiting_costs_the_shard_nothing() -> None:
    """The shard gets neither a submit nor a cancel."""
    rig = make_rig()
    submit(rig, "a", 1, BIG)
    submit(rig, "b", 2, BIG, client_id="leaver")
    actions = rig.handle(ClientGone("leaver"))
    assert only(actions, RequestEnded).shard_id == ""
    assert not has(actions, CancelOnShard)
    assert rig.core.num_queued_requests == 0


def test_deadline_ends_what_waits() -> None:
    """Work that arrived too late to be of use never reaches an engine."""
    rig = make_rig(max_queue_seconds=1.0)
    submit(rig, "a", 1, BIG)
    submit(rig, "b", 2, BIG)
    rig.now += 1.5
    assert only(rig.handle(Tick()), RequestEnded).error_reason == ErrorReason.ERROR_REASON_QUEUE_TIMEOUT


def test_queue_of_a_lost_shard_is_placed_again() -> None:
    """Requests that wait for a shard that has disconnected are not lost."""
    rig = make_rig(2)
    for slot in range(1, 7):
        submit(rig, f"r{slot}", slot, BIG)
    rig.handle(ShardDown("s1"))
    rig.handle(LoadReported("s0", ShardLoad()))
    assert rig.core.num_queued_requests == 4, "the one that had run there went to the other shard at once"
    assert all(a.shard_id == "s0" for a in rig.log[-1:] if isinstance(a, SubmitAttempt))


def test_draining_shard_loses_its_queue() -> None:
    """No request waits for a draining shard."""
    rig = make_rig(2)
    for slot in range(1, 7):
        submit(rig, f"r{slot}", slot, BIG)
    rig.handle(LoadReported("s1", ShardLoad(draining=True)))
    rig.now += 30.0
    late = [name for name in sent(rig.handle(Tick())) if slot_of(rig, name) is not None]
    assert late
    assert {a.shard_id for a in rig.log if isinstance(a, SubmitAttempt) and a.request.request_id in late} == {"s0"}


def test_tenants_take_turns_in_a_queue() -> None:
    """Short prompts of one tenant do not push out another tenant's for ever: turns come before length."""
    rig = make_rig()
    submit(rig, "a", 1, BIG, tenant="x")
    for slot in range(2, 6):
        submit(rig, f"x{slot}", slot, SMALL, tenant="x")
    submit(rig, "y", 9, MIDDLE, tenant="y")
    rig.now += 4.0
    order = start(rig, "a")
    rig.now += 0.4
    order += start(rig, order[-1])
    assert "y" in order


def test_other_routers_loosen_the_hold() -> None:
    """What other routers keep back cannot be seen: a place in the engine's queue is then worth more than a free
    choice."""
    alone, shared = make_rig(), make_rig()
    shared.handle(LoadReported("s0", ShardLoad(num_running=1, num_available_blocks=10_000)))
    counts = [sum(bool(sent(submit(rig, f"r{slot}", slot, SMALL))) for slot in range(1, 8)) for rig in (alone, shared)]
    assert counts[0] < counts[1]


def test_what_is_cancelled_as_its_shard_returns_cancels_nothing_there() -> None:
    """A router learns that a shard is a new process when a request on the old one is overdue. The slot of that request
    belongs to another one in the new process, which was cancelled in its place."""
    rig = CoreRig()
    rig.add_shard(max_batch=1)
    rig.submit("overdue", slots=(1,), timeout_seconds=1.0)
    rig.submit("lost", slots=(2,))
    rig.submit("waiting", slots=(3,))
    rig.now += 2.0
    mark = len(rig.log)
    rig.add_shard(max_batch=1, incarnation_id="2")
    assert sorted(sent(rig.log[mark:])) == ["lost", "waiting"]
    assert not has(rig.log[mark:], CancelOnShard)


def test_what_no_shard_can_run_keeps_no_batch_request_waiting() -> None:
    """A placed request that has lost its adapter waits for it; the shard beside it must not stand idle meanwhile."""
    rig = make_rig(overload=msgspec.structs.replace(NO_OVERLOAD_CONTROL, outage_patience_seconds=5.0))
    adapter = Adapter("lawyer", "1")
    rig.handle(AdaptersReported("s0", [ShardAdapter("lawyer", "1", False, 8)], rig.now))
    submit(rig, "running", 1, BIG)
    submit(rig, "stuck", 2, MIDDLE, tier=TierRank.BATCH, adapter=adapter)
    rig.handle(AdaptersReported("s0", [], rig.now))
    assert sent(submit(rig, "batch", 3, SMALL, tier=TierRank.BATCH)) == []
    rig.now += 4.0
    assert start(rig, "running") == ["batch"]
    assert rig.core.num_queued_requests == 1
