"""A router from the settings to the moment it listens, in a process of its own or in an edge's."""

from __future__ import annotations

import argparse
import dataclasses
import secrets
from pathlib import Path

from kvloom.config import KvloomConfig
from kvloom.process import service, telemetry
from kvloom.text.tokenizer import ModelTokenizer
from router.core.core import RouterCore
from router.core_config import core_config
from router.server import RouterServer


@dataclasses.dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where a router listens, all on `router.host`. Port 0 picks one."""

    port: int
    shares_port: bool = False
    """With routers that the same supervisor has started: it holds the port against others."""
    own_port: int | None = None
    """One that no other router shares: where edges find this one."""
    metrics_port: int | None = None
    """None: no /metrics."""


def add_listen_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--share-port", action="store_true", help="let other routers listen on router.port, too")
    parser.add_argument("--own-port", type=int, help="also listen there, alone, for edges; 0 picks one")
    parser.add_argument("--metrics-port", type=int, help="serve /metrics there; 0 picks one")


def listen_options_from(options: argparse.Namespace, port: int) -> ListenOptions:
    return ListenOptions(port, options.share_port, options.own_port, options.metrics_port)


async def open_router(
    config: KvloomConfig, tokenizer: ModelTokenizer, name: str, listen_options: ListenOptions
) -> tuple[RouterServer, str, str]:
    """A router that listens, its address and that of /metrics ("": none). Raises StartError."""
    if not config.redis.url:
        raise service.StartError("redis.url is not set: the router finds its shards there")
    host = config.router.host
    server = RouterServer(config, _new_core(config), tokenizer, name, shares_port=listen_options.shares_port)
    address = await server.start(host, listen_options.port, listen_options.own_port)
    port = listen_options.metrics_port
    return server, address, "" if port is None else f"{host}:{_serve_metrics(host, port)}"


def _new_core(config: KvloomConfig) -> RouterCore:
    try:
        return RouterCore(core_config(config), seed=secrets.randbits(64))
    except ValueError as error:  # e.g. a placement policy that does not exist
        raise service.StartError(f"router: {error}") from error


def load_tokenizer(config: KvloomConfig) -> ModelTokenizer:
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
