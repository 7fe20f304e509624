"""`kvloom-lab chaos --region-loss`: two cells on this machine, one of which is lost twice while users check every word.

The edge is west's. It reaches both routers through proxies, that of east with a delay. West is lost first by its
network alone, so that its router has to take back what it metered, and then with all of its processes. One of two
tenants is resident in west. Half of the users have no edge: they use the SDK with the routers of both cells.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp

from kvloom_common.addresses import split_address
from kvloom_common.config import CellConfig, KvloomConfig, ModelConfig
from kvloom_common.metrics.exposition import samples_in
from kvloom_common.text.tokenizer import ModelTokenizer
from lab.chaos.checking.metering import compare_metering
from lab.chaos.checking.record import Record
from lab.chaos.checking.usage_log import UsageLog
from lab.chaos.checking.verdicts import NEVER_ALLOWED, AnswerVerdict
from lab.chaos.clients.http_client import HttpClient
from lab.chaos.clients.oracle import SimOracle
from lab.chaos.clients.questions import Behaviour, Endpoint, UserCall, draw_question
from lab.chaos.clients.sdk_client import SdkClient
from lab.chaos.fabric.cluster import Cluster
from lab.chaos.fabric.proxy import FaultProxy
from lab.chaos.fabric.quiescence import wait_for_quiescence
from lab.chaos.tenants.control import ControlDesk
from lab.chaos.tenants.population import AMPLE_NANOS, ChaosTenant, IssuedKey
from lab.chaos.users import PATIENCE_SECONDS, QuestionSource, UserContext, ask
from lab.free_ports import pick_free_ports
from tools.fabric_trust import provide_secret

DELAY_SECONDS: Final = 0.01
"""The way to the other cell, in one direction."""
STEP_MS: Final = 20.0
"""Answers of some seconds, so that many run when the cell is lost."""
MAX_TOKENS: Final = (40, 160)
REATTACH_SECONDS: Final = 2.0
LOST_SECONDS: Final = 5.0
"""How long the cell is lost each time: longer than answers of a resident tenant look for a router."""
CALM_SECONDS: Final = 6.0
"""Before, between and after the losses."""
_SETTLE_SECONDS: Final = 3.0
"""Within which the router of a cell that is back has heard what was not delivered, and logged it."""
_MOBILE: Final = "acme/anywhere"
_RESIDENT: Final = "acme/west"
_OPERATOR: Final = "operators/admin"
_ENDPOINTS: Final = ((Endpoint.CHAT, Endpoint.COMPLETION), (Endpoint.SDK_TEXT, Endpoint.SDK_TOKENS))
"""For text and for token ids: over HTTP, and with the SDK."""


@dataclasses.dataclass(slots=True)
class RegionLoss:
    how: str
    began_at: float = 0.0
    ended_at: float = 0.0

    def strikes(self, record: Record) -> bool:
        """Returns true if an answer was running when it began."""
        first_at, ended_at = record.transcript.first_at, record.transcript.ended_at
        return first_at is not None and first_at < self.began_at < ended_at


async def lose_region(model: ModelConfig, seed: int, num_users: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the report, whose `problems` are empty if the run passed. Raises CommandError and KvloomError."""
    data_dir = Path(tempfile.mkdtemp(prefix="kvloom-regions-"))
    tokenizer = ModelTokenizer.load(Path(model.path))
    try:
        report = await _Run(model, seed, num_users, data_dir, tokenizer, say).run()
    finally:
        tokenizer.close()
        shutil.rmtree(data_dir, ignore_errors=True)
    return report


class _Run:
    def __init__(
        self,
        model: ModelConfig,
        seed: int,
        num_users: int,
        data_dir: Path,
        tokenizer: ModelTokenizer,
        say: Callable[[str], None],
    ) -> None:
        self._model = model
        self._seed = seed
        self._num_users = num_users
        self._data_dir = data_dir
        self._tokenizer = tokenizer
        self._say = say
        self._oracle = SimOracle(tokenizer, {model.name: 0})
        self._records: list[Record] = []
        self._losses: list[RegionLoss] = []
        self._is_cut = False
        self._proxies: dict[str, FaultProxy] = {}
        """Those of the edge, by cell."""
        self._client_proxies: dict[str, FaultProxy] = {}
        """Those of clients with the SDK, by cell."""
        self._clusters: dict[str, Cluster] = {}

    async def run(self) -> dict[str, Any]:
        async with self._cells() as (west, east):
            keys = await self._make_tenants(west)
            async with contextlib.AsyncExitStack() as clients:
                http = await clients.enter_async_context(HttpClient({"edge": f"http://{west.http_address}"}))
                tenants, sdks = [], []
                for name in (_MOBILE, _MOBILE, _RESIDENT):
                    tenants.append(ChaosTenant(name, {}, AMPLE_NANOS, [IssuedKey("", keys[name], time.monotonic())]))
                    west_address, east_address = map(_address, self._client_proxies.values())
                    sdk = SdkClient(west_address, 2, keys[name], east_address)
                    sdks.append(await clients.enter_async_context(sdk))
                own = (self._oracle, self._tokenizer, QuestionSource(), self._records.append)
                await self._run_users(UserContext(http, sdks, *own, tenants), west)
            problems = [*await wait_for_quiescence(west), *await wait_for_quiescence(east)]
            await asyncio.sleep(_SETTLE_SECONDS)
            counts = await _counts_of(west, keys[_OPERATOR])
            logs = {
                name: UsageLog([cluster.folder.log_dir / f"{one}.log" for one in cluster.names("router")])
                for name, cluster in self._clusters.items()
            }
            for log in logs.values():
                log.read()
        return self._report(logs, counts, problems)

    # -- the cells ----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _cells(self) -> AsyncIterator[tuple[Cluster, Cluster]]:
        async with contextlib.AsyncExitStack() as stack:
            for name in ("west", "east"):
                for proxies, is_sdk in ((self._proxies, False), (self._client_proxies, True)):
                    proxy = proxies[name] = FaultProxy(partial(self._router_of, name, is_for_clients=is_sdk))
                    proxy.delay_seconds = DELAY_SECONDS * (name == "east")
                    await proxy.start()
                    stack.push_async_callback(proxy.close)
            control_port = pick_free_ports(1)[0]
            for name in ("west", "east"):
                cluster = Cluster(self._config(name, control_port), self._data_dir / name, lambda _: None)
                self._clusters[name] = cluster
                stack.push_async_callback(cluster.stop)
                await cluster.start()
                watching = asyncio.create_task(cluster.watch(), name=f"supervisor of {name}")
                stack.callback(watching.cancel)
            yield self._clusters["west"], self._clusters["east"]

    def _config(self, cell: str, control_port: int) -> KvloomConfig:
        config = KvloomConfig(model=self._model)
        provide_secret(config, self._data_dir)
        config.fabric.cell = cell
        config.shard.engine, config.shard.num_shards = "sim", 2
        config.shard.sim.step_ms = STEP_MS
        config.control.enabled, config.control.port = True, control_port
        config.control.operator_organisation = _OPERATOR.partition("/")[0]
        config.log.format = "json"  # usage records are read from it
        config.edge.reattach_seconds = REATTACH_SECONDS
        config.edge.routers = [_address(self._proxies["west"])]
        if cell == "west":
            config.edge.cells = [CellConfig(name="east", routers=[_address(self._proxies["east"])])]
        else:
            config.fabric.roles = ["router", "safety", "shard"]
        return config

    def _router_of(self, cell: str, *, is_for_clients: bool) -> tuple[str, int] | None:
        """Where a proxy of the cell leads; None: nowhere. Edges and the SDK have ports of their own."""
        if cell not in self._clusters or (cell == "west" and self._is_cut):
            return None
        (router,) = [status for status in self._clusters[cell].statuses if status.role == "router"]
        address = router.address if is_for_clients else router.internal_address
        return split_address(address) if address else None

    async def _make_tenants(self, west: Cluster) -> dict[str, str]:
        """Returns a key of each tenant, by its id, once the edge knows it."""
        desk = ControlDesk(west)
        keys: dict[str, str] = {}
        for tenant, cells, scopes in (
            (_MOBILE, [], ["inference"]),
            (_RESIDENT, ["west"], ["inference"]),
            (_OPERATOR, [], ["admin"]),
        ):
            project = {"id": tenant, "residency": cells}
            await desk.change("CreateProject", project=project, create_organisation=True)
            keys[tenant] = (await desk.change("CreateKey", key={"project": tenant, "scopes": scopes})).secret
        return keys

    # -- users and losses ---------------------------------------------------------------------------------------------

    async def _run_users(self, context: UserContext, west: Cluster) -> None:
        stop = asyncio.Event()
        users = [
            asyncio.create_task(self._run_user(context, number, stop), name=f"user {number}")
            for number in range(self._num_users)
        ]
        try:
            for how in ("network", "processes"):
                await asyncio.sleep(CALM_SECONDS)
                await self._lose(RegionLoss(how), west)
            await asyncio.sleep(CALM_SECONDS)
            stop.set()
            async with asyncio.timeout(2 * PATIENCE_SECONDS):
                await asyncio.gather(*users)
        finally:
            for user in users:
                user.cancel()
            await asyncio.gather(*users, return_exceptions=True)

    async def _lose(self, loss: RegionLoss, west: Cluster) -> None:
        self._say(f"west is lost: {loss.how}")
        self._losses.append(loss)
        loss.began_at, self._is_cut = time.monotonic(), True
        if loss.how == "processes":
            for role in ("router", "shard", "safety"):
                for name in west.names(role):
                    west.signal(name, signal.SIGKILL)
        for proxies in (self._proxies, self._client_proxies):
            proxies["west"].reset()
        await asyncio.sleep(LOST_SECONDS)
        loss.ended_at, self._is_cut = time.monotonic(), False

    async def _run_user(self, context: UserContext, number: int, stop: asyncio.Event) -> None:
        """A user of the edge, or, with an odd number, of the SDK."""
        rng = random.Random(f"user {number} of {self._seed}")
        is_sdk = number % 2 == 1
        num_asked = 0
        while not stop.is_set():
            num_asked += 1
            question = draw_question(rng, self._oracle.words[:256], MAX_TOKENS, [self._model.name])
            is_resumable = is_sdk and question.is_chat and num_asked % 2 == 0
            behaviour = Behaviour.RESUMABLE if is_resumable else Behaviour.PLAIN
            call = UserCall(question, _ENDPOINTS[is_sdk][not question.is_chat], behaviour)
            context.on_record(await ask(context, call, rng, number, f"u{number}-{num_asked}"))

    # -- the report ---------------------------------------------------------------------------------------------------

    def _report(self, logs: dict[str, UsageLog], counts: dict[str, float], problems: list[str]) -> dict[str, Any]:
        mobile = [record for record in self._records if record.tenant == _MOBILE]
        resident = [record for record in self._records if record.tenant == _RESIDENT]
        killed = self._losses[-1]
        metering = compare_metering(
            (record.delivery(may_miss_usage_record=_was_killed(record, killed)) for record in self._records),
            [one for log in logs.values() for one in log.records],
        )
        num_moved_residents = sum(one.tenant == _RESIDENT for one in logs["east"].records)
        bad = [record for record in self._records if record.finding.verdict in NEVER_ALLOWED]
        failed = [record for record in mobile if record.finding.verdict is not AnswerVerdict.OK]
        unexplained = [one for one in resident if one.finding.verdict is not AnswerVerdict.OK and not _has_stayed(one)]
        struck = [record for record in mobile if any(loss.strikes(record) for loss in self._losses)]
        pauses = [record.transcript.longest_pause_seconds for record in struck]
        for name, found in (("differing, lost or doubled", bad), ("failed although another cell was there", failed)):
            problems += [f"{record.tenant}: {record.finding.detail} ({name})" for record in found]
        problems += [f"{one.tenant}: {one.finding.verdict} {one.finding.detail}" for one in unexplained]
        problems += [*metering.over, *metering.under]
        if num_moved_residents:
            problems.append(f"{num_moved_residents} requests of a resident tenant were computed elsewhere")
        if not struck or not counts["reattached"]:
            problems.append("no stream was running when the cell was lost")
        if not any(one.call.endpoint in _ENDPOINTS[True] for one in struck):
            problems.append("no stream of the SDK was running when the cell was lost")
        return {
            "num_answers": len(self._records),
            "by_verdict": {verdict: sum(one.finding.verdict is verdict for one in mobile) for verdict in AnswerVerdict},
            "num_streams_at_the_losses": len(struck),
            "num_sdk_streams_at_the_losses": sum(one.call.endpoint in _ENDPOINTS[True] for one in struck),
            "pause_seconds": {"median": statistics.median(pauses), "longest": max(pauses)} if pauses else {},
            "num_differing_lost_or_doubled": len(bad),
            "num_resident_answers": len(resident),
            "num_resident_answers_ended": sum(one.finding.verdict is AnswerVerdict.FAILED for one in resident),
            "num_resident_refusals": sum(one.transcript.num_refusals for one in resident),
            "num_resident_requests_moved": num_moved_residents,
            "num_metered_exactly": metering.num_exact,
            "num_metered_twice": len(metering.over),
            "num_credited_tokens": metering.num_credited_tokens,
            "num_usage_records_lost_with_their_router": metering.num_lost_records,
            **{f"edge_{name}": count for name, count in counts.items()},
            "problems": problems,
        }


def _address(proxy: FaultProxy) -> str:
    return f"127.0.0.1:{proxy.port}"


def _was_killed(record: Record, killed: RegionLoss) -> bool:
    """Returns true if its router may have been killed with usage records that it had not written."""
    return record.transcript.sent_at < killed.ended_at and record.transcript.ended_at > killed.began_at - 1.0


def _has_stayed(record: Record) -> bool:
    """Returns true if an answer of the resident tenant has ended for want of its cell."""
    return record.finding.detail == "cell_unavailable"


async def _counts_of(west: Cluster, key: str) -> dict[str, float]:
    """Those of the edge's metrics that say what moved."""
    url, headers = f"http://{west.http_address}/metrics", {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        response.raise_for_status()
        text = await response.text()
    found = {"reattached": 0.0}
    for sample in samples_in(text):
        if sample.name == "kvloom_edge_cell_requests_total":
            found[f"requests_of_{sample.labels['cell']}"] = sample.value
        elif sample.name == "kvloom_edge_cell_round_trip_seconds":
            found[f"round_trip_seconds_of_{sample.labels['cell']}"] = round(sample.value, 4)
        elif sample.name == "kvloom_edge_reattached_requests_total":
            found["reattached"] = sample.value
    return found
