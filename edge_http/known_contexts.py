"""The items of responses and conversations that this edge has had stored, or has read, a short time ago: for when the
orchestrator is away, or slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvloom.v1.orchestrator_service_pb2 import KeepResponseRequest, ReadContextRequest, ReadContextResponse
from kvloom_common.limits.scoped_cache import MAX_ENTRIES, ScopedCache

MAX_BYTES: Final = 32 * 2**20
KEPT_SECONDS: Final = 300.0
"""How long something may be known that others have changed or deleted meanwhile."""
_CHANGES: Final = ("createConversationItems", "createErasure", "delete", "remove", "setRetention")
"""The beginnings of the names of operations after which nothing of a tenant is known."""


class _KeptResponse(msgspec.Struct):
    id: str
    output: list[msgspec.Raw] = []


class KnownContexts:
    """Nothing is found by another tenant than that which has stored it, and nothing that this edge has deleted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known = ScopedCache[tuple[str, str], Sequence[bytes]](
            MAX_BYTES, MAX_ENTRIES, lambda items: sum(map(len, items))
        )
        """By tenant, and the id of the object."""

    def find(self, wanted: ReadContextRequest) -> ReadContextResponse | None:
        """The answer to a question for nothing but the items before an input; None: it is not known."""
        items = self._known.get((wanted.owner.tenant, _name_of(wanted)), self._clock())
        return None if items is None else ReadContextResponse(items=items)

    def note_read(self, wanted: ReadContextRequest, found: ReadContextResponse) -> None:
        if name := _name_of(wanted):
            self._note(wanted.owner.tenant, name, list(found.items))

    def note_kept(self, kept: KeepResponseRequest) -> None:
        """A response was stored."""
        response = msgspec.json.decode(kept.response, type=_KeptResponse)
        new, tenant = [*kept.input_items, *map(bytes, response.output)], kept.owner.tenant
        for before, name in ((kept.previous_response_id, response.id), (kept.conversation_id, kept.conversation_id)):
            earlier = self._known.get((tenant, before), self._clock())
            if earlier is not None or (name == response.id and not before):
                self._note(tenant, name, [*(earlier or ()), *new])

    def note_change(self, tenant: str, operation: str) -> None:
        """Something of the tenant may have been changed or deleted."""
        if operation.startswith(_CHANGES):
            self._known.clear({tenant})

    def _note(self, tenant: str, name: str, items: Sequence[bytes]) -> None:
        self._known.put((tenant, name), items, tenant, self._clock() + KEPT_SECONDS)


def _name_of(wanted: ReadContextRequest) -> str:
    """The object whose items are wanted; "" if more is."""
    has_more = wanted.item_ids or wanted.prompt_id or wanted.WhichOneof("fork")
    return "" if has_more else wanted.conversation_id or wanted.previous_response_id
