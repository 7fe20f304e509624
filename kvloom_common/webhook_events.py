"""The events that webhooks can tell of: what a request may name, and what the orchestrator sends."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

WebhookEvent: TypeAlias = Literal[
    "batch.cancelled",
    "batch.completed",
    "batch.expired",
    "batch.failed",
    "response.cancelled",
    "response.completed",
    "response.failed",
    "response.incomplete",
]
WEBHOOK_EVENTS: Final[tuple[str, ...]] = get_args(WebhookEvent)
