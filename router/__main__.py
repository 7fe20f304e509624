"""python -m router --config FILE: runs one router process."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import kvloom_common.process.quick_start  # noqa: F401  # isort: split
from kvloom_common.config import KvloomConfig, load_config
from kvloom_common.models.catalogue import load_catalogue
from kvloom_common.process import log_lines, service
from kvloom_common.process.cpu_affinity import instance_number, kept_on_one_cpu
from kvloom_common.process.watched_files import following
from kvloom_common.trust.fabric_trust import load_trust
from router.process import RouterListenOptions, open_router


async def serve(config: KvloomConfig, name: str, listen_options: RouterListenOptions) -> None:
    """Serves until SIGTERM or SIGINT. Raises StartError and SecretError."""
    stop = service.stop_event()
    trust = load_trust(config, ("router",), name)
    catalogue = await asyncio.to_thread(load_catalogue, config)
    server, address, metrics = await open_router(config, catalogue, name, listen_options, trust)
    ready = service.ReadyLine(address, metrics.address, internal_address=server.internal_address)
    # Edges are pinned to CPUs from the first on, routers from the last on.
    with kept_on_one_cpu(-1 - instance_number(name), wanted=config.fabric.is_pinned_to_cpu):
        async with following(trust, metrics.until(stop)):
            await server.serve(stop, lambda: service.announce_ready(ready))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m router", description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML or JSON file")
    parser.add_argument("--name", default="router", help="the name of this process in logs and towards shards")
    parser.add_argument("--port", type=int, help="overrides router.port; 0 picks one")
    RouterListenOptions.add_flags(parser)
    arguments = parser.parse_args()

    async def run() -> None:
        config = load_config(arguments.config)
        log_lines.configure_logging(config.log, arguments.name)
        port = config.router.port if arguments.port is None else arguments.port
        await serve(config, arguments.name, RouterListenOptions.from_arguments(arguments, port))

    service.run_service(run())


if __name__ == "__main__":
    main()
