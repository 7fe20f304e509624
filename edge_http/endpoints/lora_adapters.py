"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: adapters come and go by the API.

They are off unless edge.allow_adapter_changes is set. The work is done by the supervisor of this machine.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from edge_http.edge import Edge
from edge_http.offered_models import OfferedModels
from edge_http.openai.tokenization import LoadAdapterBody, decode_load, decode_unload
from edge_http.supervisor import supervisor
from edge_http.wire.body import read_json_body
from kvloom.adapters import full_name
from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.supervisor_service_pb2 import LoadModelAdapterRequest, UnloadModelAdapterRequest
from kvloom_common.models.served_model import ServedModel

TIMEOUT_SECONDS: Final = 600.0
KNOWN_TIMEOUT_SECONDS: Final = 5.0
"""How long this edge may take to learn what the supervisor has done."""
_LOOK_AGAIN_SECONDS: Final = 0.02
_NO_SUPERVISOR: Final = (
    "Adapters can be changed only at an edge that `kvloom up` has started, and that runs on a machine with shards."
)


async def load_lora_adapter(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/load_lora_adapter."""
    body = decode_load(await _body(edge, request))
    model = _base_model(edge.models, body)
    name = full_name(model, body.lora_name)
    if name in edge.models.by_name:
        raise invalid_argument(f"The lora adapter '{body.lora_name}' has already been loaded.", "lora_name")
    path = await asyncio.to_thread(_allowed_path, edge.config.adapters_dir, body.lora_path)
    await _run(edge, "LoadModelAdapter", LoadModelAdapterRequest(model=model, name=body.lora_name, path=str(path)))
    await _until_known(edge.models, name, is_known=True)
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora_adapter(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/unload_lora_adapter."""
    body = decode_unload(await _body(edge, request))
    served = edge.models.by_name.get(body.lora_name)
    if served is None or served.adapter is None:
        raise KvloomError(
            ErrorReason.ERROR_REASON_MODEL_NOT_FOUND,
            f"The lora adapter '{body.lora_name[:128]}' cannot be found.",
            field="lora_name",
        )
    name = served.adapter.name
    wanted = UnloadModelAdapterRequest(model=served.base_name, name=name, timeout_seconds=TIMEOUT_SECONDS)
    await _run(edge, "UnloadModelAdapter", wanted)
    await _until_known(edge.models, served.name, is_known=False)
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


async def _body(edge: Edge, request: web.BaseRequest) -> bytes:
    """Raises KvloomError."""
    if not edge.config.allow_adapter_changes:
        message = "This path does not exist (edge.allow_adapter_changes is false)."
        raise KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, message)
    caller = edge.callers.caller_of(request)
    with edge.admission.admit(caller), edge.admission.bodies.lease(caller) as lease:
        return await read_json_body(request, edge.config, lease)


def _base_model(models: OfferedModels, body: LoadAdapterBody) -> str:
    """The model of the adapter: the only one, if none is named. Raises KvloomError."""
    if body.base_model_name is not None:
        try:
            return _without_adapter(models.find(body.base_model_name))
        except KvloomError as error:
            error.field = "base_model_name"
            raise
    names = {model.name for model in models.by_name.values() if model.adapter is None}
    if len(names) != 1:
        message = f"There are {len(names)} models: base_model_name must say for which one the adapter is."
        raise invalid_argument(message, "base_model_name")
    return names.pop()


def _without_adapter(model: ServedModel) -> str:
    if model.adapter is not None:
        raise invalid_argument(f"{model.name!r} is an adapter, not a model.", "base_model_name")
    return model.name


def _allowed_path(folder: str, wanted: str) -> Path:
    """The directory, which must be below `folder`, wherever links lead. Blocks. Raises KvloomError."""
    root = Path(folder).resolve()
    try:
        path = (root / wanted).resolve()
        if path != root and path.is_relative_to(root) and path.is_dir():
            return path
    except (OSError, RuntimeError, ValueError):  # too long, links in a circle, a NUL character
        pass
    raise invalid_argument("lora_path must be a directory below edge.adapters_dir.", "lora_path")


async def _run(edge: Edge, rpc: str, request: Any) -> None:
    """Have the supervisor do it. Raises KvloomError."""
    try:
        async with supervisor(edge, _NO_SUPERVISOR) as stub:
            async for _ in getattr(stub, rpc)(request, timeout=TIMEOUT_SECONDS + KNOWN_TIMEOUT_SECONDS):
                pass
    except KvloomError as error:
        if error.reason == ErrorReason.ERROR_REASON_FAILED_PRECONDITION:
            raise invalid_argument(error.message, "lora_name") from error
        raise


async def _until_known(models: OfferedModels, name: str, *, is_known: bool) -> None:
    """Wait a moment, so that the caller's next request finds what this one has done."""
    try:
        async with asyncio.timeout(KNOWN_TIMEOUT_SECONDS):
            while (name in models.by_name) is not is_known:  # noqa: ASYNC110  (the catalogue has no event)
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
    except TimeoutError:
        pass
