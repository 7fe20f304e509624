"""Sends one message to an endpoint. It follows no redirects, uses no proxy, and connects to public addresses only."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Final

import aiohttp
from standardwebhooks import Webhook

from kvloom_common.transport.public_addresses import public_socket

TIMEOUT_SECONDS: Final = 5.0
"""For everything, from the resolution of the name to the head of the answer."""
_MAX_SHOWN_CHARS: Final = 120


class NotSentError(Exception):
    """There was no answer. The message says why, and nothing of what is at the address."""


async def send(url: str, event_id: str, body: bytes, secrets: Sequence[str], *, may_be_private: bool) -> int:
    """The status code of the answer. `secrets`: each signs the message. Raises NotSentError."""
    sent_at = datetime.datetime.now(datetime.UTC)
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "kvloom-webhooks",
        "webhook-id": event_id,
        "webhook-timestamp": str(int(sent_at.timestamp())),
        "webhook-signature": " ".join(Webhook(secret).sign(event_id, sent_at, body.decode()) for secret in secrets),
    }
    connector = aiohttp.TCPConnector(force_close=True, socket_factory=None if may_be_private else public_socket)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False, auto_decompress=False) as http,
            http.post(url, data=body, headers=headers, allow_redirects=False) as answer,
        ):
            return answer.status
    except TimeoutError as error:
        raise NotSentError("it has not answered in time") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NotSentError(f"it cannot be reached ({type(error).__name__})"[:_MAX_SHOWN_CHARS]) from error
