"""The fabric under test: the processes and the supervisor of `kvloom up`, in a data directory of their own. There are
proxies between the routers and each shard, and between the clients and the edges."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import Signals
from typing import Final

from kvloom.backoff import Backoff
from kvloom_common.addresses import join_address
from kvloom_common.config import KvloomConfig, ModelConfig, dump_config
from kvloom_common.models.configured import configured_models, find_configured, num_configured_shards
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from lab.chaos.fabric.faults import Probe
from lab.chaos.fabric.proxy import FaultProxy
from lab.free_ports import pick_free_ports
from tools.fabric_trust import provide_secret, trust_of
from tools.failures import CommandError
from tools.supervisor.child import ChildFailedError, ChildSpec
from tools.supervisor.embedded_redis import embedded_redis_url
from tools.supervisor.models.changes import ModelChanges
from tools.supervisor.process_specs import STOP_ORDER, models_of_shards, plan_stages
from tools.supervisor.readiness import edges_without, is_complete, router_address
from tools.supervisor.shared_port import SharedPort
from tools.supervisor.state import RunFolder
from tools.supervisor.supervised_process import ProcessState, ProcessStatus
from tools.supervisor.supervisor import Supervisor

_START_TIMEOUT_SECONDS: Final = 180.0
_READY_TIMEOUT_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.02
_LET_END_SECONDS: Final = 60.0
"""Answers may run for so long, as users are patient: none may be broken off."""


class Cluster:
    """`config` must name the model; the ports are chosen here. `on_event` is called with a line whenever a process dies
    or restarts."""

    def __init__(
        self,
        config: KvloomConfig,
        data_dir: Path,
        on_event: Callable[[str], None],
        change_spec: Callable[[ChildSpec], ChildSpec] = lambda spec: spec,
    ) -> None:
        """`change_spec` may change how each process is started."""
        self.config = config
        self._change_spec = change_spec
        self.folder = RunFolder(data_dir)
        self._on_event = on_event
        self._stopped: set[int] = set()
        self._shard_ports: dict[str, int] = {}
        self.link_proxies: dict[str, FaultProxy] = {}
        """The proxies between the routers and each shard, by the name of the shard."""
        self.edge_proxies: dict[str, FaultProxy] = {}
        """The proxies between the clients and the edges. There are as many as edges, which share a port."""
        self._ports: list[SharedPort] = []
        self._changing = asyncio.Lock()
        self.probes: list[Probe] = []
        """Requests for models that were away."""
        self._stack = contextlib.ExitStack()
        self.trust: FabricTrust = NO_SECRET
        self.user_seed = 0
        """The seed in the names of the users' requests, which a hostile neighbour guesses."""
        self.probe_key = "probe"
        """The key of the run's own requests. Without tenants any name will do."""
        self.attacks: Sequence[str] = ()
        """The attacks of hostile neighbours; all of them if it is empty."""
        self.attackers_key = ""
        """That of a tenant which is hostile neighbours'; "": there are no tenants."""
        self.attack_answers: Counter[str] = Counter()
        """How hostile neighbours were answered."""

    async def start(self) -> None:
        """Returns when the fabric is ready. Raises CommandError. `stop` must be called in any case."""
        config = self.config
        self._ports = [SharedPort(section.host, 0) for section in (config.edge, config.router)]
        config.edge.port, config.router.port = (port.port for port in self._ports)
        shards = list(models_of_shards(config))
        for name in shards:
            await self._start_link_proxy(name)
        # After everything that picks a port for itself, which could pick one of these before anything listens on them.
        config.safety.port, *shard_ports = pick_free_ports(1 + len(shards))
        self._shard_ports.update(zip(shards, shard_ports, strict=True))
        config.data_dir = str(self.folder.data_dir)
        for directory in (self.folder.run_dir, self.folder.log_dir):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        config.redis.url = self._stack.enter_context(embedded_redis_url(self.folder.run_dir))
        provide_secret(config, self.folder.data_dir)
        self.trust = trust_of(config)
        dump_config(config, self.folder.config_path)
        self._supervisor = Supervisor(
            self._plan_stages(config),
            stop_order=STOP_ORDER,
            log_dir=self.folder.log_dir,
            on_change=lambda: None,
            on_event=self._on_event,
            make_backoff=lambda: Backoff(0.2, max_seconds=1.0, stable_seconds=3.0),
        )
        self._changes = ModelChanges(
            config,
            self.folder.config_path,
            self._supervisor,
            self.trust,
            plan=lambda changed: [spec for stage in self._plan_stages(changed) for spec in stage],
            resolve=lambda model, _: model,
        )
        try:
            await self._supervisor.start()
        except ChildFailedError as error:
            raise CommandError(f"{error}\n  (logs: {self.folder.log_dir})") from error
        for number in range(config.edge.num_edges):
            await self._start_edge_proxy(f"edge-proxy-{number}")
        await self._wait_ready()

    async def watch(self) -> None:
        """Never returns. Raises only if the supervisor itself fails."""
        await self._supervisor.watch()

    async def stop(self) -> None:
        """Stop all processes and proxies. May be called repeatedly."""
        for pid in list(self._stopped):
            self.wake(pid)
        supervisor = getattr(self, "_supervisor", None)
        if supervisor is not None:
            await supervisor.stop()
        for proxy in (*self.link_proxies.values(), *self.edge_proxies.values()):
            await proxy.close()
        for port in self._ports:
            port.close()
        self._stack.close()

    # --- processes

    @property
    def statuses(self) -> list[ProcessStatus]:
        return self._supervisor.statuses

    def names(self, role: str) -> list[str]:
        return list(dict.fromkeys(status.name for status in self.statuses if status.role == role))

    def status(self, name: str) -> ProcessStatus:
        return next(status for status in self.statuses if status.name == name)

    @property
    def edge_urls(self) -> dict[str, str]:
        """The URL of each edge proxy, by its name."""
        return {name: f"http://127.0.0.1:{proxy.port}" for name, proxy in self.edge_proxies.items()}

    @property
    def http_address(self) -> str:
        """Where the edges listen themselves, behind the proxies."""
        return join_address(self.config.edge.host, self.config.edge.port)

    @property
    def router_address(self) -> str:
        """The address that the routers share."""
        return router_address(self.config)

    # --- faults

    def signal(self, name: str, signum: Signals) -> int | None:
        """Send a signal. Returns the pid, or None if the process is not ready and nothing was sent."""
        status = self.status(name)
        if status.pid is None or status.state != ProcessState.READY:
            return None
        os.kill(status.pid, signum)
        if signum is signal.SIGSTOP:
            self._stopped.add(status.pid)
        return status.pid

    async def restart(self, name: str) -> bool:
        """Do a planned restart. Returns when the old process has exited, or False if it was not running steadily."""
        async with self._changing:
            if name not in [status.name for status in self.statuses]:
                return False
            try:
                await self._supervisor.replace(name)
            except ChildFailedError:
                return False
        return True

    # --- models, which come and go one at a time

    async def unload_model(self, model: str) -> None:
        """Returns once its answers have ended and its shards have stopped. Raises CommandError."""
        async with self._changing:
            await self._changes.unload(model, _LET_END_SECONDS, _ignore)

    async def load_model(self, model: ModelConfig) -> None:
        """Returns when all edges serve the model. Raises CommandError."""
        async with self._changing:
            if model.name not in self.model_names:
                await self._changes.load(model, None, _ignore)
        await self._wait_served(model.name)

    async def sleep_model(self, model: str) -> None:
        """Returns once its answers have ended and its shards sleep. Raises CommandError."""
        async with self._changing:
            await self._changes.sleep(model, _LET_END_SECONDS, _ignore)

    async def keep_asleep(self) -> None:
        """Put shards of sleeping models to sleep that have been restarted. Raises CommandError."""
        async with self._changing:
            await self._changes.keep_asleep()

    async def wake_model(self, model: str) -> None:
        """Returns when all edges serve the model. Raises CommandError."""
        async with self._changing:
            if model in self._changes.asleep:
                await self._changes.wake(model, _ignore)
        await self._wait_served(model)

    @property
    def model_names(self) -> list[str]:
        return [model.name for model in configured_models(self.config)]

    def configured(self, model: str) -> ModelConfig:
        return find_configured(self.config, model)

    def wake(self, pid: int) -> None:
        """End a SIGSTOP. The process may have died."""
        self._stopped.discard(pid)
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return

    async def wait_replaced(self, name: str, pid: int, timeout_seconds: float) -> bool:
        """Returns when another process of that name is ready or none is wanted any more, or False if that takes too
        long."""
        deadline = time.monotonic() + timeout_seconds
        while status := next((status for status in self.statuses if status.name == name), None):
            if status.pid not in (pid, None) and status.state == ProcessState.READY:
                return True
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True  # its model has been unloaded

    # --- setting up

    async def _start_link_proxy(self, shard: str) -> None:
        proxy = FaultProxy(lambda: ("127.0.0.1", self._shard_ports[shard]))
        await proxy.start()
        self.link_proxies[shard] = proxy

    def _plan_stages(self, config: KvloomConfig) -> list[list[ChildSpec]]:
        stages = plan_stages(
            config,
            self.folder.config_path,
            embed_redis=True,
            start_timeout_seconds=_START_TIMEOUT_SECONDS,
            http_port=self._ports[0],
        )
        return [[self._change_spec(self._behind_proxy(spec)) for spec in stage] for stage in stages]

    def _behind_proxy(self, spec: ChildSpec) -> ChildSpec:
        """Have a shard listen on the port behind its proxy and announce the proxy."""
        if spec.role != "shard":
            return spec
        announced = f"127.0.0.1:{self.link_proxies[spec.name].port}"
        more = ("--port", str(self._shard_ports[spec.name]), "--advertised-address", announced)
        return dataclasses.replace(spec, argv=(*spec.argv, *more))

    async def _start_edge_proxy(self, name: str) -> None:
        proxy = FaultProxy(lambda: (self.config.edge.host, self.config.edge.port))
        await proxy.start()
        self.edge_proxies[name] = proxy

    async def _wait_ready(self) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_SECONDS
        while not await is_complete(self._supervisor.statuses, num_configured_shards(self.config), self.trust):
            if time.monotonic() > deadline:
                raise CommandError(f"the fabric did not become ready within {_READY_TIMEOUT_SECONDS:g} s")
            await asyncio.sleep(0.05)

    async def _wait_served(self, model: str) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_SECONDS
        while missing := await edges_without(self.statuses, model, self.trust):
            if time.monotonic() > deadline:
                raise CommandError(f"{model} was not served within {_READY_TIMEOUT_SECONDS:g} s: {missing[0]}")
            await asyncio.sleep(0.05)


def _ignore(_step: str) -> None:
    """Nobody reads what a change of models reports."""
