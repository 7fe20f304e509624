"""Which of several routers gets a request."""

from __future__ import annotations

from kvloom.router_link.members import MAX_SILENT_SECONDS, SLACK_REQUESTS, RouterView, pick_router, salt_of


def view(name: str, num_in_flight: int = 0, is_ready: bool = True) -> RouterView:
    return RouterView(name, salt_of(name), is_ready, num_in_flight)


def test_without_routers_none_is_picked() -> None:
    """The caller reports the reason."""
    assert pick_router([], b"") is None


def test_without_a_key_the_one_with_the_least_under_way() -> None:
    """Short prompts, which have no affinity, spread evenly."""
    picked = pick_router([view("a", 3), view("b", 1), view("c", 2)], b"")
    assert picked is not None
    assert picked.address == "b"


def test_a_router_without_a_shard_for_the_model_is_the_last_choice() -> None:
    """A router that has just started would reject what another one could serve."""
    picked = pick_router([view("a", 0, is_ready=False), view("b", 100)], b"key")
    assert picked is not None
    assert picked.address == "b"
    only = pick_router([view("a", 0, is_ready=False)], b"key")
    assert only is not None
    assert only.address == "a"


def test_a_router_that_is_silent_for_long_gets_nothing_new() -> None:
    """A silent router may hang, and new requests would wait until that is noticed. If all routers are silent, or the
    others have no shard, silence is ignored."""
    silent, well = view("a")._replace(silent_seconds=MAX_SILENT_SECONDS + 0.1), view("b", 100)
    for routers, picked in (
        ([silent, well], "b"),
        ([silent._replace(silent_seconds=MAX_SILENT_SECONDS), well], "a"),
        ([silent, well._replace(silent_seconds=9.0)], "a"),
        ([silent, well._replace(is_ready=False)], "a"),
    ):
        found = pick_router(routers, b"")
        assert found is not None
        assert found.address == picked


def test_a_key_stays_where_it_is_and_only_a_lost_router_s_keys_move() -> None:
    """A router knows what it has placed lately; the keys spread over all routers."""
    names = ["a", "b", "c", "d"]
    before = {}
    for i in range(400):
        picked = pick_router([view(name) for name in names], f"key {i}".encode())
        assert picked is not None
        before[i] = picked.address
    assert all(60 < list(before.values()).count(name) < 140 for name in names)
    for i, address in before.items():
        picked = pick_router([view(name) for name in names if name != "c"], f"key {i}".encode())
        assert picked is not None
        assert picked.address == address or address == "c"


def test_affinity_ends_where_a_router_has_too_much() -> None:
    """One prompt that all clients send must not load a single router."""
    loads = {"a": 0, "b": 0, "c": 0}
    for _ in range(300):
        picked = pick_router([view(name, load) for name, load in loads.items()], b"the same prompt")
        assert picked is not None
        loads[picked.address] += 1
    assert max(loads.values()) <= 1.25 * 100 + SLACK_REQUESTS + 1
