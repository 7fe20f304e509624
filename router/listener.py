"""One way to reach a router: a gRPC server, and a local socket for processes of the same machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import grpc

from kvloom.v1.model_card_pb2_grpc import add_ModelCardServiceServicer_to_server
from kvloom.v1.overview_pb2_grpc import add_OverviewServiceServicer_to_server
from kvloom.v1.router_service_pb2 import RouterServiceConnectRequest
from kvloom.v1.router_service_pb2_grpc import add_RouterServiceServicer_to_server
from kvloom_common.models.card_service import ModelCardServicer
from kvloom_common.process import service
from kvloom_common.transport.checked_server import CheckedServer, MayCall
from kvloom_common.transport.local_server import LocalServer
from kvloom_common.trust.fabric_trust import NO_SECRET
from router.overview.servicer import OverviewServicer
from router.router_servicer import RouterServicer

MAX_CONCURRENT_RPCS: Final = 16_384


class RouterListener:
    """Call `bind`, then `start`, then `stop`."""

    def __init__(
        self,
        servicer: RouterServicer,
        cards: ModelCardServicer,
        overview: OverviewServicer,
        options: Sequence[tuple[str, Any]],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        may_call: MayCall | None = None,
    ) -> None:
        """`may_call`: for a listener that only processes of the fabric reach."""
        self.servicer = servicer
        self.server = grpc.aio.server(
            interceptors=interceptors, options=options, maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS
        )
        add_RouterServiceServicer_to_server(servicer, CheckedServer(self.server, may_call))
        add_OverviewServiceServicer_to_server(overview, CheckedServer(self.server, may_call))
        add_ModelCardServiceServicer_to_server(cards, CheckedServer(self.server, may_call))
        self.address = ""
        """The latest that was bound."""
        self.ports: set[int] = set()
        self._local = LocalServer(lambda stream: servicer.Connect(stream, stream), RouterServiceConnectRequest)

    def bind(self, host: str, port: int, add_port: service.AddPort = NO_SECRET.add_port) -> None:
        """Raises StartError when the port is taken. Clients that connect wait until `start`."""
        self.address = service.bind(self.server, host, port, add_port)
        self.ports.add(int(self.address.rpartition(":")[2]))

    async def start(self) -> None:
        # Clients try the local socket first.
        await self._local.start(self.address)
        await self.server.start()

    async def stop(self, grace_seconds: float) -> None:
        self.servicer.end_streams()
        await asyncio.gather(self.server.stop(grace_seconds), self._local.stop(grace_seconds))
