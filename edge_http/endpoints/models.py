"""GET /v1/models and GET /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from edge_http.edge import Edge, ServedModel
from edge_http.wire.json_response import json_response


async def list_models(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:  # noqa: ARG001
    models = [_model_object(edge, model) for model in edge.models.values()]
    return json_response({"object": "list", "data": models})


async def get_model(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    name = request.path.removeprefix("/v1/models/")
    return json_response(_model_object(edge, edge.find_model(name)))


def _model_object(edge: Edge, model: ServedModel) -> dict[str, Any]:
    """Return OpenAI's model object with vLLM's `max_model_len` and the number of ready shards."""
    info = edge.model_info(model.name)
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "kvloom",
        "max_model_len": info.max_model_len if info else None,
        "num_ready_shards": info.num_ready_shards if info else 0,
    }
