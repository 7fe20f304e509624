"""Notices about budgets, to a real HTTP server."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import CollectorRegistry
from standardwebhooks import Webhook, WebhookVerificationError

from control.usage.ledger import store
from control.usage.metrics import UsageMetrics
from control.usage.webhook import AlertSender
from kvloom_common.tenancy.usage_stream import UsageEntry
from tests.fakes.usage import NOON, usage_database, usage_record

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Receiver(HTTPServer):
    """Answers with `statuses` in turn, and then with 204."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses: list[int] = []
        self.received: list[tuple[bytes, dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/budgets"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append((body, {name.lower(): value for name, value in self.headers.items()}))
        status = self.server.statuses.pop(0) if self.server.statuses else 204
        self.send_response(status)
        if status == 302:
            self.send_header("location", self.server.url)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        del format, args


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_notice_is_signed_and_sent_once(database_url: str, receiver: Receiver) -> None:
    """Whoever receives it must be able to tell that it is from this fabric, and hears of each threshold once."""
    async with usage_database(database_url, monthly_budget_nanos=100) as database:
        sender = AlertSender(database, [receiver.url], SECRET, UsageMetrics(CollectorRegistry()))
        await store(database, [UsageEntry("r0/1", (usage_record(1, "a", cost_nanos=85),))], [80, 100], now=NOON)
        await sender.send_due(NOON)
        await sender.send_due(NOON + 1)
    [(body, headers)] = receiver.received
    message = Webhook(SECRET).verify(body, headers)
    assert message["type"] == "budget.threshold_reached"
    assert message["data"] == {
        "account": "tenant:acme/search", "unit": "nanos", "period": "2025-11", "percent": 80, "spent": 85, "limit": 100,
    }  # fmt: skip


async def test_a_notice_is_sent_again_later_and_redirects_are_not_followed(
    database_url: str, receiver: Receiver
) -> None:
    """A receiver may be down for a while; and one that redirects could make control call any address."""
    async with usage_database(database_url, monthly_budget_nanos=100) as database:
        sender = AlertSender(database, [receiver.url], SECRET, UsageMetrics(CollectorRegistry()))
        await store(database, [UsageEntry("r0/1", (usage_record(1, "a", cost_nanos=85),))], [80], now=NOON)
        receiver.statuses = [302, 500]
        await sender.send_due(NOON)
        assert len(receiver.received) == 1
        await sender.send_due(NOON + 1)
        assert len(receiver.received) == 1, "too early"
        await sender.send_due(NOON + 3600)
        await sender.send_due(NOON + 2 * 3600)
        await sender.send_due(NOON + 3 * 3600)
    assert len(receiver.received) == 3
    assert len({headers["webhook-id"] for _, headers in receiver.received}) == 1


async def test_a_notice_cannot_be_replayed_or_altered(database_url: str, receiver: Receiver) -> None:
    """The signature covers id, time and body, so a recorded notice is worth nothing later, and none under another id.
    A notice that is tried again has its id and a new time."""
    async with usage_database(database_url, monthly_budget_nanos=100) as database:
        sender = AlertSender(database, [receiver.url], SECRET, UsageMetrics(CollectorRegistry()))
        await store(database, [UsageEntry("r0/1", (usage_record(1, "a", cost_nanos=85),))], [80], now=NOON)
        receiver.statuses = [500]
        await sender.send_due(NOON)
        await sender.send_due(NOON + 3600)
    (_, first), (body, headers) = receiver.received
    assert first["webhook-id"] == headers["webhook-id"]
    verifier = Webhook(SECRET)
    assert verifier.verify(body, headers)
    sent_at = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=301)  # as if it were five minutes later
    late = {
        "webhook-timestamp": str(int(sent_at.timestamp())),
        "webhook-signature": verifier.sign(headers["webhook-id"], sent_at, body.decode()),
    }
    for altered in (
        {**headers, **late},
        {**headers, "webhook-timestamp": str(int(headers["webhook-timestamp"]) + 1)},
        {**headers, "webhook-id": "msg_another"},
    ):
        with pytest.raises(WebhookVerificationError):
            verifier.verify(body, altered)
    with pytest.raises(WebhookVerificationError):
        verifier.verify(body.replace(b"85", b"99"), headers)
