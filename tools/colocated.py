"""python -m tools.colocated --config FILE: runs an edge with a router inside, in one process and on one event loop.

Edge and router are the same as in processes of their own (edge_http, router); only the link between them differs. The
router still serves its gRPC API, to SDKs and to edges elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from edge_http.server.process import EdgeListenOptions, serve_edge
from kvloom_common.config import load_config
from kvloom_common.models.catalogue import load_catalogue
from kvloom_common.process.cpu_affinity import instance_number, kept_on_one_cpu
from kvloom_common.process.log_lines import configure_logging
from kvloom_common.process.ready_line import ReadyLine
from kvloom_common.process.service import announce_ready, run_service, stop_event
from kvloom_common.process.watched_files import following
from kvloom_common.trust.fabric_trust import load_trust
from router.process import RouterListenOptions, open_router


async def serve(options: argparse.Namespace) -> None:
    """Serves until SIGTERM or SIGINT. The edge ends first because it is the router's client. Raises StartError,
    ConfigError."""
    config = load_config(options.config)
    configure_logging(config.log, options.name)
    stop = stop_event()
    trust = load_trust(config, ("router", "edge"), options.name)
    catalogue = await asyncio.to_thread(load_catalogue, config)
    router_port = config.router.port if options.router_port is None else options.router_port
    listen_options = RouterListenOptions.from_arguments(options, router_port)
    router, router_address, router_metrics = await open_router(config, catalogue, options.name, listen_options, trust)

    def on_ready(address: str, metrics_address: str, peer_address: str) -> None:
        line = ReadyLine(address, metrics_address, router_address, router_metrics.address, router.internal_address)
        line.peer_address = peer_address
        announce_ready(line)

    link = router.local_link(options.name)
    edge_has_ended = asyncio.Event()

    async def serve_edge_side() -> None:
        try:
            edge_listen_options = EdgeListenOptions.from_arguments(options, config)
            await serve_edge(
                config, link, catalogue, edge_listen_options, stop, on_ready, trust, options.name, router.callers
            )
        finally:
            await link.close()
            edge_has_ended.set()

    await link.start()
    try:
        with kept_on_one_cpu(instance_number(options.name), wanted=config.fabric.is_pinned_to_cpu):
            async with following(trust, router_metrics.until(stop)), asyncio.TaskGroup() as tasks:
                tasks.create_task(router.serve(edge_has_ended), name="router")
                tasks.create_task(serve_edge_side(), name="edge")
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    finally:
        catalogue.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.colocated", description="An HTTP edge with a router inside.")
    parser.add_argument("--config", type=Path, required=True, help="TOML or JSON file")
    parser.add_argument("--name", default="edge-0", help="name in logs and towards shards")
    parser.add_argument("--port", type=int, help="overrides edge.port; 0 picks one")
    parser.add_argument("--router-port", type=int, help="overrides router.port; 0 picks one")
    EdgeListenOptions.add_flags(parser)
    RouterListenOptions.add_flags(parser)
    run_service(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
