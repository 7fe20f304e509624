"""GET /.well-known/kvloom-receipts.json: the public keys with which receipts are verified."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from aiohttp import web

from edge_http.edge import Edge
from edge_http.wire.json_response import json_response
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason


async def receipt_keys(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:  # noqa: ARG001
    """Raises KvloomError (NOT_FOUND) where there are no receipts."""
    if edge.receipt_keys is not None:
        with contextlib.suppress(OSError):
            return json_response(msgspec.Raw(await asyncio.to_thread(edge.receipt_keys.read_bytes)))
    raise KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, "There are no receipts here (router.receipts.enabled).")
