"""GET /v1/models and GET /v1/models/{id}, in the shape of the API whose client asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from edge_http.anthropic.models import model_object, page_of
from edge_http.anthropic.requests import check_version
from edge_http.edge import Edge
from edge_http.offered_models import OfferedModels
from edge_http.wire.headers import ANTHROPIC_REQUEST_ID, ANTHROPIC_VERSION, is_anthropic, request_id
from edge_http.wire.json_response import json_response
from kvloom_common.config import RouteConfig
from kvloom_common.models.model_routes import models_of
from kvloom_common.models.served_model import ServedModel


async def list_models(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    if is_anthropic(request):
        models = [_anthropic_object(edge.models, name, model) for name, model in _listed(edge.models, request)]
        return _anthropic_response(request, page_of(models, request.query))
    models = [_model_object(edge.models, name, model) for name, model in _listed(edge.models, request)]
    named = edge.models.usable(
        request, [name for name in edge.models.routes.by_name if name not in edge.models.by_name]
    )
    routes = [_route_object(edge.models, edge.models.routes.by_name[name]) for name in named]
    return json_response({"object": "list", "data": models + routes})


async def get_model(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    name = unquote(request.path.removeprefix("/v1/models/"))
    edge.models.check(request, (name,))
    route = edge.models.routes.by_name.get(name)
    if route is not None and name not in edge.models.by_name and not is_anthropic(request):
        return json_response(_route_object(edge.models, route))
    model = edge.models.find(name)
    if is_anthropic(request):
        return _anthropic_response(request, _anthropic_object(edge.models, name, model))
    return json_response(_model_object(edge.models, name, model))


def _listed(models: OfferedModels, request: web.BaseRequest) -> Iterator[tuple[str, ServedModel]]:
    """Models that the caller may use, by all their names, then each adapter once: by its own name if that is enough."""
    adapters: dict[str, str] = {}
    for name in models.usable(request, list(models.by_name)):
        model = models.by_name[name]
        if model.adapter is None:
            yield name, model
        elif name in (model.name, model.adapter.name):
            adapters[model.name] = min(name, adapters.get(model.name, name), key=len)
    for name in adapters.values():
        yield name, models.by_name[name]


def _model_object(models: OfferedModels, name: str, model: ServedModel) -> dict[str, Any]:
    """Return OpenAI's model object with vLLM's `max_model_len`, `root` (the model of an alias) and `parent` (that of an
    adapter), and what the shards say."""
    info = models.info(model.name)
    num_ready_shards = info.num_ready_shards if info else 0
    if info and model.adapter is not None:
        num_ready_shards = sum(one.num_ready_shards for one in info.adapters if one.name == model.adapter.name)
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": model.owned_by,
        "root": model.name,
        "parent": model.base_name or None,
        "version": model.version or None,
        "max_model_len": info.max_model_len if info else None,
        "capabilities": list(info.capabilities) if info else [],
        "num_ready_shards": num_ready_shards,
    }


def _route_object(models: OfferedModels, route: RouteConfig) -> dict[str, Any]:
    """Returns a route's object, like that of a model, with what its models have in common."""
    own = [models.by_name[name] for name in models_of(route) if name in models.by_name]
    infos = [info for model in own if (info := models.info(model.name))]
    return {
        "id": route.name,
        "object": "model",
        "created": min((model.created for model in own), default=0),
        "owned_by": "kvloom",
        "root": None,
        "parent": None,
        "version": None,
        "max_model_len": max((info.max_model_len for info in infos), default=None),
        "capabilities": sorted(set.intersection(*(set(info.capabilities) for info in infos))) if infos else [],
        "num_ready_shards": sum(info.num_ready_shards for info in infos),
    }


def _anthropic_object(models: OfferedModels, name: str, model: ServedModel) -> dict[str, Any]:
    return model_object(name, model.created, models.window(model.name) or None)


def _anthropic_response(request: web.BaseRequest, body: dict[str, Any]) -> web.Response:
    check_version(request.headers.get(ANTHROPIC_VERSION))
    response = json_response(body)
    response.headers[ANTHROPIC_REQUEST_ID] = request_id(request)
    return response
