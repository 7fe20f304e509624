"""Launches a fabric: completes the settings, checks what would keep it from starting, claims the ports, finds the model
and starts the processes."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import errno
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import msgspec
import redis

from kvloom_common.access.exposure import exposure_risk
from kvloom_common.access.listener_tls import listener_tls
from kvloom_common.addresses import bare_host, join_address
from kvloom_common.callers import configured_callers
from kvloom_common.config import ConfigError, KvloomConfig, ModelConfig, dump_config
from kvloom_common.discovery.announcer import fabric_host
from kvloom_common.models.configured import configured_models, shard_config
from kvloom_common.models.model_routes import ModelRoutes
from kvloom_common.private_file import OTHERS
from kvloom_common.trust.fabric_trust import FabricTrust
from shard_server.engines.engine_kinds import ENGINES, engine_kind
from tools.cli.config_flags import apply_config_flags
from tools.fabric_trust import SECRET_FILE, provide_secret, trust_of
from tools.failures import CommandError
from tools.models.registry import ModelRegistry
from tools.models.resolve import find_model, resolve_model
from tools.supervisor.config_reload import ConfigSource
from tools.supervisor.embedded_redis import embedded_redis_url
from tools.supervisor.fabric import Fabric
from tools.supervisor.joining import check_fleet, check_roles, check_secret, complete_addresses
from tools.supervisor.process_specs import metrics_ports, started_roles, supervisor_name
from tools.supervisor.reporters import LogReporter, Reporter, log_to_stderr
from tools.supervisor.shared_port import SharedPort
from tools.supervisor.state import RunFolder

_MAX_PORT: Final = 65_535


def apply_flags(config: KvloomConfig, *, shards: Mapping[str, int], **flags: Any) -> None:
    """Override the settings in the file with the given flags. Raises CommandError."""
    if "" in shards:
        config.shard.num_shards = shards[""]
    apply_config_flags(config, flags)
    if config.shard.engine not in ENGINES.names():
        raise CommandError(f"shard.engine {config.shard.engine!r} is none of {', '.join(ENGINES.names())}")
    roles = started_roles(config)
    for flag, value, needed in (
        ("shards", shards.get(""), "shard"),
        ("edges", flags.get("edges"), "edge"),
        ("routers", flags.get("routers"), "router"),
    ):
        if value is not None and needed not in roles:
            raise CommandError(f"--{flag} {value} needs --role {needed}: this machine has only {', '.join(roles)}")


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """The settings of `kvloom up`."""

    config: KvloomConfig
    folder: RunFolder
    models: Sequence[ModelConfig]
    """Those of the --model flags, see `flag_model`. Empty: those in `config`."""
    num_shards: Mapping[str, int]
    """How many shards models have, by name, where it is not as configured."""
    model_cache_dir: Path
    start_timeout_seconds: float
    config_file: Path | None
    """The file from which `config` was read."""
    read: Callable[[Path], KvloomConfig]
    """Reads such a file, and applies the same flags. Blocks. Raises CommandError."""

    def run(self, reporter: Reporter) -> None:
        """Run the fabric until a signal stops it. Raises CommandError if it cannot start."""
        log_to_stderr()
        source = ConfigSource(copy.deepcopy(self.config), self.config_file, self._read_again, bool(self.models))
        with self.folder.locked(), contextlib.ExitStack() as stack:
            os.umask(OTHERS)  # for the processes that this one starts, too
            reporter = LogReporter(reporter, self.folder.log_dir / "kvloom.log")
            stack.callback(reporter.close)
            try:
                check_access(self.config)
                check_roles(self.config)
                check_database(self.config)
                self.config.data_dir = str(self.folder.data_dir)
                embed_redis = not self.config.redis.url
                if embed_redis:
                    if self.config.fabric.advertised_host:
                        self._prepare_part(reporter)
                    self.config.redis.url = stack.enter_context(embedded_redis_url(self.folder.run_dir))
                else:
                    self._prepare_fleet(reporter)
                provide_secret(self.config, self.folder.data_dir)
                trust = trust_of(self.config, ("supervisor",), supervisor_name(self.config.fabric.name_prefix))
                if not embed_redis:
                    asyncio.run(check_fleet(self.config, trust, reporter))
                http_port = stack.enter_context(self._claimed_ports())
                # What can be refused is refused by now: a model may take a minute to convert.
                self._fill_in_models(reporter)
                self._claim_metrics_ports(stack)
                dump_config(self.config, self.folder.config_path)
                asyncio.run(self._run(reporter, http_port, trust, source, embed_redis=embed_redis))
            except CommandError as error:
                reporter.note(f"error: {error.message}")
                raise

    def _prepare_fleet(self, reporter: Reporter) -> None:
        """Complete the settings of a machine that shares its Redis with others. Raises CommandError."""
        check_redis(self.config.redis.url)
        self._prepare_part(reporter)
        self.config.safety.discover = True

    def _prepare_part(self, reporter: Reporter) -> None:
        """Complete the settings of a machine that others reach. Raises CommandError."""
        check_secret(self.config, self.folder.data_dir / SECRET_FILE)
        complete_addresses(self.config, reporter)

    async def _run(
        self,
        reporter: Reporter,
        http_port: SharedPort | None,
        trust: FabricTrust,
        source: ConfigSource,
        *,
        embed_redis: bool,
    ) -> None:
        fabric = Fabric(
            self.config,
            self.folder,
            reporter,
            http_port=http_port,
            embed_redis=embed_redis,
            start_timeout_seconds=self.start_timeout_seconds,
            trust=trust,
            resolve=self._resolved,
            source=source,
        )
        await fabric.run()

    def _read_again(self, path: Path) -> KvloomConfig:
        """For a reload: what a start with this file would be given. Raises CommandError if that would be refused."""
        config = self.read(path)
        check_access(config)
        check_roles(config)
        try:
            ModelRoutes(config.routes)
            if not self.models:
                configured_models(config)
        except ConfigError as error:
            raise CommandError(f"The configuration file {path} is not valid: {error}") from error
        return config

    @contextlib.contextmanager
    def _claimed_ports(self) -> Iterator[SharedPort | None]:
        """Choose all ports but those of /metrics, because a restarted process must use the same ones. Ports on which
        several processes listen (of one role, or with their successors) are held as long as the fabric runs. Roles of
        other machines get none. Yields the HTTP port, if there is an edge."""
        config = self.config
        roles = started_roles(config)
        has_router = "router" in roles or config.edge.colocate
        if config.edge.colocate and config.router.num_routers > 1:
            raise CommandError("--routers cannot be combined with --colocate: each edge has a router inside")
        if config.edge.port == config.router.port != 0 and "edge" in roles and has_router:
            raise CommandError(f"--http-port and --router-port are both {config.edge.port}")
        with contextlib.ExitStack() as stack:
            http = None
            if "edge" in roles:
                http = stack.enter_context(_claimed(config.edge.host, config.edge.port, "--http-port"))
                config.edge.port = http.port
            # An edge without a router here must not look for one at the configured port: the registry has the others'.
            config.router.port = (
                stack.enter_context(_claimed(config.router.host, config.router.port, "--router-port")).port
                if has_router
                else 0
            )
            if "safety" in roles:
                host = fabric_host(config, config.safety.host)
                config.safety.port = stack.enter_context(_claimed(host, config.safety.port, "safety.port")).port
            for role, section in (("control", config.control), ("orchestrator", config.orchestrator)):
                if role in roles:
                    host = fabric_host(config, section.host)
                    section.port = stack.enter_context(_claimed(host, section.port, f"{role}.port")).port
            yield http

    def _claim_metrics_ports(self, stack: contextlib.ExitStack) -> None:
        config = self.config
        ports = metrics_ports(config)
        if ports and max(ports.values()) > _MAX_PORT:
            raise CommandError(f"--metrics-port {config.metrics.port}: {len(ports)} processes need a port each")
        for (role, name), port in ports.items():
            host = config.edge.host if role == "edge" else config.metrics.host
            stack.enter_context(_claimed(host, port, f"--metrics-port, whose block has it for {role} {name}"))

    def _fill_in_models(self, reporter: Reporter) -> None:
        """Find the files of all models, and convert those that need it once nothing can be refused. A machine without
        shards needs none: cards come from the shards of the others. Raises CommandError."""
        config = self.config
        has_paths = any(model.path for model in (config.model, *config.models))
        if "shard" not in started_roles(config) and not self.models and not has_paths:
            return
        try:
            wanted = self.models or _named(configured_models(config))
        except ConfigError as error:
            raise CommandError(str(error)) from error
        sources = [model.path or model.name for model in wanted]
        found = [self._found(model, source) for model, source in zip(wanted, sources, strict=True)]
        for name, num_shards in self.num_shards.items():
            model = next((model for model in found if model.name == name), None)
            if model is None:
                names = ", ".join(model.name for model in found)
                raise CommandError(f"--shards {name}={num_shards}: there is no such model; there are {names}")
            model.shard = {**model.shard, "num_shards": num_shards}
        if len(found) == 1:
            config.model, config.models = found[0], []
        else:
            config.model, config.models = ModelConfig(), found
        try:
            ModelRoutes(config.routes)
            configured_models(config)
        except ConfigError as error:
            raise CommandError(str(error)) from error
        for model, source in zip(found, sources, strict=True):
            self._convert(model, source, reporter.step)

    @property
    def _registry(self) -> ModelRegistry:
        return ModelRegistry(self.folder.data_dir / "models.json")

    def _resolved(self, wanted: ModelConfig, on_progress: Callable[[str], None]) -> ModelConfig:
        """The model with its files. Blocks. Raises CommandError."""
        source = wanted.path or wanted.name
        model = self._found(wanted, source)
        self._convert(model, source, on_progress)
        return model

    def _found(self, wanted: ModelConfig, source: str) -> ModelConfig:
        """The model with the name and the version of its source, which is a path or a name. Raises CommandError."""
        found = find_model(source, self._registry, wanted.sha256)
        return msgspec.structs.replace(
            wanted,
            name=wanted.name if wanted.name and wanted.path else found.name,
            version=wanted.version or found.version,
        )

    def _convert(self, model: ModelConfig, source: str, on_progress: Callable[[str], None]) -> None:
        """Give it the path of its files. Blocks. Raises CommandError."""
        on_progress(f"model {source}")
        resolved = resolve_model(
            source,
            self.model_cache_dir,
            on_progress,
            self._registry,
            model.sha256,
            with_weights=engine_kind(shard_config(self.config, model).engine).reads_weights,
        )
        model.path, model.sha256 = str(resolved.path), resolved.sha256


def _named(models: Sequence[ModelConfig]) -> list[ModelConfig]:
    """Without the name of a model of which only the path is given: it then has the name of the path."""
    return [
        msgspec.structs.replace(model, name="") if model.path and _has_only_a_path(model) else model for model in models
    ]


def _has_only_a_path(model: ModelConfig) -> bool:
    return model == ModelConfig(path=model.path, sha256=model.sha256)


@contextlib.contextmanager
def _claimed(host: str, port: int, flag: str) -> Iterator[SharedPort]:
    try:
        claimed = SharedPort(bare_host(host), port)
    except OSError as error:
        reason = "another process uses the port" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise CommandError(f"cannot listen on {join_address(host, port)}: {reason} (choose with {flag})") from error
    with contextlib.closing(claimed):
        yield claimed


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
