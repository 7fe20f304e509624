"""python -m shard_server --config FILE: one shard process, one engine."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

import kvloom_common.process.quick_start  # noqa: F401  # isort: split
from kvloom_common.config import KvloomConfig, load_config
from kvloom_common.metrics.exporter import add_metrics_flags, open_metrics
from kvloom_common.models.configured import config_of_model
from kvloom_common.models.model_card import PackedCard, make_card
from kvloom_common.plugins import PluginError
from kvloom_common.process import log_lines, service
from kvloom_common.process.extras import MissingPackageError, naming_extras
from kvloom_common.process.watched_files import following
from kvloom_common.text.model_checksum import ChecksumError, check_model, model_checksum
from kvloom_common.text.tokenizer import ModelTokenizer
from kvloom_common.tracing.tracer import open_tracer
from kvloom_common.trust.fabric_trust import load_trust
from shard_server.engines.base import Engine, EngineError
from shard_server.engines.create import create_engine
from shard_server.server import ShardServer
from shard_server.spot_notice import SpotNotices


async def serve(
    config: KvloomConfig,
    name: str,
    port: int,
    metrics_port: int | None,
    advertised_address: str = "",
    *,
    shares_metrics_port: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT, or until the engine dies. Raises StartError and SecretError; exits with 1 when the
    engine dies."""
    trust = load_trust(config, ("shard",), name)
    stop = service.stop_event()
    metrics = open_metrics(config, trust, "shard", name, metrics_port, shares_port=shares_metrics_port)
    notices = SpotNotices(config.shard.spot_notice_file, config.shard.spot_notice_seconds)
    notices.listen()
    tracer = open_tracer(config.tracing, "shard", name)
    engine, tokenizer, card = await asyncio.to_thread(_load, config)
    server = ShardServer(
        config,
        engine,
        tokenizer,
        name,
        advertised_address=advertised_address,
        trust=trust,
        card=card,
        make_engine=lambda: create_engine(config, tokenizer),
        notices=notices,
        on_leave=service.announce_end,
        tracer=tracer,
    )
    try:
        address = await server.start(port)
    except EngineError as error:
        raise service.StartError(f"{name}: {error}") from error
    info = engine.info
    del engine  # its memory is freed while the shard sleeps
    service.announce_ready(
        service.ReadyLine(address, metrics.address, engine=info.description or info.engine, variant=info.variant)
    )
    try:
        async with following(trust, metrics, *filter(None, (tracer,))):
            await server.serve(stop)
    except EngineError as error:
        sys.stderr.write(f"error: {name}: {error}\n")
        raise SystemExit(1) from error
    finally:
        tokenizer.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m shard_server", description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML or JSON file")
    parser.add_argument("--name", default=f"shard-{os.getpid()}", help="this shard's id, unique in the fleet")
    parser.add_argument("--model", default="", help="which of the configured models this shard serves")
    parser.add_argument("--role", choices=("prefill", "decode", "both"), help="instead of shard.role")
    parser.add_argument("--port", type=int, default=0, help="0 (the default) picks a free port")
    add_metrics_flags(parser)
    parser.add_argument("--advertised-address", default="", help="host:port for routers, if not the listening one")
    arguments = parser.parse_args()

    async def run() -> None:
        config = config_of_model(load_config(arguments.config), arguments.model)
        config.shard.role = arguments.role or config.shard.role
        log_lines.configure_logging(config.log, arguments.name)
        await serve(
            config,
            arguments.name,
            arguments.port,
            arguments.metrics_port,
            arguments.advertised_address,
            shares_metrics_port=arguments.share_metrics_port,
        )

    service.run_service(run())


def _load(config: KvloomConfig) -> tuple[Engine, ModelTokenizer, PackedCard]:
    """Create the engine, load the tokenizer and make the model's card; called in a thread. The engine loads its weights
    in `start`."""
    if not config.model.path:
        raise service.StartError("model.path is not set: the shard needs the model's tokenizer")
    try:
        check_model(Path(config.model.path), config.model.sha256)
        if config.router.receipts.enabled and not config.model.sha256:
            config.model.sha256 = model_checksum(Path(config.model.path))  # receipts name the weights
    except ChecksumError as error:
        raise service.StartError(str(error)) from error
    try:
        tokenizer = ModelTokenizer.load(Path(config.model.path))
        card = make_card(config.model)
        with naming_extras():
            return create_engine(config, tokenizer), tokenizer, card
    except PluginError as error:
        raise service.StartError(f"shard.engine: {error}") from error
    except (OSError, ValueError, EngineError) as error:
        raise service.StartError(f"{config.model.path}: {error}") from error
    except MissingPackageError as error:
        raise service.StartError(f"the {config.shard.engine} engine: {error}") from error


if __name__ == "__main__":
    main()
