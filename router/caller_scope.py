"""What one caller of the router may name: only its own requests and its own cached prompts.

The processes of the fabric (edges) are trusted: they say which caller a request comes from, and their request ids are
unique. For others the router adds the caller's name to every request id, so that two callers may use the same id, and
one can neither cancel, explain nor block the other's requests.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from kvloom.callers import Callers
from kvloom.transport.local_stream import LocalStream

_SEPARATOR: Final = "@"
_SHARED: Final = "shared"


@dataclasses.dataclass(frozen=True, slots=True)
class CallerScope:
    """The scope of one RPC."""

    caller: str | None
    """See kvloom.callers. None: a trusted process."""

    def request_id(self, given: str) -> str:
        """The id inside the router of a request that the caller calls `given`."""
        return given if self.caller is None else f"{given}{_SEPARATOR}{self.caller or _SHARED}"

    def given_id(self, request_id: str) -> str:
        """The inverse of `request_id`."""
        return request_id if self.caller is None else request_id.rpartition(_SEPARATOR)[0]

    def contains(self, request_id: str) -> bool:
        """Whether a request inside the router is the caller's own."""
        return self.request_id(self.given_id(request_id)) == request_id

    def tenant(self, given: str) -> str:
        """Who the request belongs to, if the caller says `given`."""
        return given if self.caller is None else self.caller


TRUSTED: Final = CallerScope(None)


def shown_id(request_id: str, tenant: str) -> str:
    """The id for logs, beside which the tenant is shown: the one that the caller gave."""
    return request_id.removesuffix(f"{_SEPARATOR}{tenant or _SHARED}")


class CallerScopes:
    """Finds the scope of each RPC of one listener."""

    def __init__(self, callers: Callers, *, trusts_all: bool) -> None:
        self._callers = callers
        self._trusts_all = trusts_all

    def of(self, context: Any) -> CallerScope:
        """A process of the same user on the other end of a Unix socket is trusted."""
        if self._trusts_all or isinstance(context, LocalStream):
            return TRUSTED
        metadata = dict(context.invocation_metadata() or ())
        return CallerScope(self._callers.name(str(metadata.get("authorization", "")), peer_host(context.peer())))


def peer_host(peer: str) -> str:
    """The address without its port, from gRPC's form: "ipv4:127.0.0.1:1234"."""
    return peer.rpartition(":")[0].partition(":")[2]
