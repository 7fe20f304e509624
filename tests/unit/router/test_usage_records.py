"""Credits: what was metered and lost on its way to the client, and nothing else."""

from __future__ import annotations

from kvloom.v1.generation_pb2 import FINISH_REASON_CANCELLED
from router.core.actions import RequestEnded
from router.usage_records import KEEP_SECONDS, Credit, UsageRecords


def ended(name: str, num_tokens: int, client_id: str = "edge#1") -> RequestEnded:
    return RequestEnded(
        request_id=name,
        tenant="t",
        model="m",
        shard_id="s",
        num_attempts=1,
        reason=FINISH_REASON_CANCELLED,
        error_reason=0,
        num_prompt_tokens=3,
        num_cached_tokens=0,
        num_output_tokens=num_tokens,
        queue_time_seconds=0.0,
        ttft_seconds=0.1,
        e2e_latency_seconds=0.2,
        client_id=client_id,
    )


def usage_of_a_broken_stream(**num_tokens: int) -> UsageRecords:
    bills = UsageRecords()
    bills.open("edge#1", "link")
    for name, count in num_tokens.items():
        bills.request_ended(ended(name, count))
    bills.close("edge#1")
    return bills


def test_what_did_not_arrive_is_credited() -> None:
    """Also all of it; and nothing of an answer that came whole or is not spoken of."""
    bills = usage_of_a_broken_stream(a=5, b=7, c=2, d=9)
    found = bills.settle("link", {"a": 4, "b": 0, "c": 2})
    assert found == [Credit("a", "t", "m", 1), Credit("b", "t", "m", 7)]


def test_said_twice_it_is_credited_once() -> None:
    """A client repeats its list until a router has answered."""
    bills = usage_of_a_broken_stream(a=5)
    assert bills.settle("link", {"a": 4})
    assert not bills.settle("link", {"a": 4})


def test_an_attempt_that_never_came_is_not_taken_for_the_one_before() -> None:
    """Lost, settled, asked for again here, and lost again on its way: the second loss says that nothing came, and that
    is no word about what the first attempt has delivered."""
    bills = usage_of_a_broken_stream(a=6)
    assert bills.settle("link", {"a": 2}) == [Credit("a", "t", "m", 4)]
    assert not bills.settle("link", {"a": 0})


def test_only_one_s_own_bills_are_credited() -> None:
    """Another client may use the same names, and what is not remembered is no reason to credit anything."""
    bills = usage_of_a_broken_stream(a=5)
    assert not bills.settle("another link", {"a": 0})
    assert not bills.settle("link", {"z": 0})
    bills.request_ended(ended("b", 5, client_id="generate#2"))
    assert not bills.settle("link", {"b": 0})


def test_a_name_that_is_used_again_has_its_latest_bill() -> None:
    """Its earlier bearer's end had arrived."""
    bills = usage_of_a_broken_stream(a=50)
    bills.open("edge#2", "link")
    bills.request_ended(ended("a", 3, client_id="edge#2"))
    bills.close("edge#2")
    assert bills.settle("link", {"a": 2}) == [Credit("a", "t", "m", 1)]


def test_memory_is_bounded() -> None:
    """The oldest bills are forgotten; who asks for them late gets nothing wrong."""
    bills = UsageRecords(max_records=2)
    bills.open("edge#1", "link")
    for name in "abc":
        bills.request_ended(ended(name, 5))
    assert [credit.request_id for credit in bills.settle("link", {"a": 0, "b": 0, "c": 0})] == ["b", "c"]


def test_bills_are_forgotten_with_time_but_not_by_a_router_that_stood_still() -> None:
    """A busy router must not fill up to the last bill that there is room for; one that hung for an hour must still know
    what it billed before, for its clients have gone on elsewhere meanwhile."""
    now = 0.0
    bills = UsageRecords(clock=lambda: now)
    bills.open("edge#1", "link")
    bills.request_ended(ended("a", 5))
    now += 3600.0
    for name in ("b", "c"):
        bills.request_ended(ended(name, 5))
    assert [credit.request_id for credit in bills.settle("link", {"a": 4, "b": 4})] == ["a", "b"]
    now += KEEP_SECONDS
    bills.request_ended(ended("d", 5))
    assert [credit.request_id for credit in bills.settle("link", {"c": 0, "d": 0})] == ["c", "d"]
    for name in ("e", "f"):
        now += KEEP_SECONDS
        bills.request_ended(ended(name, 5))
    bills.request_ended(ended("g", 5))
    now += KEEP_SECONDS
    bills.request_ended(ended("h", 5))
    now += KEEP_SECONDS
    bills.request_ended(ended("i", 5))
    assert not bills.settle("link", {"e": 0, "g": 0})
