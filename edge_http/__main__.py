"""python -m edge_http --config FILE [--name NAME] [--port N]"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import xxhash

from edge_http.edge import Edge, ServedModel
from edge_http.health import VERSION
from edge_http.peers import Peers, join_peers
from edge_http.server import EdgeServer
from kvloom.config import KvloomConfig, load_config
from kvloom.router_link import GrpcRouterLink
from kvloom.service import StartError, announce_ready, run_service, stop_event
from kvloom.telemetry import configure_logging
from kvloom.tokenizer import ModelTokenizer


async def serve(config_path: Path, name: str, port: int | None) -> None:
    """Run until SIGTERM or SIGINT. Raises StartError, ConfigError."""
    config = load_config(config_path)
    configure_logging(config.log, name)
    stop = stop_event()
    model = await asyncio.to_thread(load_model, config)
    link = GrpcRouterLink(f"{config.router.host}:{config.router.port}", name)
    edge = Edge(config.edge, link, {model.name: model})
    server = EdgeServer(edge)
    peers: Peers | None = None
    await link.start()
    try:
        address = await server.start(config.edge.host, config.edge.port if port is None else port)
        peers = join_peers(edge, config.redis, address)
        announce_ready(address, metrics_address=address)
        await stop.wait()
        await server.drain()
        if peers is not None:
            await peers.stop_publishing()
        await server.stop()
    finally:
        if peers is not None:
            await peers.close()
        await link.close()
        model.tokenizer.close()


def load_model(config: KvloomConfig) -> ServedModel:
    """Raises StartError when the model's tokenizer cannot be read."""
    if not config.model.path:
        raise StartError("model.path is not set: the edge needs the model's tokenizer")
    try:
        tokenizer = ModelTokenizer.load(Path(config.model.path))
    except (OSError, ValueError) as error:
        raise StartError(f"cannot load the tokenizer: {error}") from error
    fingerprint = xxhash.xxh3_64_hexdigest(f"{VERSION}\0{config.model.name}".encode())[:10]
    return ServedModel(config.model.name, tokenizer, int(time.time()), f"fp_{fingerprint}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m edge_http", description="The OpenAI-compatible HTTP edge.")
    parser.add_argument("--config", type=Path, required=True, help="TOML or JSON file")
    parser.add_argument("--name", default="edge-0", help="name in logs and towards the router")
    parser.add_argument("--port", type=int, default=None, help="overrides edge.port; 0 picks one")
    parser.add_argument("--metrics-port", type=int, default=None, help="unused: /metrics is on the edge's own port")
    options = parser.parse_args()
    run_service(serve(options.config, options.name, options.port))


if __name__ == "__main__":
    main()
