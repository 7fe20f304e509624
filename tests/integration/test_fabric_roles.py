"""The certificate of one process, in the hands of a thief, is good for no more than the process itself may do."""

from __future__ import annotations

import importlib
from typing import Any, Final

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from kvloom_common.transport.checked_server import CheckedServer
from kvloom_common.trust import roles
from kvloom_common.trust.secret import FabricSecret
from kvloom_common.trust.shared_secret import SharedSecret
from tests.conftest import REPOSITORY

SECRET: Final = FabricSecret.draw()
ROLES: Final = (
    roles.CONTROL, roles.EDGE, roles.ROUTER, roles.SAFETY, roles.SHARD, roles.SUPERVISOR, roles.TOOLS,
)  # fmt: skip


def services() -> dict[str, Any]:
    """All services of kvloom's own protos, by full name. KEDA's is served by `kvloom scaler` alone, at its own port."""
    found = {}
    for file in sorted((REPOSITORY / "protos" / "kvloom" / "v1").glob("*.proto")):
        module = importlib.import_module(f"kvloom.v1.{file.stem}_pb2")
        for service in module.DESCRIPTOR.services_by_name.values():
            if not service.full_name.startswith("kvloom."):
                continue
            found[service.full_name] = importlib.import_module(f"kvloom.v1.{file.stem}_pb2_grpc"), service
    return found


def test_the_table_names_every_service_and_nothing_else() -> None:
    """A forgotten service would be refused to all; a method that is gone would be a hole for its successor."""
    known = services()
    ours = {name for name in roles.CALLERS if name.startswith("kvloom.")}
    for name in ours:
        service, _, method = name.partition("/")
        assert service in known
        assert not method or method in known[service][1].methods_by_name
    for full_name, (_, service) in known.items():
        for method in service.methods_by_name:
            assert roles.may_call(f"{full_name}/{method}", ROLES)
    assert not roles.may_call("kvloom.v1.AnotherService/Call", ROLES)


@pytest.mark.parametrize("method", sorted(f"{name}/{method}" for name, (_, service) in services().items()
                                          for method in service.methods_by_name))  # fmt: skip
def test_a_shards_or_the_safety_services_identity_calls_nothing(method: str) -> None:
    """They only answer: a machine with accelerators that was broken into mints no usage, and administers nothing."""
    assert not roles.may_call(method, {roles.SHARD, roles.SAFETY, roles.CONTROL})


def test_what_moves_money_is_for_those_that_do_it() -> None:
    """An edge may neither lease budgets nor drain shards, and a router may not administer tenants."""
    assert not roles.may_call("kvloom.v1.ControlService/LeaseBudgets", {roles.EDGE, roles.TOOLS})
    assert not roles.may_call("kvloom.v1.DirectoryService/CreateKey", {roles.ROUTER})
    assert not roles.may_call("kvloom.v1.UsageService/GetUsage", {roles.ROUTER})
    for method in ("Drain", "Withdraw", "Sleep", "LoadAdapter"):
        assert not roles.may_call(f"kvloom.v1.ShardService/{method}", {roles.EDGE, roles.ROUTER})


class Everything:
    """A servicer of any service, which has nothing."""

    def __getattr__(self, _name: str) -> Any:
        async def answer(_request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "")

        return answer


async def outcome(channel: grpc.aio.Channel, path: str, method: Any) -> str:
    """The status code of a call with an empty request."""
    request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call = getattr(channel, kind)(
        path, request_serializer=request.SerializeToString, response_deserializer=response.FromString
    )(iter(()) if method.client_streaming else request(), timeout=10.0)
    try:
        if method.server_streaming:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


@pytest.mark.parametrize("role", ROLES)
async def test_every_method_asks_for_the_callers_role(role: str) -> None:
    """By real certificates, over TLS: (role × method). A certificate with several roles has the rights of each."""
    server = grpc.aio.server()
    own = SharedSecret(SECRET, (roles.CONTROL,), "server")
    known = services()
    for full_name, (module, _) in known.items():
        short = full_name.rpartition(".")[2]
        getattr(module, f"add_{short}Servicer_to_server")(Everything(), CheckedServer(server, own.may_call))
    port = own.add_port(server, "127.0.0.1:0")
    await server.start()
    try:
        thief = SharedSecret(SECRET, (role,), "stolen")
        async with thief.open_channel(f"127.0.0.1:{port}", roles.CONTROL, "server") as channel:
            for full_name, (_, service) in known.items():
                for name, method in service.methods_by_name.items():
                    refused = await outcome(channel, f"/{full_name}/{name}", method) == "PERMISSION_DENIED"
                    assert refused != roles.may_call(f"{full_name}/{name}", {role}), (role, full_name, name)
    finally:
        await server.stop(None)
