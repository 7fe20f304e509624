"""Finds the encoder of a new vector store: edges know the models, and the orchestrator does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aiohttp import web

from edge_http.edge import Edge
from edge_http.offered_models import CROSS_ENCODE, EMBED, GENERATE
from edge_http.state.bodies import VectorStoreBody
from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason

FIELD: Final = "embedding_model"
STARTING_SECONDS: Final = 5.0
"""When to try again while models start."""


def encoder_of(edge: Edge, request: web.BaseRequest, body: VectorStoreBody) -> Mapping[str, str]:
    """The model that the body names, or else the first encoder by name that the caller may use, and its window. Raises
    KvloomError (INVALID_ARGUMENT, NO_SHARD_READY, MODEL_NOT_FOUND, PERMISSION_DENIED, UNSUPPORTED_PARAMETER)."""
    name = body.embedding_model
    if name is None:
        able = {
            info.name
            for info in edge.link.fleet.models
            if EMBED in info.capabilities
            and {GENERATE, CROSS_ENCODE}.isdisjoint(info.capabilities)
            and info.name in edge.models.by_name
        }
        usable = sorted(edge.models.usable(request, able))
        if not usable and any(edge.models.info(model.name) is None for model in edge.models.by_name.values()):
            message = f"{FIELD}: no encoder is ready, and it is not known yet what some models can do."
            raise KvloomError(
                ErrorReason.ERROR_REASON_NO_SHARD_READY, message, field=FIELD, retry_after_seconds=STARTING_SECONDS
            )
        if not usable:
            message = (
                f"{FIELD}: this fabric serves no encoder that you may use. Name a model that gives embeddings, or have "
                "one added (kvloom up --model all-MiniLM-L6-v2)."
            )
            raise invalid_argument(message, FIELD)
        name = usable[0]
    try:
        edge.models.check(request, (name,))
        model = edge.models.find_embedding(name)
    except KvloomError as error:
        raise KvloomError(error.reason, error.message, field=FIELD) from error
    return {FIELD: model.name, "embedding_window": str(edge.models.window(model.name))}
