"""Refuses RPCs whose caller the configured auth provider does not know, and names the others' callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import structlog

from kvloom.errors import KvloomError
from kvloom.transport.grpc_errors import abort
from kvloom.v1 import router_service_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.access.auth_provider import CallerVerifier, Credentials
from kvloom_common.callers import Callers, require_one_of_each
from router.caller_scope import require_one_credential_in, verified_caller
from router.rpc.own_rpcs import Behaviour, Context, OwnRpcInterceptor, codecs_of

log = structlog.get_logger()

_SERVICE: Final = router_service_pb2.DESCRIPTOR.services_by_name["RouterService"]
_LASTING: Final = frozenset(
    f"/{_SERVICE.full_name}/{method.name}" for method in _SERVICE.methods if method.client_streaming
)
"""Methods whose streams may last for weeks."""
RECHECK_SECONDS: Final = 60.0
"""How often the credentials of such a stream are checked again."""


class ProviderCheck(OwnRpcInterceptor):
    """It must come before RpcLimits, which needs the caller's name, and makes streams of all RPCs: nothing of a request
    is received before its caller is known."""

    def __init__(self, callers: Callers, verifier: CallerVerifier) -> None:
        self._callers = callers
        self._verifier = verifier

    def handler(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        checked = self._checked(handler.stream_stream, lasts=str(details.method) in _LASTING)
        return grpc.stream_stream_rpc_method_handler(checked, **codecs_of(handler))

    def _checked(self, behaviour: Behaviour, *, lasts: bool) -> Any:
        async def checked(requests: Any, context: Context) -> None:
            try:
                credentials = _credentials(context, self._verifier.headers)
                verified_id = await self._verifier.verify(credentials)
                verified_caller.set(self._callers.name_of_id(verified_id))
                if not lasts:
                    await behaviour(requests, context)
                    return
                async with self._rechecked(credentials, verified_id):
                    await behaviour(requests, context)
            except KvloomError as error:
                await abort(context, error)

        return checked

    @asynccontextmanager
    async def _rechecked(self, credentials: Credentials, verified_id: str) -> AsyncIterator[None]:
        """Raises KvloomError (UNAUTHENTICATED ...) in the block once the caller is no longer known as the same."""
        task = asyncio.current_task()
        assert task is not None
        refusal: KvloomError | None = None

        async def recheck() -> None:
            nonlocal refusal
            while refusal is None:
                await asyncio.sleep(RECHECK_SECONDS)
                refusal = await self._refusal(credentials, verified_id)
            task.cancel()

        rechecks = asyncio.create_task(recheck(), name="auth recheck")
        try:
            yield
        except asyncio.CancelledError:
            if refusal is None:
                raise
            task.uncancel()
            log.info("streams_revoked", cause="caller", num_streams=1)
            raise refusal from None
        finally:
            rechecks.cancel()

    async def _refusal(self, credentials: Credentials, verified_id: str) -> KvloomError | None:
        try:
            if await self._verifier.verify(credentials) == verified_id:
                return None
        except KvloomError as error:
            # While the provider is away no stream begins, and those that have begun do not end.
            return None if error.reason == ErrorReason.ERROR_REASON_AUTH_UNAVAILABLE else error
        return KvloomError(ErrorReason.ERROR_REASON_UNAUTHENTICATED, "The credentials now belong to another caller.")


def _credentials(context: Context, names: tuple[str, ...]) -> Credentials:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    require_one_credential_in(context)
    metadata = context.invocation_metadata() or ()
    shown = [(str(key), value) for key, value in metadata if key in names and isinstance(value, str)]
    require_one_of_each(shown)
    found = dict(shown)
    certificates = list(context.auth_context().get("x509_pem_cert", ()))
    return Credentials(found, certificates[0].decode() if certificates else "")
