"""Checks before `kvloom up` starts or converts anything: what is refused should be refused at once."""

from __future__ import annotations

import socket
from typing import Final
from urllib.parse import parse_qs, urlsplit

import redis

from kvloom_common.access.exposure import exposure_risk
from kvloom_common.access.listener_tls import listener_tls
from kvloom_common.addresses import join_address
from kvloom_common.callers import configured_callers
from kvloom_common.config import ConfigError, KvloomConfig
from tools.failures import CommandError
from tools.supervisor.process_specs import started_roles

_CONNECT_SECONDS: Final = 5.0
_POSTGRES_PORT: Final = 5432


def check_access(config: KvloomConfig) -> None:
    """Check what clients need, before any process starts. Raises CommandError."""
    if bool(config.tls.certificate_file) != bool(config.tls.key_file):
        raise CommandError("--tls-certificate and --tls-key are needed together")
    if config.tls.client_ca_file and not config.tls.certificate_file:
        raise CommandError("--tls-client-ca needs --tls-certificate and --tls-key")
    if risk := exposure_risk(config, config.edge.host, config.router.host):
        raise CommandError(risk)
    if risk := exposure_risk(config, config.metrics.host, is_for_scrapers=True):
        raise CommandError(f"metrics.host: {risk}")
    try:
        listener_tls(config.tls)
        keys = configured_callers(config).api_keys
    except ConfigError as error:
        raise CommandError(str(error)) from error
    if keys is not None and not keys.num_keys:
        raise CommandError(f"{config.callers.api_keys_file} has no key: add one with `kvloom keys add NAME`")


def check_database(config: KvloomConfig) -> None:
    """Check that the servers of the services' databases can be reached. Whether they let the service in, the service
    says itself. Raises CommandError."""
    for role, url in (("control", config.control.database_url), ("orchestrator", config.orchestrator.database_url)):
        if role in started_roles(config):
            _check_server(url, f"{role}.database_url")


def _check_server(url: str, key: str) -> None:
    parts = urlsplit(url)
    if parts.scheme.partition("+")[0] != "postgresql" or not parts.hostname or "host" in parse_qs(parts.query):
        return  # a file, or a socket of this machine
    try:
        port = parts.port or _POSTGRES_PORT
    except ValueError as error:
        raise CommandError(f"{key}: {error}") from error
    try:
        socket.create_connection((parts.hostname, port), _CONNECT_SECONDS).close()
    except OSError as error:
        place = join_address(parts.hostname, port)
        reason = error.strerror or str(error) or type(error).__name__
        raise CommandError(f"the database of {key} cannot be reached at {place}: {reason}") from error


def check_redis(url: str) -> None:
    """Check the URL. A wrong one would otherwise show up as shards that no router finds."""
    try:
        with redis.Redis.from_url(url, socket_timeout=5.0, socket_connect_timeout=5.0) as client:
            client.ping()
    except (redis.RedisError, ValueError) as error:
        raise CommandError(f"cannot use the Redis server at {_without_password(url)}: {error}") from error


def _without_password(url: str) -> str:
    scheme, _, rest = url.rpartition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if scheme else rest
