"""The endpoints for operators and monitoring: /health, /live, /ready, /metrics, /metrics/targets and /version."""

from __future__ import annotations

import importlib.metadata
from typing import Final

from aiohttp import web

from edge_http.edge import Edge
from edge_http.metrics import CONTENT_TYPE
from edge_http.wire.json_response import json_response
from kvloom_common.metrics.targets import TargetsError, http_sd

VERSION: Final = importlib.metadata.version("kvloom")


async def health(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:  # noqa: ARG001
    return json_response({"status": "ok"})


async def ready(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """With `?model=NAME`: whether requests for this model can be served."""
    reason = edge.not_ready_reason(request.query.get("model", ""))
    if reason:
        return json_response({"status": "not_ready", "reason": reason}, 503)
    return json_response({"status": "ready"})


async def metrics(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:  # noqa: ARG001
    return web.Response(body=edge.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


async def metrics_targets(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:  # noqa: ARG001
    """For Prometheus' http_sd_configs."""
    try:
        return json_response(http_sd(await edge.list_targets()))
    except TargetsError as error:
        about = {"message": str(error), "type": "api_error", "param": None, "code": "registry_unavailable"}
        return json_response({"error": about}, 503)


async def version(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:  # noqa: ARG001
    return json_response({"version": VERSION})
