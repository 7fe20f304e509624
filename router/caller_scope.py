"""Says what one caller of the router may name: only its own requests and its own cached prompts.

The processes of the fabric (edges) are trusted: they say which caller a request comes from, and their request ids are
unique. For others the router adds the caller's name to every request id, so that two callers may use the same id, and
one can neither cancel, explain nor block the other's requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Final
from urllib.parse import unquote

from kvloom.transport.local_stream import LocalStream
from kvloom_common.access.caller_access import NamedModel, check_class, check_models, usable
from kvloom_common.access.tenants import Tenants
from kvloom_common.callers import Callers, bare_credential, require_one_of_each
from kvloom_common.tenancy.principal import Principal
from router.core.priority_classes import INTERACTIVE

_SEPARATOR: Final = "@"
_SHARED: Final = "shared"


@dataclasses.dataclass(frozen=True, slots=True)
class CallerScope:
    """The scope of one RPC."""

    caller: str | None
    """See kvloom_common.callers. None: a trusted process."""
    access: CallerAccess | None = None
    """The rights of the caller, if it is a tenant."""

    def request_id(self, given: str) -> str:
        """The id inside the router of a request that the caller calls `given`."""
        return given if self.caller is None else given + _suffix(self.caller)

    def link_id(self, given: str) -> str:
        """The id inside the router of a link that the caller calls `given`; "": none. Otherwise one caller could end
        another one's stream by its link's name."""
        return self.request_id(given) if given else ""

    def given_id(self, request_id: str) -> str:
        """The inverse of `request_id`."""
        return request_id if self.caller is None else shown_id(request_id, self.caller)

    def contains(self, request_id: str) -> bool:
        """True when a request inside the router is the caller's own."""
        return self.request_id(self.given_id(request_id)) == request_id

    def tenant(self, given: str) -> str:
        """Who the request belongs to, if the caller says `given`."""
        return given if self.caller is None else self.caller

    @property
    def key_id(self) -> str:
        """With which of its keys the caller makes its requests; "" if it is no tenant."""
        return "" if self.access is None else self.access.key_id


class CallerAccess:
    """Checks what the holder of a key may use, by the table of tenants as it is now. `models`: those that are served,
    by all their names."""

    def __init__(self, tenants: Tenants, principal: Principal) -> None:
        self._tenants = tenants
        self._principal = principal
        self.key_id = principal.key_id

    def check_models(self, names: Iterable[str], models: Mapping[str, NamedModel]) -> None:
        """Raises KvloomError (PERMISSION_DENIED), and UNAUTHENTICATED if the key is no longer accepted."""
        check_models(self._tenants.renewed(self._principal), names, models)

    def class_of(self, name: str, of_tier: str, field: str) -> str:
        """The priority class of a request that names this one ("": none, and then an interactive one has the default).
        Returned unchanged if any may be used. `field` names it. Raises KvloomError (PERMISSION_DENIED), and
        UNAUTHENTICATED if the key is no longer accepted."""
        principal = self._tenants.renewed(self._principal)
        if not principal.classes:
            return name
        name = name or (principal.default_class if of_tier == INTERACTIVE.name else "") or of_tier
        check_class(principal, name, field)
        return name

    def usable(self, names: Iterable[str], models: Mapping[str, NamedModel]) -> Iterable[str]:
        """Raises KvloomError (UNAUTHENTICATED)."""
        return usable(self._tenants.renewed(self._principal), names, models)


TRUSTED: Final = CallerScope(None)


def shown_id(request_id: str, tenant: str) -> str:
    """The id for logs, beside which the tenant is shown: the one that the caller gave."""
    return request_id.removesuffix(_suffix(tenant))


def _suffix(caller: str) -> str:
    return f"{_SEPARATOR}{caller or _SHARED}"


class CallerScopes:
    """Finds the scope of each RPC of one listener."""

    def __init__(self, callers: Callers, *, trusts_all: bool) -> None:
        self._callers = callers
        self._trusts_all = trusts_all

    def of(self, context: Any) -> CallerScope:
        """A process of the same user on the other end of a Unix socket is trusted."""
        if self._trusts_all or isinstance(context, LocalStream):
            return TRUSTED
        return CallerScope(caller_name(self._callers, context), caller_access.get())


verified_caller: Final[ContextVar[str | None]] = ContextVar("verified_caller", default=None)
"""Within an RPC: the name of its caller, if an auth provider has said who it is (router/rpc/provider_check.py), or if
it belongs to a tenant (router/rpc/tenant_check.py)."""
caller_access: Final[ContextVar[CallerAccess | None]] = ContextVar("caller_access", default=None)
"""Within an RPC: what its caller may use, if it belongs to a tenant."""


def caller_name(callers: Callers, context: Any) -> str:
    """The name of an RPC's caller."""
    verified = verified_caller.get()
    return callers.name(credential_of(context), peer_host(context.peer())) if verified is None else verified


def owner_of(context: Any) -> str:
    """To whom what an RPC begins belongs: to the tenant, whose keys may change, or else to the holder of the
    credential. All callers that send none count as one."""
    verified = verified_caller.get()
    return credential_of(context) if verified is None or caller_access.get() is None else f"tenant\0{verified}"


def credential_of(context: Any) -> str:
    """The caller's credential. All callers that send none count as one."""
    return credential_in(context.invocation_metadata() or ())


def credential_in(metadata: Iterable[tuple[str, Any]]) -> str:
    """The value of `authorization`, or else of `x-api-key`; "" if the metadata has neither. RPCs with several
    credentials are refused (`require_one_credential_in`)."""
    found = {key: value for key, value in metadata if key in ("authorization", "x-api-key") and isinstance(value, str)}
    return bare_credential(found.get("authorization", ""), found.get("x-api-key", ""))


def require_one_credential_in(context: Any) -> None:
    """Raises KvloomError (INVALID_ARGUMENT) if an RPC has several credentials of one kind."""
    metadata = context.invocation_metadata() or ()
    require_one_of_each((key, str(value)) for key, value in metadata if key in ("authorization", "x-api-key"))


def metadata_value(context: Any, wanted_key: str) -> str:
    """Returns "" when the caller sent no such key."""
    for key, value in context.invocation_metadata() or ():
        if key == wanted_key and isinstance(value, str):
            return value
    return ""


def peer_host(peer: str) -> str:
    """The IP address, from gRPC's form: "ipv4:127.0.0.1:1234" or "ipv6:%5B::1%5D:1234"."""
    return unquote(peer.rpartition(":")[0].partition(":")[2]).strip("[]")
