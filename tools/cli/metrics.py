"""`kvloom metrics targets`: the processes that serve /metrics, for Prometheus' service discovery."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

import click
import msgspec
import redis.exceptions

from kvloom_common.config import KvloomConfig
from kvloom_common.metrics.targets import http_sd, metrics_registry
from kvloom_common.private_file import write_private_file
from tools.fabric_trust import trust_of
from tools.failures import CommandError
from tools.options import FabricFlags, choose_data_dir, fabric_options, load_config_file, option
from tools.supervisor.state import RunFolder

FOLLOW_SECONDS: Final = 5.0
"""The metrics are followed for so long, as the announcement of a dead process lasts."""
_FILE_MODE: Final = 0o644
"""Prometheus may be another user."""


@click.group()
def metrics() -> None:
    """Where the metrics of the fleet are scraped."""


@metrics.command()
@option(
    "--file",
    "file",
    scope="metrics",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write to this file, for Prometheus' file_sd_configs, instead of printing.",
)
@option("--follow", scope="metrics", is_flag=True, help="Keep the file up to date until this command is stopped.")
@fabric_options
def targets(file: Path | None, follow: bool, fabric: FabricFlags) -> None:
    """List the processes that serve /metrics, as the JSON of Prometheus' service discovery.

    The list is that of all machines that share the Redis of the fabric that runs with this data directory; where none
    runs, that of redis.url in the configuration file. An edge serves the same list at /metrics/targets.
    """
    if follow and file is None:
        raise click.UsageError("--follow needs --file")
    _write(asyncio.run(_list(_config(fabric))), file)
    failing = False
    while follow:
        time.sleep(FOLLOW_SECONDS)
        try:
            _write(asyncio.run(_list(_config(fabric))), file)
            failing = False
        except CommandError as error:
            if not failing:
                click.echo(f"{error.message} (the file stays as it is; trying again)", err=True)
            failing = True


def _config(fabric: FabricFlags) -> KvloomConfig:
    config = fabric.load_config()
    folder = RunFolder(choose_data_dir(fabric.data_dir, config))
    if not config.redis.url:
        folder.require_running()
        return load_config_file(folder.config_path)
    return config


async def _list(config: KvloomConfig) -> bytes:
    registry = metrics_registry(config, trust_of(config))
    assert registry is not None, "the configuration has a Redis"
    try:
        found = await registry.list_targets()
    except (redis.exceptions.RedisError, OSError) as error:
        raise CommandError(f"Redis cannot be reached: {error}") from error
    finally:
        await registry.close()
    return msgspec.json.format(msgspec.json.encode(http_sd(found)), indent=2) + b"\n"


def _write(content: bytes, file: Path | None) -> None:
    """Atomically, because Prometheus reads the file whenever it changes."""
    if file is None:
        print(content.decode(), end="")
        return
    try:
        if file.exists() and file.read_bytes() == content:
            return
        write_private_file(file, content, _FILE_MODE)
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error.strerror}") from error
