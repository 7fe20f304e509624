"""One run: the fabric, its users, the faults and the report."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from kvloom.client.client import Client
from kvloom.errors import KvloomError
from kvloom_common.config import KvloomConfig, ModelConfig
from kvloom_common.text.tokenizer import ModelTokenizer
from lab.chaos.attackers.targets import attackers_tenants
from lab.chaos.checking.absences import absence_figures, absence_problems
from lab.chaos.checking.attack_report import attack_figures
from lab.chaos.checking.explanations import FleetSize
from lab.chaos.checking.memory import SAMPLE_SECONDS, MemorySamples, soak_problems
from lab.chaos.checking.record import Record
from lab.chaos.checking.report import make_report
from lab.chaos.checking.stored import check_stored
from lab.chaos.checking.usage_log import UsageLog
from lab.chaos.checking.verdicts import NEVER_ALLOWED
from lab.chaos.clients.http_client import HttpClient
from lab.chaos.clients.oracle import Oracle, RecordedOracle, SimOracle
from lab.chaos.clients.questions import RESPONSE_SEED, draw_question
from lab.chaos.clients.sdk_client import SdkClient
from lab.chaos.fabric.clocks import with_own_clock
from lab.chaos.fabric.cluster import Cluster
from lab.chaos.fabric.faults import LONG_HANG_SHARE, Fault, FaultKind, plan_faults
from lab.chaos.fabric.injector import Injector
from lab.chaos.fabric.quiescence import wait_for_quiescence
from lab.chaos.tenants.hostile import greedy_tenant, hostile_tenant
from lab.chaos.tenants.tenancy import Tenancy
from lab.chaos.users import PATIENCE_SECONDS, QuestionSource, UserContext, run_user
from tools.failures import CommandError
from tools.supervisor.child import ChildSpec
from tools.supervisor.process_specs import models_of_shards

_NUM_RECORDED: Final = 40
_NUM_SOAK_QUESTIONS: Final = 500
"""Some state grows with every new prompt, up to 65,536 of them (router/core/placement/reuse_curve.py). With so few
prompts it reaches its size within minutes, and growth with every request still shows."""
_RECORDED_MAX_TOKENS: Final = (8, 40)
_COMMON_WORDS: Final = (".", ",", " the", " and", " of", " a")
_MAX_STOP_WORDS: Final = 256
_USAGE_LOG_SECONDS: Final = 1.0
_MIN_QUIET_SECONDS: Final = 4.0
_MAX_QUIET_SECONDS: Final = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class ChaosPlan:
    """The settings of one run."""

    model: ModelConfig
    minutes: float
    seed: int
    kinds: Sequence[FaultKind]
    """Empty for a soak."""
    engine: str = "sim"
    num_models: int = 1
    """More only with simulated shards: all have the files of `model`, and each has answers of its own."""
    num_shards: int = 3
    """The number of shards of each model."""
    num_tenants: int = 0
    """0: users are callers without keys."""
    stored: bool = False
    """True: there is an orchestrator, and some users ask for stored responses."""
    num_edges: int = 2
    num_routers: int = 2
    num_users: int = 12
    long_hang_share: float = LONG_HANG_SHARE
    attack_seconds: float = 0.0
    """A single fault: a hostile neighbour for so long, with quiet before and after it. 0: as `kinds` and `minutes`
    say."""
    attacks: Sequence[str] = ()
    """The attacks of hostile neighbours; all of them if it is empty."""

    @property
    def seconds(self) -> float:
        return self.attack_seconds + 2 * self.quiet_seconds if self.attack_seconds else 60.0 * self.minutes

    @property
    def quiet_seconds(self) -> float:
        """Before and after an attack."""
        return min(_MAX_QUIET_SECONDS, max(_MIN_QUIET_SECONDS, self.attack_seconds / 4))

    @property
    def faults(self) -> list[Fault]:
        if self.attack_seconds:
            return [Fault(self.quiet_seconds, FaultKind.HOSTILE_NEIGHBOUR, 0.0, self.attack_seconds)]
        return plan_faults(self.seed, self.seconds, self.kinds, self.long_hang_share)

    @property
    def fleet(self) -> FleetSize:
        config = self.config()
        models = models_of_shards(config)
        return FleetSize(self.num_edges, self.num_routers, self.num_shards, config.router.max_attempts, models)

    @property
    def models(self) -> list[ModelConfig]:
        name, path = self.model.name, self.model.path
        others = range(1, self.num_models)
        return [
            self.model,
            *(ModelConfig(name=f"{name}-{i + 1}", path=path, shard={"sim": {"answer_seed": i}}) for i in others),
        ]

    def config(self) -> KvloomConfig:
        config = KvloomConfig(models=self.models) if self.num_models > 1 else KvloomConfig(model=self.model)
        config.shard.engine = self.engine
        config.shard.num_shards = self.num_shards
        config.edge.num_edges = self.num_edges
        config.router.num_routers = self.num_routers
        config.router.decision_log.max_remembered = 256
        config.shard.num_blocks = 1024  # soon full, like the cache of a shard that has been up for long
        config.control.enabled = config.control.witness = self.num_tenants > 0
        config.orchestrator.enabled = self.stored
        config.model.defaults.seed = RESPONSE_SEED if self.stored else None
        config.log.format = "json"  # usage records are read from it
        config.fabric.drain_timeout_seconds = 15.0
        return config


@dataclasses.dataclass(slots=True)
class Progress:
    """The figures of a run's progress line."""

    seconds: float = 0.0
    num_requests: int = 0
    num_faults: int = 0
    num_bad: int = 0
    """The number of answers with a verdict that is never allowed."""
    last_fault: str = ""


async def run_chaos(plan: ChaosPlan, on_progress: Callable[[Progress], None]) -> dict[str, Any]:
    """Returns the report, whose `problems` are empty if the run passed. Raises CommandError if the fabric does not
    start. The logs are kept in that case, and if there are problems."""
    data_dir = Path(tempfile.mkdtemp(prefix="kvloom-chaos-"))
    keeps_logs = True
    task = asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    tokenizer = ModelTokenizer.load(Path(plan.model.path))
    try:
        report = await _Run(plan, data_dir, tokenizer, on_progress).run()
        keeps_logs = bool(report["problems"])
    except asyncio.CancelledError:
        keeps_logs = False
        raise
    else:
        if keeps_logs:
            report["logs"] = str(data_dir / "logs")
        return report
    finally:
        tokenizer.close()
        if not keeps_logs:
            shutil.rmtree(data_dir, ignore_errors=True)


class _Run:
    def __init__(
        self, plan: ChaosPlan, data_dir: Path, tokenizer: ModelTokenizer, on_progress: Callable[[Progress], None]
    ) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._on_progress = on_progress
        self._progress = Progress()
        self._events: list[str] = []
        self._cluster = Cluster(plan.config(), data_dir, self._events.append, self._change_spec)
        self._cluster.user_seed, self._cluster.attacks = plan.seed, plan.attacks
        self._records: list[Record] = []
        self._memory = MemorySamples()
        self._tenancy: Tenancy | None = None
        if plan.num_tenants:
            self._tenancy = Tenancy(self._cluster, plan.num_tenants, plan.seed, self._may_attack)

    async def run(self) -> dict[str, Any]:
        try:
            await self._cluster.start()
            if self._tenancy is not None:
                await self._set_up_tenants(self._tenancy)
            self._injector = Injector(self._cluster, self._plan.seed, self._note_fault)
            log_dir = self._cluster.folder.log_dir
            attackers = attackers_tenants(self._cluster.trust.caller_key) | {hostile_tenant().id, greedy_tenant().id}
            self._usage_log = UsageLog([log_dir / f"{name}.log" for name in self._cluster.names("router")], attackers)
            async with self._context() as context:
                await self._run_users_and_faults(context)
                problems = await wait_for_quiescence(self._cluster)
                self._stored, not_kept = await check_stored(context.http, context.stored)
                problems += not_kept
            if self._tenancy is not None:
                await self._tenancy.close()
            await asyncio.sleep(_USAGE_LOG_SECONDS)  # the supervisor may not have written the last lines yet
            self._usage_log.read()
        finally:
            await self._cluster.stop()
        return self._report(problems)

    def _may_attack(self) -> bool:
        """True when the hostile tenant attacks now: all the time, or only when all attackers do."""
        if not self._plan.attack_seconds:
            return True
        return any(one.ended_at is None for one in self._injector.disturbances)

    async def _set_up_tenants(self, tenancy: Tenancy) -> None:
        try:
            await tenancy.set_up()
        except KvloomError as error:
            raise CommandError(f"the tenants could not be set up: {error.message}") from error

    def _change_spec(self, spec: ChildSpec) -> ChildSpec:
        if FaultKind.CLOCK_JUMP in self._plan.kinds:
            return with_own_clock(spec, self._cluster.folder.run_dir)
        return spec

    @contextlib.asynccontextmanager
    async def _context(self) -> AsyncIterator[UserContext]:
        cluster, plan = self._cluster, self._plan
        oracle, questions = await self._oracle()
        tenants = [] if self._tenancy is None else self._tenancy.tenants
        open_answers = {} if self._tenancy is None else self._tenancy.open_answers
        keys = [tenant.lasting_key.secret for tenant in tenants] or [""]
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(HttpClient(cluster.edge_urls))
            sdks = [
                await stack.enter_async_context(SdkClient(cluster.router_address, 2 * plan.num_routers, key))
                for key in keys
            ]
            yield UserContext(http, sdks, oracle, self._tokenizer, questions, self._note_record, tenants, open_answers)

    async def _oracle(self) -> tuple[Oracle, QuestionSource]:
        rng = random.Random(f"questions of {self._plan.seed}")
        names = [model.name for model in self._plan.models]
        if self._plan.engine == "sim":
            oracle = SimOracle(self._tokenizer, {name: number for number, name in enumerate(names)})
            questions = QuestionSource(
                stop_words=oracle.words[:_MAX_STOP_WORDS], models=names, has_stored=self._plan.stored
            )
            return oracle, questions if self._plan.faults else questions.limited_to(_NUM_SOAK_QUESTIONS, rng)
        pool = [draw_question(rng, _COMMON_WORDS, _RECORDED_MAX_TOKENS, names) for _ in range(_NUM_RECORDED)]
        try:
            async with Client(self._cluster.router_address) as client:
                recorded = await RecordedOracle.record(client, pool, self._tokenizer)
        except KvloomError as error:
            raise CommandError(f"the answers could not be recorded before the first fault: {error.message}") from error
        return recorded, QuestionSource(pool=pool)

    async def _run_users_and_faults(self, context: UserContext) -> None:
        plan = self._plan
        self._begin = time.monotonic()
        stop = asyncio.Event()
        users = [
            asyncio.create_task(run_user(context, plan.seed, i, stop), name=f"user {i}") for i in range(plan.num_users)
        ]
        others = [
            asyncio.create_task(self._cluster.watch(), name="supervisor"),
            asyncio.create_task(self._watch(), name="watch"),
        ]
        if self._tenancy is not None:
            users.append(asyncio.create_task(self._tenancy.run(stop), name="tenants"))
        injecting = asyncio.create_task(self._injector.run(plan.faults, self._begin), name="faults")
        timer = asyncio.create_task(self._until_end(injecting), name="end of the run")
        try:
            await _all_unless_failed([timer, injecting], [*users, *others])
            stop.set()
            async with asyncio.timeout(2 * PATIENCE_SECONDS):
                await _all_unless_failed(users, others)
        finally:
            for task in (*users, *others, injecting, timer):
                task.cancel()
            await asyncio.gather(*users, *others, injecting, timer, return_exceptions=True)

    async def _until_end(self, injecting: asyncio.Task[None]) -> None:
        if self._plan.attack_seconds:
            await asyncio.shield(injecting)  # attackers that get little of the CPU begin and end late
            await asyncio.sleep(self._plan.quiet_seconds)
        else:
            await asyncio.sleep(self._plan.seconds)

    async def _watch(self) -> None:
        """Sample memory, read usage records and show progress, once a second. Never returns."""
        next_sample = 0.0
        while True:
            seconds = time.monotonic() - self._begin
            if seconds >= next_sample:
                next_sample += min(SAMPLE_SECONDS, self._plan.quiet_seconds / 4)
                self._memory.sample(self._cluster.statuses, seconds)
                await asyncio.to_thread(self._usage_log.read)
            self._progress.seconds = seconds
            self._on_progress(self._progress)
            await asyncio.sleep(1.0)

    def _note_record(self, record: Record) -> None:
        self._records.append(record)
        self._progress.num_requests += 1
        self._progress.num_bad += record.finding.verdict in NEVER_ALLOWED

    def _note_fault(self, what: str) -> None:
        self._progress.num_faults += 1
        self._progress.last_fault = what

    def _report(self, problems: Sequence[str]) -> dict[str, Any]:
        plan = self._plan
        figures = make_report(
            self._records, self._injector.disturbances, self._usage_log.records, plan.fleet, self._begin
        )
        memory = self._memory.figures()
        disturbances = self._injector.disturbances
        figures["problems"] += [*self._injector.never_restarted, *problems]
        figures["problems"] += absence_problems(self._cluster.probes, disturbances, self._begin)
        figures["absences"] = absence_figures(self._cluster.probes)
        figures["stored"] = dict(self._stored)
        if self._tenancy is not None:
            figures["tenancy"] = self._tenancy.judge(self._records, disturbances)
            figures["problems"] += figures["tenancy"].pop("problems")
        if plan.attack_seconds:
            (attack,) = self._injector.disturbances
            answers = self._cluster.attack_answers
            tenants = [] if self._tenancy is None else self._tenancy.tenants
            calm = {tenant.id for tenant in tenants if not tenant.refusal_codes} or {""}
            figures["attack"] = attack_figures(self._records, attack, answers, self._memory, self._begin, calm)
            if self._tenancy is not None:
                figures["attack"]["over_served"] = figures["tenancy"]["over_served"]
                figures["attack"]["mis_metered"] = figures["tenancy"]["mis_metered"]
        elif not plan.kinds:
            figures["problems"] += soak_problems(memory)
        return {
            "minutes": round(plan.seconds / 60, 2),
            "seed": plan.seed,
            "engine": plan.engine,
            "models": plan.num_models,
            "tenants": plan.num_tenants,
            "shards": plan.num_shards,
            "edges": plan.num_edges,
            "routers": plan.num_routers,
            "users": plan.num_users,
            "num_faults": len(self._injector.disturbances),
            **figures,
            "memory": memory,
        }


async def _all_unless_failed(wanted: Sequence[asyncio.Task[Any]], watched: Sequence[asyncio.Task[Any]]) -> None:
    """Returns when all `wanted` tasks have ended. Raises as soon as a wanted or a watched one fails."""
    open_tasks = set(wanted)
    while open_tasks:
        done, _ = await asyncio.wait(
            (*open_tasks, *(t for t in watched if not t.done())), return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()
        open_tasks -= done
