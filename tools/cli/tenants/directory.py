"""Asks the control service of a fabric about its tenants."""

from __future__ import annotations

import asyncio
import dataclasses
import getpass
import socket
from collections.abc import Iterator
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvloom.errors import KvloomError
from kvloom.transport.grpc_errors import error_from_peer
from kvloom.v1 import directory_service_pb2, directory_service_pb2_grpc
from tools.failures import CommandError
from tools.fleet.control import control_channel
from tools.fleet.members import FleetAccess
from tools.options import FabricFlags, config_option, data_dir_option, given_as, option

CALL_SECONDS: Final = 30.0
_PAGE_SIZE: Final = 1000


@dataclasses.dataclass(frozen=True)
class Directory(FabricFlags):
    """The tenants of the fabric of a data directory."""

    def ask(self, method: str, **fields: Any) -> Any:
        """Call a method of DirectoryService with a request of these fields. Raises CommandError."""
        request = getattr(directory_service_pb2, f"{method}Request")(**fields)
        try:
            return asyncio.run(self._ask(method, request))
        except KvloomError as error:
            raise CommandError(f"{error.field}: {error.message}" if error.field else error.message) from error

    def list_all(self, method: str, field: str, *, at_most: int = 0, **fields: Any) -> Iterator[Any]:
        """Yields what a method lists in pages, in this field. Raises CommandError."""
        token, found = "", 0
        while True:
            size = min(_PAGE_SIZE, at_most - found) if at_most else _PAGE_SIZE
            page = self.ask(method, page_size=size, page_token=token, **fields)
            yield from getattr(page, field)
            found += len(getattr(page, field))
            token = page.next_page_token
            if not token or (at_most and found >= at_most):
                return

    async def _ask(self, method: str, request: Message) -> Any:
        fleet = FleetAccess.open(self)
        if not fleet.config.control.enabled:
            raise CommandError(
                "this fabric has no tenants: start it with `kvloom up --control`, or set control.enabled in its file"
            )
        async with control_channel(fleet) as channel:
            # Once only: a call that breaks off may have been carried out.
            return await _call(channel, method, request)


async def _call(channel: grpc.aio.Channel, method: str, request: Message) -> Any:
    """Raises KvloomError and CommandError."""
    stub = directory_service_pb2_grpc.DirectoryServiceStub(channel)
    try:
        return await getattr(stub, method)(request, metadata=_metadata(), timeout=CALL_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise error_from_peer(error) or CommandError(f"control has not answered: {error.details()}") from error


def _metadata() -> list[tuple[str, str]]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    name = f"cli:{user}@{socket.gethostname()}"
    return [("kvloom-actor", name.encode("ascii", "replace").decode())]


directory_options: Final = given_as("directory", Directory, config_option, data_dir_option)


def json_option(scope: str) -> Any:
    return option("--json", "as_json", scope=scope, is_flag=True, help="Print JSON.")
