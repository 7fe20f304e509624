"""The command `python -m control --config FILE [--port N]`."""

from __future__ import annotations

import argparse
from pathlib import Path

import kvloom_common.process.quick_start  # noqa: F401  # isort: split
from control.service.server import serve
from kvloom_common.config import load_config
from kvloom_common.metrics.exporter import add_metrics_flags, open_metrics
from kvloom_common.process.service import run_service
from kvloom_common.process.telemetry import configure_logging
from kvloom_common.process.watched_files import following
from kvloom_common.trust.fabric_trust import load_trust


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m control", description="Serve kvloom's tenants, keys and limits.")
    parser.add_argument("--config", type=Path, help="kvloom.toml or its JSON form")
    parser.add_argument("--name", default="control", help="the name of this process in logs")
    parser.add_argument("--port", type=int, help="overrides control.port; 0 picks one")
    add_metrics_flags(parser)
    parser.add_argument("--share-port", action="store_true", help="listen on a port that the supervisor holds, too")
    args = parser.parse_args()

    async def run() -> None:
        config = load_config(args.config)
        configure_logging(config.log, args.name)
        port = config.control.port if args.port is None else args.port
        trust = load_trust(config, ("control",), args.name)
        metrics = open_metrics(
            config, trust, "control", args.name, args.metrics_port, shares_port=args.share_metrics_port
        )
        async with following(trust):
            await serve(config, port, metrics, trust, shares_port=args.share_port, name=args.name)

    run_service(run())


if __name__ == "__main__":
    main()
