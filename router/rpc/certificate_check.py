"""Refuses RPCs over connections whose client's certificate was revoked, and ends streams when theirs is."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import structlog

from kvloom.errors import KvloomError
from kvloom.transport.grpc_errors import abort
from kvloom_common.access.revoked_certificates import RevokedCertificates
from router.rpc.own_rpcs import Behaviour, Context, OwnRpcInterceptor, codecs_of

log = structlog.get_logger()


class CertificateCheck(OwnRpcInterceptor):
    def __init__(self, revoked: RevokedCertificates) -> None:
        self._revoked = revoked
        self._open: dict[asyncio.Task[Any], bytes] = {}
        """The tasks of bidirectional streams, which may last for weeks, and their certificates."""
        self._ended: dict[asyncio.Task[Any], KvloomError] = {}
        revoked.on_change(self._end_revoked)

    def handler(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:  # noqa: ARG002
        codecs = codecs_of(handler)
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(self._checked(handler.stream_stream, lasts=True), **codecs)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._checked(handler.unary_stream), **codecs)
        return grpc.unary_unary_rpc_method_handler(self._checked(handler.unary_unary), **codecs)

    def _checked(self, behaviour: Behaviour, *, lasts: bool = False) -> Any:
        async def checked(requests: Any, context: Context) -> Any:
            certificate = next(iter(context.auth_context().get("x509_pem_cert", ())), b"")
            try:
                self._revoked.check(certificate)
            except KvloomError as error:
                await abort(context, error)
            task = asyncio.current_task()
            if not lasts or task is None:
                return await behaviour(requests, context)
            self._open[task] = certificate
            try:
                return await behaviour(requests, context)
            except asyncio.CancelledError:
                error = self._ended.get(task)
                if error is None:
                    raise
                task.uncancel()
                await abort(context, error)
            finally:
                del self._open[task]
                self._ended.pop(task, None)

        return checked

    def _end_revoked(self) -> None:
        for task, certificate in list(self._open.items()):
            try:
                self._revoked.check(certificate)
            except KvloomError as error:
                self._ended[task] = error
                task.cancel()
        if self._ended:
            log.info("streams_revoked", cause="certificate", num_streams=len(self._ended))
