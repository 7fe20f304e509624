"""vLLM's calls that load and unload adapters: off unless allowed, and only directories below one that is configured."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvloom.v1 import supervisor_service_pb2_grpc
from kvloom.v1.supervisor_service_pb2 import (
    LoadModelAdapterRequest,
    LoadModelAdapterResponse,
    UnloadModelAdapterRequest,
    UnloadModelAdapterResponse,
)
from kvloom_common.config import EdgeConfig
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.process.control_socket import SOCKET
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.served_models import tiny_model

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Supervisor(supervisor_service_pb2_grpc.SupervisorServiceServicer):
    """Does what it is told, and the catalogue learns of it."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.loaded: list[LoadModelAdapterRequest] = []
        self.refusal = ""

    async def LoadModelAdapter(
        self, request: LoadModelAdapterRequest, context: Any
    ) -> AsyncIterator[LoadModelAdapterResponse]:
        if self.refusal:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        self.loaded.append(request)
        yield LoadModelAdapterResponse(step="done")
        self.catalogue.set_adapters({request.model: {request.name: "1"}})

    async def UnloadModelAdapter(
        self, request: UnloadModelAdapterRequest, context: Any
    ) -> AsyncIterator[UnloadModelAdapterResponse]:
        yield UnloadModelAdapterResponse(step=f"{request.model}:{request.name}")
        self.catalogue.set_adapters({})


@contextlib.asynccontextmanager
async def world_of(config: EdgeConfig, run_folder: Path) -> AsyncIterator[tuple[EdgeWorld, Supervisor]]:
    supervisor = Supervisor(Catalogue([tiny_model()]))
    server = grpc.aio.server()
    supervisor_service_pb2_grpc.add_SupervisorServiceServicer_to_server(supervisor, server)
    server.add_insecure_port(f"unix:{run_folder / SOCKET}")
    await server.start()
    try:
        async with edge_world(config) as world:
            world.edge.models.by_name = supervisor.catalogue.by_name
            world.edge.run_folder = run_folder
            yield world, supervisor
    finally:
        await server.stop(None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With an adapter, one outside, and a link from inside to that."""
    for name in ("adapters/law", "outside/poetry"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "adapters/file").touch()
    (tmp_path / "adapters/link").symlink_to(tmp_path / "outside/poetry")
    return tmp_path


def allowing(folder: Path) -> EdgeConfig:
    return EdgeConfig(allow_adapter_changes=True, adapters_dir=str(folder / "adapters"))


async def test_it_is_as_if_the_paths_did_not_exist(folder: Path) -> None:
    """What a caller of the API may not change, it need not know of."""
    async with world_of(EdgeConfig(), folder) as (world, supervisor):
        for path in (LOAD, UNLOAD):
            status, body = await world.post(path, {"lora_name": "law", "lora_path": "law"})
            assert (status, body["error"]["code"]) == (404, "not_found")
        assert not supervisor.loaded


async def test_an_adapter_is_loaded_and_unloaded_as_at_vllm(folder: Path) -> None:
    """Tools that manage adapters of vLLM find the same answers, and the adapter is served when they have them."""
    async with world_of(allowing(folder), folder) as (world, supervisor):
        for wanted in ("law", str(folder / "adapters/law")):
            body = {"lora_name": "law", "lora_path": wanted, "base_model_name": "tiny"}
            async with world.http.post(world.url + LOAD, json=body) as response:
                assert response.status == 200
                assert await response.text() == "Success: LoRA adapter 'law' added successfully."
            assert supervisor.loaded[-1].path == str(folder / "adapters/law")
            assert "law" in world.edge.models.by_name
            assert (await world.post(LOAD, body))[1]["error"]["message"].endswith("has already been loaded.")
            async with world.http.post(world.url + UNLOAD, json={"lora_name": "law", "lora_int_id": 1}) as response:
                assert response.status == 200
                assert await response.text() == "Success: LoRA adapter 'law' removed successfully."
            assert "law" not in world.edge.models.by_name


@pytest.mark.parametrize(
    "path",
    [".", "..", "../outside/poetry", "law/../../outside/poetry", "link", "file", "none", "/etc", "x\0y", "a" * 4000],
)
async def test_only_directories_below_the_configured_one_can_be_loaded(folder: Path, path: str) -> None:
    """A caller of the API must not make shards read any other file of the machine, or learn whether it exists."""
    async with world_of(allowing(folder), folder) as (world, supervisor):
        status, body = await world.post(LOAD, {"lora_name": "law", "lora_path": path})
        assert (status, body["error"]["param"]) == (400, "lora_path")
        assert body["error"]["message"] == "lora_path must be a directory below edge.adapters_dir."
        assert not supervisor.loaded


async def test_what_is_wrong_is_said(folder: Path) -> None:
    """Also what the shards find wrong with the files."""
    async with world_of(allowing(folder), folder) as (world, supervisor):
        status, body = await world.post(UNLOAD, {"lora_name": "tiny"})
        assert (status, body["error"]["message"]) == (404, "The lora adapter 'tiny' cannot be found.")
        for field, value in (("lora_name", "a b"), ("lora_path", ""), ("base_model_name", "huge")):
            status, body = await world.post(LOAD, {"lora_name": "law", "lora_path": "law", field: value})
            assert status == (404 if field == "base_model_name" else 400)
            assert body["error"]["param"] == field
        supervisor.refusal = "tiny:law was not loaded: its rank is 512"
        status, body = await world.post(LOAD, {"lora_name": "law", "lora_path": "law"})
        assert (status, body["error"]["message"]) == (400, "tiny:law was not loaded: its rank is 512.")
        world.edge.run_folder = folder / "adapters"
        assert (await world.post(LOAD, {"lora_name": "law", "lora_path": "law"}))[0] == 501
