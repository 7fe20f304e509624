"""python -m edge_http --config FILE [--name NAME] [--port N]"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import kvloom_common.process.quick_start  # noqa: F401  # isort: split
from edge_http.server.process import EdgeListenOptions, serve_edge
from kvloom_common.config import load_config
from kvloom_common.discovery.router_finder import linked_routers
from kvloom_common.models.catalogue import load_catalogue
from kvloom_common.process.cpu_affinity import instance_number, kept_on_one_cpu
from kvloom_common.process.log_lines import configure_logging
from kvloom_common.process.ready_line import ReadyLine
from kvloom_common.process.service import announce_ready, run_service, stop_event
from kvloom_common.process.watched_files import following
from kvloom_common.trust.fabric_trust import load_trust


async def serve(options: argparse.Namespace) -> None:
    """Run until SIGTERM or SIGINT. Raises StartError, ConfigError, SecretError."""
    config = load_config(options.config)
    configure_logging(config.log, options.name)
    stop = stop_event()
    trust = load_trust(config, ("edge",), options.name)
    catalogue = await asyncio.to_thread(load_catalogue, config)
    try:
        # Edges take CPUs from the first on, routers from the last on.
        with kept_on_one_cpu(instance_number(options.name), wanted=config.fabric.is_pinned_to_cpu):
            async with linked_routers(config, options.name, trust) as link, following(trust):
                listen = EdgeListenOptions.from_arguments(options, config)
                await serve_edge(config, link, catalogue, listen, stop, _on_ready, trust, options.name)
    finally:
        catalogue.close()


def _on_ready(address: str, metrics_address: str, peer_address: str) -> None:
    announce_ready(ReadyLine(address, metrics_address, peer_address=peer_address))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m edge_http", description="The OpenAI-compatible HTTP edge.")
    parser.add_argument("--config", type=Path, required=True, help="TOML or JSON file")
    parser.add_argument("--name", default="edge-0", help="name in logs and towards the router")
    parser.add_argument("--port", type=int, default=None, help="overrides edge.port; 0 picks one")
    EdgeListenOptions.add_flags(parser)
    run_service(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
