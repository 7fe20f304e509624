"""Responses that are not stored, as far as others of their connection may follow them (`previous_response_id`).

They are kept as items: what follows one of them is sent on with all items as its input, and needs no state then.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from edge_http.sockets.messages import Create, raw
from kvloom.errors import KvloomError
from kvloom_common.limits.byte_budget import ByteLease


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    items: Sequence[msgspec.Raw]
    """Its input and output, and those before it that are not stored."""
    previous: msgspec.Raw | None
    """The stored response that the items follow."""
    num_bytes: int


class Lineage:
    """The latest of one connection. The memory is its caller's."""

    def __init__(self, lease: ByteLease, max_bytes: int) -> None:
        self._lease = lease
        self._max_bytes = max_bytes
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def body_of(self, create: Create) -> dict[str, msgspec.Raw]:
        """The fields of the request that stands for a message."""
        known = self._known.get(create.previous_response_id)
        body = {**create.fields, "stream": msgspec.Raw(b"true")}
        if known is None:
            if create.steers:
                body["input"] = raw(create.input_items())
            return body
        body["input"] = raw([*known.items, *create.input_items()])
        del body["previous_response_id"]
        if known.previous is not None:
            body["previous_response_id"] = known.previous
        return body

    def add(self, response_id: str, create: Create, output: Sequence[msgspec.Raw]) -> None:
        """A response has ended that is not stored. The oldest are forgotten if there is no room for all."""
        parent = self._known.get(create.previous_response_id)
        items = [*(() if parent is None else parent.items), *create.input_items(), *output]
        previous = create.fields.get("previous_response_id") if parent is None else parent.previous
        num_bytes = sum(map(len, map(bytes, items)))
        while self._known and self._lease.num_bytes + num_bytes > self._max_bytes:
            self._forget_oldest()
        while True:
            try:
                self._lease.take(num_bytes)
            except KvloomError:
                if not self._known:
                    return
                self._forget_oldest()
            else:
                break
        self._known[response_id] = _Known(items, previous, num_bytes)

    def _forget_oldest(self) -> None:
        _, known = self._known.popitem(last=False)
        self._lease.resize(self._lease.num_bytes - known.num_bytes)
