"""The command `python -m safety_svc --config FILE [--port N]`."""

from __future__ import annotations

import argparse
from pathlib import Path

import kvloom_common.process.quick_start  # noqa: F401  # isort: split
from kvloom_common.config import load_config
from kvloom_common.metrics.exporter import add_metrics_flags, open_metrics
from kvloom_common.process.service import run_service
from kvloom_common.process.telemetry import configure_logging
from kvloom_common.process.watched_files import following
from kvloom_common.trust.fabric_trust import load_trust
from safety_svc.server import serve


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m safety_svc", description="Serve kvloom's safety service.")
    parser.add_argument("--config", type=Path, help="kvloom.toml or its JSON form")
    parser.add_argument("--name", default="safety", help="the name of this process in logs")
    parser.add_argument("--port", type=int, help="overrides safety.port; 0 picks one")
    add_metrics_flags(parser)
    parser.add_argument("--share-port", action="store_true", help="allow a successor to listen on the same port")
    args = parser.parse_args()

    async def run() -> None:
        config = load_config(args.config)
        configure_logging(config.log, args.name)
        port = config.safety.port if args.port is None else args.port
        trust = load_trust(config, ("safety",), args.name)
        metrics = open_metrics(
            config, trust, "safety", args.name, args.metrics_port, shares_port=args.share_metrics_port
        )
        async with following(trust):
            await serve(config, port, metrics, trust, shares_port=args.share_port, name=args.name)

    run_service(run())


if __name__ == "__main__":
    main()
