"""Who sends an HTTP request."""

from __future__ import annotations

import base64
import hashlib
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import grpc.aio
from aiohttp import web

from edge_http.wire.headers import RELAYED, RELAYED_CERTIFICATE
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.access.auth_provider import STANDARD_HEADERS, CallerVerifier, Credentials
from kvloom_common.access.caller_access import check_scope
from kvloom_common.callers import Callers, bare_credential, require_one_of_each
from kvloom_common.limits.client_address import client_address, networks_of
from kvloom_common.tenancy.principal import Principal
from kvloom_common.tenancy.scopes import Scope
from kvloom_common.trust.fabric_trust import FabricTrust
from kvloom_common.trust.on_behalf import KEY_ID, MAY_SPEAK, TENANT
from kvloom_common.trust.seal import SealError

if TYPE_CHECKING:
    from kvloom_common.access.identities import Identities
    from kvloom_common.access.revoked_certificates import RevokedCertificates


API_KEY: Final = "x-api-key"
_CALLER_KEY: Final = web.RequestKey("caller", str)
_VERIFIED_KEY: Final = web.RequestKey("verified", str)
"""The caller's name, if an auth provider has said who it is, or if it is a tenant."""
_PRINCIPAL_KEY: Final = web.RequestKey("principal", Principal)
_ON_BEHALF_KEY: Final = web.RequestKey("on behalf", dict[str, str])


class RequestCallers:
    """Names the callers of requests. The names isolate callers from one another in the whole fabric."""

    def __init__(self, callers: Callers, trusted_proxies: Sequence[str]) -> None:
        """`trusted_proxies` are networks, as in the configuration."""
        self._callers = callers
        self.have_tenants = callers.identities is not None
        """True when every request has a principal."""
        self._cache_scope = callers.cache_salts().of
        self.cache_scope_of = self._scope_of_tenant if self.have_tenants else self.caller_of
        """Returns the cache scope of a request: only those with the same one may be served sooner because of each
        other's texts."""
        self._trusted_proxies = networks_of(trusted_proxies)
        self.revoked: RevokedCertificates | None = None
        """Certificates that no request may come with."""

    def caller_of(self, request: web.BaseRequest) -> str:
        """Return the caller's name (kvloom_common/callers.py)."""
        try:
            return request[_CALLER_KEY]
        except KeyError:  # a request's `get` would catch it too, one call later
            pass
        given = credential_of(request)
        name = self._callers.name(given, "" if given else self.address_of(request))
        request[_CALLER_KEY] = name
        return name

    def guardrails(self, caller: str, named: Sequence[str] | None) -> Sequence[str]:
        """Return the rules of the safety policy that this caller has chosen, and those that its request names."""
        return self._callers.guardrails(caller, named)

    def _scope_of_tenant(self, request: web.BaseRequest) -> str:
        return self._cache_scope(self.caller_of(request))

    @property
    def needs_key(self) -> bool:
        """True when requests without credentials are refused."""
        return self._callers.are_authenticated

    @property
    def headers(self) -> Sequence[str]:
        """The headers by which callers are told apart."""
        return STANDARD_HEADERS if self._callers.verifier is None else self._callers.verifier.headers

    def check(self, request: web.BaseRequest) -> Awaitable[None] | None:
        """Raises KvloomError: UNAUTHENTICATED if the request needs an API key and has none that is valid, and
        INVALID_ARGUMENT if it has several credentials. Where an auth provider decides, or where a token is new, what is
        returned must be awaited, and raises KvloomError; other requests do not wait."""
        headers = request.headers
        if API_KEY in headers or len(headers.getall("Authorization", ())) > 1:
            names = ("authorization", API_KEY)
            require_one_of_each((name, value) for name in names for value in headers.getall(name, ()))
        if self.revoked is not None:
            self.revoked.check(_own_certificate(request))
        identities = self._callers.identities
        if identities is not None:
            credential = credential_of(request)
            principal = identities.at_once(credential, b"" if credential else _shown_certificate(request, identities))
            if principal is None:
                return self._identify(request, identities, credential)
            _accept(request, principal)
            return None
        if self._callers.api_keys is not None:
            self._callers.check(credential_of(request))
        verifier = self._callers.verifier
        return None if verifier is None else self._verify(request, verifier)

    async def _verify(self, request: web.BaseRequest, verifier: CallerVerifier) -> None:
        verified_id = await verifier.verify(_credentials(request, verifier.headers))
        request[_CALLER_KEY] = request[_VERIFIED_KEY] = self._callers.name_of_id(verified_id)

    async def _identify(self, request: web.BaseRequest, identities: Identities, credential: str) -> None:
        _accept(request, await identities.later(credential))

    def accept_on_behalf(self, request: web.BaseRequest, tenant: str, key_id: str) -> None:
        """For a request that an orchestrator makes for a caller of this name, with what its key may do now. Raises
        KvloomError (UNAUTHENTICATED, AUTH_UNAVAILABLE)."""
        request[_ON_BEHALF_KEY] = {TENANT: tenant, KEY_ID: key_id}
        if self._callers.identities is not None:
            _accept(request, self._callers.identities.tenants.renewed(Principal(tenant, key_id)))
        else:
            request[_CALLER_KEY] = request[_VERIFIED_KEY] = tenant

    def check_scope(self, request: web.BaseRequest, scope: Scope) -> None:
        """For a request with a principal. Raises KvloomError (PERMISSION_DENIED)."""
        check_scope(request[_PRINCIPAL_KEY], scope)

    def principal_of(self, request: web.BaseRequest) -> Principal | None:
        """Who makes a request that was checked; None in a fabric without tenants."""
        return request[_PRINCIPAL_KEY] if self.have_tenants else None

    @property
    def control_channel(self) -> grpc.aio.Channel | None:
        """To the control service; None while it is away, and in a fabric without tenants."""
        return None if self._callers.identities is None else self._callers.identities.control_channel

    def administered_by(self, principal: Principal) -> str | None:
        """The organisation that the holder of a key with the scope admin administers; None: the whole fabric."""
        return None if self._callers.identities is None else self._callers.identities.administered_by(principal)

    def check_operator(self, request: web.BaseRequest) -> None:
        """For a request with a principal that has the scope admin. Raises KvloomError (PERMISSION_DENIED)."""
        if self.administered_by(request[_PRINCIPAL_KEY]) is not None:
            message = "This concerns all tenants: only keys of control.operator_organisation may use it."
            raise KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message)

    def have_limits(self, principal: Principal) -> bool:
        """True when a key, its tenant or its organisation has limits."""
        return self._callers.identities is not None and self._callers.identities.tenants.have_limits(principal)

    def key_id_of(self, request: web.BaseRequest) -> str:
        """The tenant's key with which a request was made; "" in a fabric without tenants."""
        return request[_PRINCIPAL_KEY].key_id if self.have_tenants else ""

    def address_of(self, request: web.BaseRequest) -> str:
        """Return the client's IP address; "" if it has none, as over a Unix socket."""
        peer = request.remote or ""
        if not self._trusted_proxies:
            return peer
        return client_address(peer, request.headers.getall("X-Forwarded-For", ()), self._trusted_proxies)


def _credentials(request: web.BaseRequest, names: Sequence[str]) -> Credentials:
    """The certificate is one that TLS has verified. That of a relayed request is the other edge's, not the caller's.
    Raises KvloomError (INVALID_ARGUMENT)."""
    values = request.headers
    require_one_of_each((name, value) for name in names for value in values.getall(name, ()))
    found = {name: values[name] for name in names if name in values}
    certificate = _certificate(request)
    return Credentials(found, ssl.DER_cert_to_PEM_cert(certificate) if certificate else "")


def _certificate(request: web.BaseRequest) -> bytes:
    """In DER; b"" without one."""
    return _own_certificate(request) if RELAYED not in request.headers else b""


def _own_certificate(request: web.BaseRequest) -> bytes:
    """That of the connection, whatever the request says; in DER, b"" without one."""
    tls = request.get_extra_info("ssl_object")
    return (tls.getpeercert(binary_form=True) or b"") if tls is not None else b""


def _shown_certificate(request: web.BaseRequest, identities: Identities) -> bytes:
    """Also that of the client whose request another edge relays, if that edge says so."""
    relayed = request.headers.get(RELAYED_CERTIFICATE)
    if relayed is None or not identities.trust.has_secret:
        return _certificate(request)
    try:
        return identities.trust.sealer.decrypted(RELAYED_CERTIFICATE, base64.b64decode(relayed, validate=True))
    except (SealError, ValueError):
        return b""


def relayed_certificate(request: web.BaseRequest, trust: FabricTrust) -> Mapping[str, str]:
    """The header by which another edge learns of the certificate that the client has shown to this one. It is
    encrypted, so that no client can make one up."""
    certificate = _certificate(request) if trust.has_secret and not credential_of(request) else b""
    if not certificate:
        return {}
    return {RELAYED_CERTIFICATE: base64.b64encode(trust.sealer.encrypt(RELAYED_CERTIFICATE, certificate)).decode()}


def relayed_caller(request: web.BaseRequest) -> Mapping[str, str]:
    """The headers by which another edge learns on whose behalf an orchestrator asks. Those of other requests are not
    passed on."""
    return request.get(_ON_BEHALF_KEY, {})


def _accept(request: web.BaseRequest, principal: Principal) -> None:
    request[_PRINCIPAL_KEY] = principal
    request[_CALLER_KEY] = request[_VERIFIED_KEY] = principal.tenant


def credential_of(request: web.BaseRequest) -> str:
    """Return what the Authorization header, or else x-api-key, has; "" if the request has neither."""
    headers = request.headers
    return bare_credential(headers.get("Authorization", ""), headers.get(API_KEY, ""))


def credential_digest(request: web.BaseRequest) -> bytes:
    """Return a digest of the credential, which binds a response to the holder of the credential that began it.

    Where an auth provider says who a caller is, or the caller is a tenant, the response is bound to the caller, who may
    have new credentials by now. All requests without one have the same digest: the id of a response, which cannot be
    guessed, is then all that is needed to find it, so that a client may change its address. The credentials themselves
    are not kept.
    """
    given = request.get(_VERIFIED_KEY, "") or credential_of(request)
    return hashlib.blake2b(given.encode("utf-8", "surrogateescape"), digest_size=16).digest()


Check = Callable[[web.BaseRequest], Awaitable[None] | None]


def checking(callers: RequestCallers, trust: FabricTrust) -> Check:
    """Returns what checks callers as `RequestCallers.check` does, and believes an orchestrator for whom it asks."""

    def check(request: web.BaseRequest) -> Awaitable[None] | None:
        tenant = request.headers.get(TENANT)
        if tenant is None:
            return callers.check(request)
        tls = request.get_extra_info("ssl_object")
        if not trust.may_connect(MAY_SPEAK, None if tls is None else tls.getpeercert()):
            message = "Only an orchestrator may ask on behalf of others."
            raise KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message)
        callers.accept_on_behalf(request, tenant, request.headers.get(KEY_ID, ""))
        return None

    return check
