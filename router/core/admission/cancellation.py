"""Cancellation by clients, and clients that disconnect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvloom.v1.generation_pb2 import FINISH_REASON_CANCELLED
from router.core import events as ev
from router.core.action_buffer import ActionBuffer
from router.core.relay.lifecycle import Lifecycle


class Cancellation:
    """Handles the events by which requests end before their answers."""

    def __init__(self, lifecycle: Lifecycle, action_buffer: ActionBuffer) -> None:
        self._lifecycle = lifecycle
        self._action_buffer = action_buffer
        handlers: dict[type, Callable[[Any, float], None]] = {
            ev.SlotsCancelled: self._on_slots_cancelled,
            ev.RequestCancelled: self._on_request_cancelled,
            ev.ClientGone: self._on_client_gone,
        }
        self.handlers = handlers

    def _on_slots_cancelled(self, event: ev.SlotsCancelled, now: float) -> None:
        client = self._lifecycle.clients.get(event.client_id)
        if client is None:
            return
        for slot in event.slots:
            choice = client.choices.get(slot)
            if choice is not None:
                self._lifecycle.end(choice, FINISH_REASON_CANCELLED, None, now)

    def _on_request_cancelled(self, event: ev.RequestCancelled, now: float) -> None:
        live = self._lifecycle.requests.get(event.request_id)
        if live is not None and event.client_id in ("", live.request.client_id):
            self._lifecycle.end_request(live, FINISH_REASON_CANCELLED, None, now)

    def _on_client_gone(self, event: ev.ClientGone, now: float) -> None:
        client = self._lifecycle.clients.get(event.client_id)
        if client is None:
            return
        for choice in list(client.choices.values()):
            self._lifecycle.end(choice, FINISH_REASON_CANCELLED, None, now)
        self._action_buffer.drop_client(client)
        del self._lifecycle.clients[event.client_id]
