"""OfferedModels tells which models, adapters and routes an edge offers to whom, and what routers say of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from aiohttp import web

from edge_http.wire.request_callers import RequestCallers
from kvloom.adapters import unknown_name
from kvloom.errors import KvloomError, unsupported
from kvloom.router_link.link import RouterLink
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import ModelInfo
from kvloom_common.access.caller_access import check_models, usable
from kvloom_common.models.model_routes import Feature, ModelRoutes
from kvloom_common.models.served_model import ServedModel, adapters_by_model

GENERATE: Final = "generate"
EMBED: Final = "embed"
CROSS_ENCODE: Final = "cross_encode"
"""Capabilities; see ShardInfo.capabilities in shard_service.proto."""
_CAPABILITIES: Final[Mapping[Feature, str]] = {"schema": "guided", "logprobs": "logprobs", "vision": "vision"}
"""The capabilities that shards must have for a feature. Tools are a matter of the prompt and of parsing."""


class OfferedModels:
    """The models, which may come and go, and the routes of one edge."""

    def __init__(
        self,
        by_name: Mapping[str, ServedModel],
        routes: ModelRoutes,
        link: RouterLink,
        callers: RequestCallers,
        *,
        wait_for_shards: bool = False,
    ) -> None:
        """`by_name`: by name and alias. `wait_for_shards`: requests for a model without shards wait in the router."""
        self.by_name = by_name
        self.routes = routes
        self._link = link
        self._callers = callers
        self.wait_for_shards = wait_for_shards

    def check(self, request: web.BaseRequest, names: Iterable[str]) -> None:
        """Raises KvloomError (PERMISSION_DENIED) for the first model, adapter or route that the caller may not use."""
        principal = self._callers.principal_of(request)
        if principal is not None:
            check_models(principal, names, self.by_name)

    def check_requested(self, request: web.BaseRequest, name: str, more: Sequence[str] | None) -> None:
        """Checks, as `check` does, the names in a body: one that stands for all models stands for the usable
        ones."""
        if self._callers.have_tenants:
            names = () if self.routes.is_any(name, self.by_name) else (name,)
            self.check(request, (*names, *(more or ())))

    def usable(self, request: web.BaseRequest, names: Iterable[str]) -> Iterable[str]:
        """Returns which of these models, adapters and routes the caller may use."""
        principal = self._callers.principal_of(request)
        return names if principal is None else usable(principal, names, self.by_name)

    def find_usable(self, request: web.BaseRequest, name: str) -> ServedModel:
        """Finds a model as `find` does, for the caller of the request: also raises KvloomError
        (PERMISSION_DENIED)."""
        self.check(request, (name,))
        return self.find(name)

    def find(self, name: str) -> ServedModel:
        """Raises KvloomError (MODEL_NOT_FOUND)."""
        model = self.by_name.get(name)
        if model is None:
            message = unknown_name(name, adapters_by_model(self.by_name.values()))
            raise KvloomError(ErrorReason.ERROR_REASON_MODEL_NOT_FOUND, message, field="model")
        return model

    def resolved_name(self, name: str) -> str:
        """The name of the model that an alias stands for; that of no model is returned as it is."""
        model = self.by_name.get(name)
        return name if model is None else model.name

    def find_able(self, name: str, features: Iterable[Feature], *, may_wait: bool = False) -> ServedModel:
        """Finds a model as `find` does, if it is one of several that could take a request: also raises
        KvloomError (NO_SHARD_READY, UNSUPPORTED_PARAMETER) if no shard of it could. `may_wait`: a shard may start."""
        model = self.find(name)
        info = self.info(model.name)
        if info is None or not info.num_ready_shards:
            if may_wait:
                return model
            raise KvloomError(ErrorReason.ERROR_REASON_NO_SHARD_READY, f"No shard that serves {name!r} is ready now.")
        for feature in features:
            needed = _CAPABILITIES.get(feature)
            if needed is not None and needed not in info.capabilities:
                raise unsupported(f"{name!r} is served by an engine without the capability {needed!r}.", "model")
        return model

    def find_embedding(self, name: str, use: str = "") -> ServedModel:
        """The model, if it exists and gives embeddings. `use` is a further capability that they must have: "rerank" or
        "score". Raises KvloomError (MODEL_NOT_FOUND, UNSUPPORTED_PARAMETER)."""
        model = self.find(name)
        if model.adapter is not None:
            raise unsupported(f"{model.name!r} is an adapter: embeddings are those of its model alone.", "model")
        info = self.info(model.name)
        if info is not None and EMBED not in info.capabilities:
            raise unsupported(f"The model {model.name!r} gives no embeddings.", "model")
        if info is not None and CROSS_ENCODE in info.capabilities:
            if use:
                return model
            message = f"The model {model.name!r} compares two texts (POST /v1/rerank), and gives no embeddings."
            raise unsupported(message, "model")
        if info is not None and use and use not in info.capabilities:
            message = (
                f"The model {model.name!r} has no capability {use!r}: its embeddings were not trained to be compared."
            )
            raise unsupported(message, "model")
        return model

    def info(self, name: str) -> ModelInfo | None:
        """The router's description of a model (for an adapter, of its model); None while the router knows of no shard
        that serves it."""
        for model in self._link.fleet.models:
            if model.name == name:
                return model
        base_name = self._base_name(name)
        return self.info(base_name) if base_name else None

    def _base_name(self, name: str) -> str:
        """The model of an adapter; "" if the name is not that of an adapter."""
        model = self.by_name.get(name)
        return "" if model is None else model.base_name

    def window(self, name: str) -> int:
        """The maximum length of a model's prompt and answer together, in tokens; 0 while it is not known."""
        info = self.info(name)
        return info.max_model_len if info is not None else 0

    def generation_window(self, name: str) -> int:
        """Returns the window as `window` does. Raises KvloomError (UNSUPPORTED_PARAMETER) for a model that generates no
        text."""
        for info in self._link.fleet.models:
            if info.name == name:
                if info.embedding_size and GENERATE not in info.capabilities:
                    raise unsupported(f"The model {name!r} generates no text: it gives embeddings only.", "model")
                return info.max_model_len
        base_name = self._base_name(name)
        return self.generation_window(base_name) if base_name else 0

    def not_ready_reason(self, model: str) -> str:
        """Returns why no request for the model ("": for any one) can be served now; "" when one can."""
        if not self._link.connected:
            return "the router cannot be reached"
        if self._link.fleet.draining:
            return "the router is draining"
        if model and model not in self.by_name:
            return "the model is not served"
        if self.wait_for_shards and self.by_name:
            return ""
        wanted = {self._base_name(model) or self.by_name[model].name} if model else self.by_name
        infos = (info for info in self._link.fleet.models if info.name in wanted)
        return "" if any(info.num_ready_shards for info in infos) else "no shard is ready"
