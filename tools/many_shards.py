"""python -m tools.many_shards --config FILE --first N --count N: several simulated shards in one process.

Each is the shard that shard_server runs alone: its own engine, port, name in the registry and streams to every router.
They share the interpreter, the tokenizer and the event loop, so that a fleet of hundreds fits one machine and the cost
of the processes in front of it can be measured. No /metrics: each shard's would have the same names.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvloom_common.config import KvloomConfig, load_config
from kvloom_common.discovery.registry import HEARTBEAT_SECONDS
from kvloom_common.models.configured import config_of_model
from kvloom_common.models.model_card import make_card
from kvloom_common.process.log_lines import configure_logging
from kvloom_common.process.ready_line import ReadyLine
from kvloom_common.process.service import StartError, announce_ready, run_service, stop_event
from kvloom_common.process.watched_files import following
from kvloom_common.text.tokenizer import ModelTokenizer
from kvloom_common.trust.fabric_trust import FabricTrust, load_trust
from shard_server.engines.base import EngineError
from shard_server.engines.create import create_engine
from shard_server.engines.engine_kinds import engine_kind
from shard_server.server import ShardServer
from tools.supervisor.process_specs import shard_name


async def serve(config: KvloomConfig, first: int, count: int, model: str = "") -> None:
    """Until SIGTERM or SIGINT. Raises StartError; ends with status 1 when an engine dies."""
    if engine_kind(config.shard.engine).shards_per_process is None:
        raise StartError(f"several shards in a process: only simulated ones (shard.engine is {config.shard.engine!r})")
    stop = stop_event()
    tokenizer = await asyncio.to_thread(ModelTokenizer.load, Path(config.model.path))
    card = await asyncio.to_thread(make_card, config.model)
    addresses: list[str] = []
    try:
        async with asyncio.TaskGroup() as shards:
            for number in range(count):
                engine = create_engine(config, tokenizer)
                name = shard_name(first + number, config.fabric.name_prefix, model)
                trust = load_trust(config, ("shard",), name)
                registry = CollectorRegistry()
                server = ShardServer(config, engine, tokenizer, name, metrics_registry=registry, trust=trust, card=card)
                addresses.append(await server.start())
                # Like shards that were started one by one, they register at different times.
                delay_seconds = HEARTBEAT_SECONDS * number / count
                shards.create_task(_serve_later(server, trust, delay_seconds, stop), name=name)
            announce_ready(ReadyLine(addresses[0]))
    except* EngineError as group:
        sys.stderr.write(f"error: {group.exceptions[0]}\n")
        raise SystemExit(1) from group
    finally:
        tokenizer.close()


async def _serve_later(server: ShardServer, trust: FabricTrust, delay_seconds: float, stop: asyncio.Event) -> None:
    await asyncio.sleep(delay_seconds)
    async with following(trust):
        await server.serve(stop)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.many_shards", description="Simulated shards, in one process."
    )
    parser.add_argument("--config", type=Path, required=True, help="TOML or JSON file")
    parser.add_argument("--name", default="shards", help="name in logs")
    parser.add_argument("--model", default="", help="which of the configured models the shards serve")
    parser.add_argument("--first", type=int, default=0, help="number of the first shard")
    parser.add_argument("--count", type=int, required=True)
    options = parser.parse_args()

    async def run() -> None:
        config = config_of_model(load_config(options.config), options.model)
        configure_logging(config.log, options.name)
        await serve(config, options.first, options.count, options.model)

    run_service(run())


if __name__ == "__main__":
    main()
