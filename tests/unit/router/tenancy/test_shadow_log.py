"""What is logged about limits in shadow mode."""

from __future__ import annotations

from structlog.testing import capture_logs

from router.core.lease_messages import LimitCount
from router.tenancy.lease_client import LOG_SECONDS, ShadowLog


def test_each_account_and_limit_is_logged_once_a_minute_with_its_number_of_requests() -> None:
    """The operator must see whom a limit would hit, and a busy tenant must not fill the log."""
    now = [0.0]
    log = ShadowLog(lambda: now[0])
    busy = LimitCount("tokens_per_day", "would_refuse", "tenant:acme/web")
    with capture_logs() as lines:
        for _ in range(5):
            log.note(busy)
        log.note(LimitCount("tokens_per_day", "would_cap", "key:k1"))
        now[0] += LOG_SECONDS
        log.note(busy)
    shown = [(line["account"], line["limit"], line["outcome"], line["num_requests"]) for line in lines]
    assert shown == [
        ("tenant:acme/web", "tokens_per_day", "would_refuse", 1),
        ("key:k1", "tokens_per_day", "would_cap", 1),
        ("tenant:acme/web", "tokens_per_day", "would_refuse", 5),
    ]
