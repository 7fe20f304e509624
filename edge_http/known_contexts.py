"""The items of responses and conversations that this edge has had stored, or has read, a short time ago: for when the
orchestrator is away, or slow."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from kvloom.v1.orchestrator_service_pb2 import KeepResponseRequest, ReadContextRequest, ReadContextResponse

MAX_BYTES: Final = 32 * 2**20
KEPT_SECONDS: Final = 300.0
"""How long something may be known that others have changed or deleted meanwhile."""
_CHANGES: Final = ("createConversationItems", "createErasure", "delete", "remove", "setRetention")
"""The beginnings of the names of operations after which nothing of a tenant is known."""


class _Known(NamedTuple):
    items: Sequence[bytes]
    known_at: float
    num_bytes: int


class _KeptResponse(msgspec.Struct):
    id: str
    output: list[msgspec.Raw] = []


class KnownContexts:
    """Nothing is found by another tenant than that which has stored it, and nothing that this edge has deleted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._num_bytes = 0

    def find(self, wanted: ReadContextRequest) -> ReadContextResponse | None:
        """The answer to a question for nothing but the items before an input; None: it is not known."""
        known = self._known.get((wanted.owner.tenant, _name_of(wanted)))
        if known is None or known.known_at <= self._clock() - KEPT_SECONDS:
            return None
        return ReadContextResponse(items=known.items)

    def note_read(self, wanted: ReadContextRequest, found: ReadContextResponse) -> None:
        if name := _name_of(wanted):
            self._note(wanted.owner.tenant, name, list(found.items))

    def note_kept(self, kept: KeepResponseRequest) -> None:
        """A response was stored."""
        response = msgspec.json.decode(kept.response, type=_KeptResponse)
        new, tenant = [*kept.input_items, *map(bytes, response.output)], kept.owner.tenant
        for before, name in ((kept.previous_response_id, response.id), (kept.conversation_id, kept.conversation_id)):
            earlier = self._known.get((tenant, before))
            if earlier is not None or (name == response.id and not before):
                self._note(tenant, name, [*(() if earlier is None else earlier.items), *new])

    def note_change(self, tenant: str, operation: str) -> None:
        """Something of the tenant may have been changed or deleted."""
        if operation.startswith(_CHANGES):
            for key in [key for key in self._known if key[0] == tenant]:
                self._forget(key)

    def _note(self, tenant: str, name: str, items: Sequence[bytes]) -> None:
        key = tenant, name
        self._forget(key)
        self._known[key] = known = _Known(items, self._clock(), sum(map(len, items)))
        self._num_bytes += known.num_bytes
        while self._num_bytes > MAX_BYTES:
            self._forget(next(iter(self._known)))

    def _forget(self, key: tuple[str, str]) -> None:
        known = self._known.pop(key, None)
        self._num_bytes -= 0 if known is None else known.num_bytes


def _name_of(wanted: ReadContextRequest) -> str:
    """The object whose items are wanted; "" if more is."""
    has_more = wanted.item_ids or wanted.prompt_id or wanted.WhichOneof("fork")
    return "" if has_more else wanted.conversation_id or wanted.previous_response_id
