"""The ledger of `kvloom chaos`, with wrong bills planted."""

from __future__ import annotations

from pathlib import Path

from tools.chaos.bill_log import UsageLog
from tools.chaos.ledger import Delivery, Settlement, UsageRecord, parse_usage_record, settle
from tools.supervisor.bounded_log import BoundedLog


def bill(request_id: str, num_tokens: int) -> UsageRecord:
    return UsageRecord(request_id=request_id, num_output_tokens=num_tokens, outcome="stop")


def delivery(
    request_id: str = "a", *, seen: int = 10, complete: bool = True, may_miss_usage_record: bool = False
) -> Delivery:
    return Delivery(
        (request_id,), seen, num_due_tokens=10, is_complete=complete, may_miss_usage_record=may_miss_usage_record
    )


def is_settled(result: Settlement) -> bool:
    return not result.over and not result.under


def test_an_answer_billed_once_is_settled():
    """Also by two routers, each for its part."""
    assert settle([delivery()], [bill("a", 10)]).num_exact == 1
    assert settle([delivery()], [bill("a", 4), bill("a", 6)]).num_exact == 1


def test_an_answer_billed_twice_is_found():
    """A second router that bills what the first has billed, in whole or in part."""
    assert settle([delivery()], [bill("a", 10), bill("a", 10)]).over
    assert settle([delivery()], [bill("a", 4), bill("a", 10)]).over


def test_an_answer_billed_too_little_is_found():
    """Unless its router was killed, which takes what it had not yet billed with it."""
    assert settle([delivery()], [bill("a", 9)]).under
    assert settle([delivery()], []).under
    lost = settle([delivery(may_miss_usage_record=True)], [])
    assert is_settled(lost)
    assert lost.num_lost_bills == 1


def test_what_was_broken_off_is_billed_for_at_least_what_was_seen():
    """More may have been on its way to the client, but never more than there is."""
    assert is_settled(settle([delivery(seen=4, complete=False)], [bill("a", 6)]))
    assert settle([delivery(seen=4, complete=False)], [bill("a", 3)]).under
    assert settle([delivery(seen=4, complete=False)], [bill("a", 11)]).over


def test_bills_are_told_from_other_lines():
    """A router's log has more in it."""
    line = b'{"request_id": "a", "num_output_tokens": 3, "outcome": "stop", "event": "request ended", "level": "info"}'
    assert parse_usage_record(line) == bill("a", 3)
    assert parse_usage_record(b'{"event": "shard connected"}') is None
    assert parse_usage_record(b"Traceback: request ended") is None


def test_bills_are_read_across_a_log_that_begins_a_new_file(tmp_path: Path):
    """Logs are bounded: what was written to the old file since the last look must not be missed."""
    path = tmp_path / "router.log"
    log, bills = BoundedLog(path, max_bytes=400), UsageLog([path])
    for number in range(20):
        line = f'{{"request_id": "r{number}", "num_output_tokens": 1, "outcome": "stop", "event": "request ended"}}\n'
        log.write(line.encode())
        if number % 3 == 0:
            bills.read()
    log.close()
    bills.read()
    assert [one.request_id for one in bills.bills] == [f"r{number}" for number in range(20)]


def test_a_credit_takes_back_what_did_not_arrive():
    """The router that was lost metered a token that the next one made again."""
    line = b'{"request_id": "a", "num_credited_tokens": 1, "event": "request credited"}'
    credit = parse_usage_record(line)
    assert credit is not None
    result = settle([delivery()], [bill("a", 5), bill("a", 6), credit])
    assert is_settled(result)
    assert (result.num_exact, result.num_metered_tokens, result.num_credited_tokens) == (1, 10, 1)
    assert settle([delivery()], [bill("a", 5), bill("a", 6)]).over
    assert settle([delivery()], [bill("a", 5), bill("a", 5), credit]).under
