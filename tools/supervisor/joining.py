"""Checks and completes a machine's configuration before it joins a fleet, that is, other machines that share a
Redis."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import redis.exceptions

from kvloom_common.access.exposure import is_loopback
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.announcer import name_owner
from kvloom_common.trust.fabric_trust import FabricTrust
from kvloom_common.trust.secret import ENVIRONMENT_VARIABLE
from tools.failures import CommandError
from tools.supervisor.fleet_records import FleetRecords
from tools.supervisor.fleet_registry import FleetRegistry
from tools.supervisor.process_specs import possible_roles, started_roles, supervisor_name
from tools.supervisor.reporters import Reporter
from tools.supervisor.service.client import UnreachableError, remote_supervisor

_MAX_PREFIX_CHARS: Final = 32


def check_roles(config: KvloomConfig) -> None:
    """Raises CommandError for settings that only make sense with a fleet's Redis, or that contradict one another."""
    roles, possible = started_roles(config), possible_roles(config)
    for role in ("control", "orchestrator"):
        if role in config.fabric.roles and role not in possible:
            lacks = "tenants (docs/operate/tenancy.md)" if role == "control" else "state (docs/how-to/stored-state.md)"
            raise CommandError(f"--role {role} needs --{role}: without it the fabric has no {lacks}")
    if config.edge.colocate and "edge" not in roles:
        raise CommandError("--colocate puts a router into each edge: it needs --role edge")
    if config.redis.url:
        return
    is_part = is_part_without_redis(config)
    if len(roles) < len(possible) and not is_part and not _missing(config) <= _inside_edges(config):
        raise CommandError(
            f"--role {' --role '.join(roles)} needs the Redis that this machine shares with the others of the fleet: "
            "--join redis://HOST (docs/operate/fleet.md). Without it, machines with only shards (--shard-port) are "
            "found by machines of all other roles (--shards-at)"
        )
    if config.fabric.advertised_host and not is_part:
        raise CommandError("--advertise is for a fleet: give its Redis by --join redis://HOST (docs/operate/fleet.md)")


def is_part_without_redis(config: KvloomConfig) -> bool:
    """True for a machine of a fabric whose machines share no Redis: it has only shards, at a port that the others know,
    or all the rest, which knows where the shards are."""
    if started_roles(config) == ("shard",):
        return bool(config.shard.port)
    return bool(config.router.shards) and _missing(config) - _inside_edges(config) == {"shard"}


def _missing(config: KvloomConfig) -> set[str]:
    return set(possible_roles(config)) - set(started_roles(config))


def _inside_edges(config: KvloomConfig) -> set[str]:
    return {"router"} if config.edge.colocate else set()


def complete_addresses(config: KvloomConfig, reporter: Reporter) -> None:
    """From the advertised host, choose where the processes listen for their fleet and what their names begin with.
    Raises CommandError."""
    host = config.fabric.advertised_host
    if not host:
        if config.redis.url and not is_loopback(redis_host(config.redis.url)) and _is_hidden(config):
            reporter.step(
                "warning: other machines cannot reach the processes of this one, which listen on loopback only: give "
                "the host by which they reach it with --advertise HOST"
            )
        return
    if not config.fabric.host:
        config.fabric.host = listening_host(host)
    if not config.fabric.name_prefix:
        config.fabric.name_prefix = prefix_of(host)
        reporter.step(
            f"names of processes begin with {config.fabric.name_prefix} (from --advertise {host}; choose another with "
            "--name-prefix)"
        )


def _is_hidden(config: KvloomConfig) -> bool:
    return all(is_loopback(config.fabric.host or host) for host in (config.shard.host, config.router.host))


def listening_host(advertised: str) -> str:
    """Where processes listen so that other machines reach them at `advertised`: on exactly that address if this machine
    has it, and else (behind NAT, or where the name means this machine's loopback) on every interface. Raises
    CommandError if the name does not resolve."""
    try:
        found = socket.getaddrinfo(advertised, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise CommandError(f"--advertise {advertised}: the host cannot be resolved: {error.strerror}") from error
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    ip = str(address[0])
    every_interface = "0.0.0.0" if family == socket.AF_INET else "[::]"
    if is_loopback(ip) and ip != advertised.strip("[]"):
        return every_interface
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((ip, 0))
    except OSError:
        return every_interface
    return f"[{ip}]" if family == socket.AF_INET6 else ip


def prefix_of(host: str) -> str:
    """Returns the beginning of names on the machine that is reached by `host`: the first part of a name, or a whole
    address."""
    label = host if re.fullmatch(r"[\d.]+|.*:.*", host) else host.partition(".")[0]
    return f"{re.sub(r'[^a-z0-9]+', '-', label.lower()).strip('-')[: _MAX_PREFIX_CHARS - 1].rstrip('-')}-"


def redis_host(url: str) -> str:
    parts = urlsplit(url)
    return "localhost" if parts.scheme == "unix" else parts.hostname or "localhost"


def check_secret(config: KvloomConfig, own_secret: Path) -> None:
    """A machine of a fleet must not make a secret of its own. Raises CommandError."""
    if config.fabric.secret_file or os.environ.get(ENVIRONMENT_VARIABLE) or own_secret.exists():
        return
    if is_loopback(redis_host(config.redis.url)) and not config.fabric.advertised_host:
        return
    raise CommandError(
        "the machines of a fleet need one secret, and this one has none. Make one, once: `kvloom secret new > "
        "fabric.secret && chmod 600 fabric.secret`. Copy it to every machine, and give it with --secret-file "
        f"fabric.secret (or in {ENVIRONMENT_VARIABLE})"
    )


def check_one_database(config: KvloomConfig, records: FleetRecords) -> None:
    """Two control services with a SQLite database each would know different tenants, and two orchestrators different
    objects. Raises CommandError."""
    owner = name_owner(config.data_dir)
    for role, what, url, found in (
        ("control", "a control service", config.control.database_url, records.control),
        ("orchestrator", "an orchestrator", config.orchestrator.database_url, records.orchestrators),
    ):
        if role not in started_roles(config) or url.startswith("postgresql"):
            continue
        for name, record in found.items():
            if record.owner != owner:
                raise CommandError(
                    f"the fleet has {what}, {name} at {record.address}. Start this machine without one (--role edge "
                    f"--role router ...), or give both one PostgreSQL database ({role}.database_url)"
                )


async def check_fleet(config: KvloomConfig, trust: FabricTrust, reporter: Reporter) -> None:
    """Ask the registry who else is there. Raises CommandError if they have another secret, or if another machine, which
    is alive, has this one's names."""
    registry = FleetRegistry(config.redis, trust.sealer)
    try:
        records = await registry.read()
        if records.num_ignored and not records.num_usable:
            raise CommandError(
                f"the processes that are registered at {redis_host(config.redis.url)} have another secret: give this "
                "machine the same one with --secret-file (or, for another fleet on the same Redis, another "
                "redis.key_prefix)"
            )
        check_one_database(config, records)
        name = supervisor_name(config.fabric.name_prefix)
        holder = records.supervisors.get(name)
        if holder is None or holder.owner == name_owner(config.data_dir):
            return
        try:
            async with remote_supervisor(holder.address, name, trust) as other:
                state = await other.state()
        except UnreachableError:
            reporter.step(f"{name} at {holder.address} does not answer: this machine takes over its name")
            await registry.supervisors.withdraw(name, holder.incarnation_id)
        else:
            raise CommandError(
                f"{name} is the name of another machine of this fleet, at {holder.address} ({state.phase}): names must "
                "be unique, so give this one another --name-prefix"
            )
    except (redis.exceptions.RedisError, OSError) as error:
        raise CommandError(f"the registry cannot be read: {error}") from error
    finally:
        await registry.close()
