"""python -m router --config FILE: one router process."""

from __future__ import annotations

import argparse
import asyncio
import secrets
from pathlib import Path

from kvloom import service, telemetry
from kvloom.config import KvloomConfig, load_config
from kvloom.tokenizer import ModelTokenizer
from router.core.core import RouterCore
from router.core_config import core_config
from router.server import RouterServer


async def serve(config: KvloomConfig, name: str, port: int, metrics_port: int | None) -> None:
    """Until SIGTERM or SIGINT. Raises StartError."""
    stop = service.stop_event()
    if not config.redis.url:
        raise service.StartError("redis.url is not set: the router finds its shards there")
    host = config.router.host
    server = RouterServer(config, _new_core(config), await asyncio.to_thread(_load_tokenizer, config), name)
    address = await server.start(host, port)
    metrics_address = "" if metrics_port is None else f"{host}:{_serve_metrics(host, metrics_port)}"
    service.announce_ready(address, metrics_address)
    await server.serve(stop)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m router", description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML or JSON file")
    parser.add_argument("--name", default="router", help="how this process calls itself in logs and to shards")
    parser.add_argument("--port", type=int, help="instead of router.port; 0 picks one")
    parser.add_argument("--metrics-port", type=int, help="serve /metrics there; 0 picks one")
    arguments = parser.parse_args()

    async def run() -> None:
        config = load_config(arguments.config)
        telemetry.configure_logging(config.log, arguments.name)
        port = config.router.port if arguments.port is None else arguments.port
        await serve(config, arguments.name, port, arguments.metrics_port)

    service.run_service(run())


def _new_core(config: KvloomConfig) -> RouterCore:
    try:
        return RouterCore(core_config(config), seed=secrets.randbits(64))
    except ValueError as error:  # e.g. a placement policy that does not exist
        raise service.StartError(f"router: {error}") from error


def _load_tokenizer(config: KvloomConfig) -> ModelTokenizer:
    if not config.model.path:
        raise service.StartError("model.path is not set: the router needs the model's tokenizer")
    try:
        return ModelTokenizer.load(Path(config.model.path))
    except (OSError, ValueError) as error:
        raise service.StartError(f"cannot load the tokenizer of {config.model.name}: {error}") from error


def _serve_metrics(host: str, port: int) -> int:
    try:
        return telemetry.serve_metrics(host, port)
    except OSError as error:
        raise service.StartError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error


if __name__ == "__main__":
    main()
