"""`kvloom-lab chaos` compares usage records with deliveries. Wrong records are planted here."""

from __future__ import annotations

from pathlib import Path

from lab.chaos.checking.metering import Delivery, LoggedUsage, MeteringResult, compare_metering, parse_usage_record
from lab.chaos.checking.usage_log import UsageLog
from tools.supervisor.logs.bounded_log import BoundedLog


def usage_record(request_id: str, num_tokens: int) -> LoggedUsage:
    return LoggedUsage(request_id=request_id, num_output_tokens=num_tokens, outcome="stop")


def delivery(
    request_id: str = "a", *, seen: int = 10, complete: bool = True, may_miss_usage_record: bool = False
) -> Delivery:
    return Delivery(
        (request_id,), seen, num_due_tokens=10, is_complete=complete, may_miss_usage_record=may_miss_usage_record
    )


def is_consistent(result: MeteringResult) -> bool:
    return not result.over and not result.under


def test_an_answer_metered_once_is_right():
    """Two routers may have metered one part each."""
    assert compare_metering([delivery()], [usage_record("a", 10)]).num_exact == 1
    assert compare_metering([delivery()], [usage_record("a", 4), usage_record("a", 6)]).num_exact == 1


def test_an_answer_metered_twice_is_found():
    """A second router may meter again what the first has metered, in whole or in part."""
    assert compare_metering([delivery()], [usage_record("a", 10), usage_record("a", 10)]).over
    assert compare_metering([delivery()], [usage_record("a", 4), usage_record("a", 10)]).over


def test_an_answer_metered_too_little_is_found():
    """Tokens may be missing only if the router was killed before it had recorded them."""
    assert compare_metering([delivery()], [usage_record("a", 9)]).under
    assert compare_metering([delivery()], []).under
    lost = compare_metering([delivery(may_miss_usage_record=True)], [])
    assert is_consistent(lost)
    assert lost.num_lost_records == 1


def test_a_broken_answer_is_metered_for_at_least_what_was_received():
    """More tokens may have been in flight to the client, but never more than the answer has."""
    assert is_consistent(compare_metering([delivery(seen=4, complete=False)], [usage_record("a", 6)]))
    assert compare_metering([delivery(seen=4, complete=False)], [usage_record("a", 3)]).under
    assert compare_metering([delivery(seen=4, complete=False)], [usage_record("a", 11)]).over


def test_usage_records_are_distinguished_from_other_lines():
    """A router's log has other lines too."""
    line = b'{"request_id": "a", "num_output_tokens": 3, "outcome": "stop", "event": "request_ended", "level": "info"}'
    assert parse_usage_record(line) == usage_record("a", 3)
    assert parse_usage_record(b'{"event": "shard_joined"}') is None
    assert parse_usage_record(b"Traceback: request ended") is None


def test_usage_records_are_read_across_a_log_rotation(tmp_path: Path):
    """Lines that were written to the old file since the last read must not be missed."""
    path = tmp_path / "router.log"
    log, usage_log = BoundedLog(path, max_bytes=400), UsageLog([path])
    for number in range(20):
        line = f'{{"request_id": "r{number}", "num_output_tokens": 1, "outcome": "stop", "event": "request_ended"}}\n'
        log.write(line.encode())
        if number % 3 == 0:
            usage_log.read()
    log.close()
    usage_log.read()
    assert [one.request_id for one in usage_log.records] == [f"r{number}" for number in range(20)]


def test_a_credit_cancels_tokens_that_did_not_arrive():
    """The lost router had metered a token that the next one generated again."""
    line = b'{"request_id": "a", "num_credited_tokens": 1, "event": "request_credited"}'
    credit = parse_usage_record(line)
    assert credit is not None
    result = compare_metering([delivery()], [usage_record("a", 5), usage_record("a", 6), credit])
    assert is_consistent(result)
    assert (result.num_exact, result.num_metered_tokens, result.num_credited_tokens) == (1, 10, 1)
    assert compare_metering([delivery()], [usage_record("a", 5), usage_record("a", 6)]).over
    assert compare_metering([delivery()], [usage_record("a", 5), usage_record("a", 5), credit]).under
