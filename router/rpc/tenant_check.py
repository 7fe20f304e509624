"""Refuses RPCs of those who belong to no tenant, and names the others' callers: their tenants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import grpc
import structlog

from kvloom.errors import KvloomError
from kvloom.transport.grpc_errors import abort
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.access.caller_access import check_scope
from kvloom_common.tenancy.principal import Principal
from router.caller_scope import (
    CallerAccess,
    caller_access,
    credential_of,
    require_one_credential_in,
    verified_caller,
)
from router.rpc.own_rpcs import Behaviour, Context, OwnRpcInterceptor, codecs_of

if TYPE_CHECKING:  # a fabric without tenants needs nothing of it
    from kvloom_common.access.identities import Identities

log = structlog.get_logger()

MAX_EXPIRY_WAIT_SECONDS: Final = 3600.0
"""How long the end of a credential is waited for at most before its time is read again."""


class TenantCheck(OwnRpcInterceptor):
    """It must come before RpcLimits, which needs the caller's name, and makes streams of all RPCs: nothing of a request
    is received before its caller is known."""

    def __init__(self, identities: Identities) -> None:
        self._identities = identities
        self._open: dict[asyncio.Task[Any], Principal] = {}
        """The tasks of RPCs, which may last for weeks, and who makes them."""
        self._ended: dict[asyncio.Task[Any], KvloomError] = {}
        """Those that end because their principal may not call any more, and why."""
        identities.tenants.on_change(self._end_revoked)

    def handler(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:  # noqa: ARG002
        lasts = handler.request_deserializer is not None  # RpcLimits reads all messages but those of such streams
        checked = self._checked(handler.stream_stream, lasts=lasts)
        return grpc.stream_stream_rpc_method_handler(checked, **codecs_of(handler))

    def _checked(self, behaviour: Behaviour, *, lasts: bool) -> Any:
        async def checked(requests: Any, context: Context) -> None:
            try:
                principal = await self._principal(context)
                check_scope(principal, "inference")
                verified_caller.set(principal.tenant)
                caller_access.set(CallerAccess(self._identities.tenants, principal))
                if not lasts:
                    await behaviour(requests, context)
                    return
                async with self._followed(principal):
                    await behaviour(requests, context)
            except KvloomError as error:
                await abort(context, error)

        return checked

    async def _principal(self, context: Context) -> Principal:
        """Raises KvloomError."""
        require_one_credential_in(context)
        credential = credential_of(context)
        certificate = b"" if credential else next(iter(context.auth_context().get("x509_pem_cert", ())), b"")
        return self._identities.at_once(credential, certificate) or await self._identities.later(credential)

    @asynccontextmanager
    async def _followed(self, principal: Principal) -> AsyncIterator[None]:
        """Raises KvloomError (UNAUTHENTICATED ...) in the block once the principal may not call any more."""
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = principal
        expiry = asyncio.create_task(self._end_at_expiry(task), name="expiry of a credential")
        try:
            yield
        except asyncio.CancelledError:
            error = self._ended.get(task)
            if error is None:
                raise
            task.uncancel()
            raise error from None
        finally:
            expiry.cancel()
            del self._open[task]
            self._ended.pop(task, None)

    async def _end_at_expiry(self, task: asyncio.Task[Any]) -> None:
        while task not in self._ended:
            expires_at = self._open[task].expires_at
            left = expires_at - time.time() if expires_at else MAX_EXPIRY_WAIT_SECONDS
            await asyncio.sleep(min(max(left, 0.0), MAX_EXPIRY_WAIT_SECONDS))
            self._end_if_revoked(task)

    def _end_revoked(self) -> None:
        for task in list(self._open):
            self._end_if_revoked(task)

    def _end_if_revoked(self, task: asyncio.Task[Any]) -> None:
        try:
            principal = self._identities.tenants.renewed(self._open[task])
            check_scope(principal, "inference")
            self._open[task] = principal
        except KvloomError as error:
            # While the table is too old no stream begins, and those that have begun do not end.
            if error.reason != ErrorReason.ERROR_REASON_AUTH_UNAVAILABLE and task not in self._ended:
                self._ended[task] = error
                task.cancel()
                log.info("streams_revoked", cause="tenant", num_streams=1)
