"""The processes of a fabric: their arguments, and the order in which they start, stop and restart."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvloom_common.config import KvloomConfig, ShardConfig
from kvloom_common.models.configured import configured_models, model_label, shard_config
from shard_server.engines.engine_kinds import shards_per_process
from tools.failures import CommandError
from tools.supervisor.child import ChildSpec, launched_command
from tools.supervisor.shared_port import SharedPort
from tools.supervisor.supervised_process import ProcessStatus

STOP_ORDER: Final = ("edge", "orchestrator", "router", "shard", "safety", "control", "redis")
"""From the edges inwards, so that running requests are completed before the processes that serve them stop."""

ROLES: Final = ("edge", "router", "shard", "safety", "control", "orchestrator")
"""The roles that a machine of a fleet can have."""

_DATABASE_DRAIN_SECONDS: Final = 2.0
"""How long the services with a database take to stop."""
_STOP_MARGIN_SECONDS: Final = 5.0
"""The time after its own drain timeout before a process is killed."""


def plan_stages(
    config: KvloomConfig,
    config_path: Path,
    *,
    embed_redis: bool,
    start_timeout_seconds: float,
    http_port: SharedPort | None = None,
) -> list[list[ChildSpec]]:
    """Returns the stages of processes that start together. `config` must have all addresses and be stored at
    `config_path`. Redis starts first, because shards register there, and then control, without which edges and routers
    know no tenants. The rest starts together, and is the last stage. With `http_port` the
    edges get a socket for that port; otherwise they open the configured port themselves."""
    colocate = config.edge.colocate
    roles = started_roles(config)
    seconds = config.fabric.drain_timeout_seconds
    drain: dict[str, float] = dict.fromkeys(("edge", "router", "shard", "safety"), seconds)
    drain |= dict.fromkeys(("control", "orchestrator"), _DATABASE_DRAIN_SECONDS)
    if colocate:
        drain["edge"] += seconds  # its router's requests end after its own

    def service(
        role: str,
        module: str,
        name: str,
        args: Sequence[str] = (),
        *,
        starts_first: bool = False,
        listens_on: SharedPort | None = None,
        model: str = "",
        launcher: tuple[str, ...] = (),
    ) -> ChildSpec:
        # -P: a folder called "router" in the working directory must not be imported instead of ours.
        base = (sys.executable, "-P", "-m", module, "--config", str(config_path), "--name", name)
        return ChildSpec(
            role=role,
            name=name,
            argv=launched_command(launcher, (*base, *args)),
            has_launcher=bool(launcher),
            start_timeout_seconds=start_timeout_seconds,
            stop_timeout_seconds=drain[role] + _STOP_MARGIN_SECONDS,
            listens_on=listens_on,
            starts_first=starts_first,
            model=model,
        )

    prefix = config.fabric.name_prefix
    ports = metrics_ports(config)

    def metrics(role: str, name: str, flag: str = "metrics-port") -> tuple[str, ...]:
        port = ports.get((role, name), 0)
        return (f"--{flag}", str(port), *([f"--share-{flag}"] if port else []))

    def router(name: str) -> tuple[str, ...]:
        return "--share-port", "--own-port", "0", *metrics("router", name)

    stages: list[list[ChildSpec]] = []
    if embed_redis:
        # Imported here, because commands that only want the roles need no server.
        from tools.supervisor.embedded_redis import embedded_redis

        stages.append([embedded_redis(config.redis.url, config_path.parent)])
    if "control" in roles:
        control = f"{prefix}control"
        # Not before its predecessor has stopped: a SQLite database has one owner.
        stages.append([service("control", "control", control, ("--share-port", *metrics("control", control)))])
    services: list[ChildSpec] = []
    if "safety" in roles:
        safety = f"{prefix}safety"
        args = ("--share-port", *metrics("safety", safety))
        services.append(service("safety", "safety_svc", safety, args, starts_first=True))
    if "router" in roles and not colocate:
        names = numbered(f"{prefix}router", config.router.num_routers)
        services += [service("router", "router", name, router(name), starts_first=True) for name in names]
    if "shard" in roles:
        for module, name, args, model, launcher in _shards(config, lambda name: metrics("shard", name)):
            services.append(service("shard", module, name, args, model=model, launcher=launcher))
    if "orchestrator" in roles:
        name = f"{prefix}orchestrator"
        # As with control, its successor waits for it.
        args = ("--share-port", *metrics("orchestrator", name))
        services.append(service("orchestrator", "orchestrator", name, args))
    if "edge" in roles:
        module = "tools.colocated" if colocate else "edge_http"
        for name in numbered(f"{prefix}edge", config.edge.num_edges):
            args = (*metrics("edge", name, "peer-port"), *(router(name) if colocate else ()))
            services.append(service("edge", module, name, args, starts_first=True, listens_on=http_port))
    return [*stages, services]


def started_roles(config: KvloomConfig) -> tuple[str, ...]:
    """The roles of which `kvloom up` starts processes, in the order of ROLES."""
    return tuple(role for role in possible_roles(config) if not config.fabric.roles or role in config.fabric.roles)


def possible_roles(config: KvloomConfig) -> tuple[str, ...]:
    """The roles that a fabric of this configuration has."""
    optional = {"control": config.control.enabled, "orchestrator": config.orchestrator.enabled}
    return tuple(role for role in ROLES if optional.get(role, True))


def supervisor_name(prefix: str) -> str:
    """The name of a machine's supervisor in the registry. `prefix`: fabric.name_prefix."""
    return f"{prefix}kvloom"


def shard_name(number: int, prefix: str, model: str = "") -> str:
    """The id of a shard in the registry. `prefix`: fabric.name_prefix; `model`: that of [[models]] which it serves."""
    return f"{prefix}shard-{f'{model_label(model)}-' if model else ''}{number}"


def metrics_ports(config: KvloomConfig) -> dict[tuple[str, str], int]:
    """Where each process serves /metrics, by role and name: `metrics.port` and the ports after it. Empty without that
    port. Shards come last, because their number changes most often."""
    if not config.metrics.port:
        return {}
    prefix = config.fabric.name_prefix
    edges = numbered(f"{prefix}edge", config.edge.num_edges)
    routers = edges if config.edge.colocate else numbered(f"{prefix}router", config.router.num_routers)
    order = [
        ("safety", f"{prefix}safety"),
        *(("router", name) for name in routers),
        *(("edge", name) for name in edges),
        *((role, f"{prefix}{role}") for role in possible_roles(config) if role in ("control", "orchestrator")),
    ]
    order += [("shard", name) for module, name, *_ in _shards(config, lambda _: ()) if module == "shard_server"]
    roles = started_roles(config)
    started = [(role, name) for role, name in order if ("edge" if name in edges else role) in roles]
    return {process: config.metrics.port + number for number, process in enumerate(started)}


def models_of_shards(config: KvloomConfig) -> dict[str, str]:
    """The model of each shard that has a process of its own, by its name."""
    return {name: model for module, name, _, model, _ in _shards(config, lambda _: ()) if module == "shard_server"}


class _Shard(NamedTuple):
    """A process with one shard or several."""

    module: str
    name: str
    args: Sequence[str]
    model: str
    launcher: tuple[str, ...] = ()


def _role(settings: ShardConfig, number: int) -> tuple[str, ...]:
    if not settings.num_prefill_shards:
        return ()
    return "--role", "prefill" if number < settings.num_prefill_shards else "decode"


def _shards(config: KvloomConfig, metrics: Callable[[str], Sequence[str]]) -> list[_Shard]:
    prefix = config.fabric.name_prefix
    shards: list[_Shard] = []
    port = config.shard.port
    for model in configured_models(config):
        settings = shard_config(config, model)
        # The shards of [model] have its name neither in theirs nor among their arguments.
        label = "" if model is config.model else model.name
        chosen = ("--model", label) if label else ()
        num_shards, per_process = settings.num_started, shards_per_process(settings)
        if per_process == 1:
            for number in range(num_shards):
                name = shard_name(number, prefix, label)
                own_port = ("--port", str(port + len(shards))) if port else ()
                args = (*chosen, *_role(settings, number), *own_port, *metrics(name))
                shards.append(_Shard("shard_server", name, args, model.name, tuple(settings.launcher)))
            continue
        for first in range(0, num_shards, per_process):
            name = shard_name(first, prefix, label).replace("shard-", "shards-", 1)
            count = ("--first", str(first), "--count", str(min(per_process, num_shards - first)))
            shards.append(_Shard("tools.many_shards", name, (*chosen, *count), model.name))
    return shards


def numbered(name: str, count: int) -> list[str]:
    """The names of so many processes. A single one has no number."""
    return [name] if count == 1 else [f"{name}-{i}" for i in range(count)]


RESTART_ORDER: Final = ("control", "safety", "shard", "router", "orchestrator", "edge", "redis")
"""From the inside to the edges, so that each process starts with the new versions of those that it depends on. Redis,
which holds the registry of all processes, is last and only restarted if it is named."""


def plan_restart(processes: Sequence[ProcessStatus], wanted: Sequence[str]) -> list[str]:
    """Returns the names of the processes to restart, in order. `wanted` has names and roles; if it is empty, all but
    Redis are restarted. Raises CommandError for unknown names."""
    known = {word for process in processes for word in (process.name, process.role)}
    unknown = [word for word in wanted if word not in known]
    if unknown:
        there_are = ", ".join(dict.fromkeys(process.name for process in processes))
        raise CommandError(f"there is no process called {', '.join(unknown)}; there are {there_are}")
    chosen = [
        process
        for process in processes
        if (process.name in wanted or process.role in wanted if wanted else process.role != "redis")
    ]
    chosen.sort(key=lambda process: RESTART_ORDER.index(process.role))  # a stable sort keeps the numbers in order
    return list(dict.fromkeys(process.name for process in chosen))
