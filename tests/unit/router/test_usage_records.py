"""Exactly the tokens that were metered and lost on their way to the client are credited."""

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
    records = UsageRecords()
    records.open("edge#1", "link")
    for name, count in num_tokens.items():
        records.request_ended(ended(name, count))
    records.close("edge#1")
    return records


def test_what_did_not_arrive_is_credited() -> None:
    """An answer may be lost partly or completely. Answers that arrived, or are not reported, are not credited."""
    records = usage_of_a_broken_stream(a=5, b=7, c=2, d=9)
    found = records.settle("link", {"a": 4, "b": 0, "c": 2})
    assert found == [Credit("a", "t", "m", 1), Credit("b", "t", "m", 7)]


def test_a_repeated_report_is_credited_once() -> None:
    """A client repeats its report until a router has answered."""
    records = usage_of_a_broken_stream(a=5)
    assert records.settle("link", {"a": 4})
    assert not records.settle("link", {"a": 4})


def test_an_attempt_that_never_arrived_is_not_taken_for_the_one_before() -> None:
    """A request is lost, settled, submitted here again, and lost again on its way. The second report is that nothing
    was received, which does not concern the tokens that the first attempt delivered."""
    records = usage_of_a_broken_stream(a=6)
    assert records.settle("link", {"a": 2}) == [Credit("a", "t", "m", 4)]
    assert not records.settle("link", {"a": 0})


def test_only_the_requests_of_the_same_link_are_credited() -> None:
    """Another client may use the same ids, and requests without a record are not credited."""
    records = usage_of_a_broken_stream(a=5)
    assert not records.settle("another link", {"a": 0})
    assert not records.settle("link", {"z": 0})
    records.request_ended(ended("b", 5, client_id="generate#2"))
    assert not records.settle("link", {"b": 0})


def test_a_reused_id_has_its_latest_usage_record() -> None:
    """The end of the earlier request of that id had arrived."""
    records = usage_of_a_broken_stream(a=50)
    records.open("edge#2", "link")
    records.request_ended(ended("a", 3, client_id="edge#2"))
    records.close("edge#2")
    assert records.settle("link", {"a": 2}) == [Credit("a", "t", "m", 1)]


def test_memory_is_bounded() -> None:
    """The oldest records are forgotten, and a late report for them credits nothing."""
    records = UsageRecords(max_records=2)
    records.open("edge#1", "link")
    for name in "abc":
        records.request_ended(ended(name, 5))
    assert [credit.request_id for credit in records.settle("link", {"a": 0, "b": 0, "c": 0})] == ["b", "c"]


def test_records_expire_but_not_while_the_router_is_suspended() -> None:
    """A busy router must not keep all the records that there is room for. One that was suspended for an hour must still
    have its earlier records, because its clients have resumed elsewhere meanwhile."""
    now = 0.0
    records = UsageRecords(clock=lambda: now)
    records.open("edge#1", "link")
    records.request_ended(ended("a", 5))
    now += 3600.0
    for name in ("b", "c"):
        records.request_ended(ended(name, 5))
    assert [credit.request_id for credit in records.settle("link", {"a": 4, "b": 4})] == ["a", "b"]
    now += KEEP_SECONDS
    records.request_ended(ended("d", 5))
    assert [credit.request_id for credit in records.settle("link", {"c": 0, "d": 0})] == ["c", "d"]
    for name in ("e", "f"):
        now += KEEP_SECONDS
        records.request_ended(ended(name, 5))
    records.request_ended(ended("g", 5))
    now += KEEP_SECONDS
    records.request_ended(ended("h", 5))
    now += KEEP_SECONDS
    records.request_ended(ended("i", 5))
    assert not records.settle("link", {"e": 0, "g": 0})
