"""In which order a router tries the safety services of its fleet."""

from __future__ import annotations

from kvloom_common.discovery.process_finder import MAX_CANDIDATES, in_order

ANNOUNCED = [f"10.0.0.{number}:4100" for number in range(8)]


def test_the_service_of_the_own_machine_comes_first_and_only_once():
    """Another machine's service costs a round trip per prompt."""
    found = in_order(ANNOUNCED[3], ANNOUNCED, "router")
    assert found[0] == ANNOUNCED[3]
    assert sorted(found) == ANNOUNCED
    assert in_order("", [], "router") == []


def test_routers_that_lose_a_service_spread_over_the_others():
    """Otherwise the first one would get the prompts of all of them."""
    firsts = {in_order("", ANNOUNCED, f"router-{number}")[0] for number in range(40)}
    assert len(firsts) > 4
    assert in_order("", ANNOUNCED, "router-1") == in_order("", reversed(ANNOUNCED), "router-1")


def test_the_number_of_candidates_is_bounded():
    """A round over all of them must end before the patience of the requests does."""
    assert len(in_order("", [f"host-{number}:1" for number in range(100)], "router")) == MAX_CANDIDATES
