"""Models that go away and come back while users ask for them: each fault strikes when its context is entered, and is
undone when it is left. Meanwhile requests of the run itself ask for the model, which must be refused as documented."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import aiohttp

from lab.chaos.clients.sse_reading import error_in
from lab.chaos.fabric.cluster import Cluster
from lab.chaos.fabric.faults import Fault, FaultKind, Probe, pick
from tools.failures import CommandError

_PROBE_SECONDS: Final = 0.25
_PROBE_TIMEOUT_SECONDS: Final = 20.0
_MAX_TRIES: Final = 5
"""Other faults may strike while a model is loaded or woken."""
_RETRY_SECONDS: Final = 2.0


class StrikeSkippedError(Exception):
    """The fault cannot strike now."""


@contextlib.asynccontextmanager
async def unload_model(cluster: Cluster, fault: Fault, _rng: random.Random) -> AsyncIterator[str]:
    """Raises StrikeSkippedError, and CommandError if the model does not come back."""
    if len(cluster.model_names) < 2:
        raise StrikeSkippedError("a fabric keeps at least one model")
    model = cluster.configured(pick(cluster.model_names, fault.choice))
    await _strike(cluster.unload_model(model.name))
    async with _probing(cluster, fault.kind, model.name):
        yield model.name
    await _until_done(lambda: cluster.load_model(model))


@contextlib.asynccontextmanager
async def sleep_model(cluster: Cluster, fault: Fault, _rng: random.Random) -> AsyncIterator[str]:
    """Raises StrikeSkippedError, and CommandError if the model does not come back."""
    model = pick(cluster.model_names, fault.choice)
    await _strike(cluster.sleep_model(model))
    async with _probing(cluster, fault.kind, model):
        yield model
    await _until_done(lambda: cluster.wake_model(model))


async def _strike(change: Awaitable[None]) -> None:
    try:
        await change
    except CommandError as error:
        raise StrikeSkippedError(error.message) from error


async def _until_done(change: Callable[[], Awaitable[None]]) -> None:
    """Raises CommandError after several tries."""
    for _ in range(_MAX_TRIES - 1):
        try:
            await change()
        except CommandError:
            await asyncio.sleep(_RETRY_SECONDS)
        else:
            return
    await change()


@contextlib.asynccontextmanager
async def _probing(cluster: Cluster, kind: FaultKind, model: str) -> AsyncIterator[None]:
    asking = asyncio.create_task(_ask_again_and_again(cluster, kind, model), name=f"requests for {model}")
    try:
        yield
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def _ask_again_and_again(cluster: Cluster, kind: FaultKind, model: str) -> None:
    """Never returns. Restarted shards of a sleeping model are put to sleep again, as by `kvloom up`."""
    timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), timeout=timeout) as session:
        for edge_url in itertools.cycle(list(cluster.edge_urls.values())):
            cluster.probes.append(await _probe(session, edge_url, kind, model, cluster.probe_key))
            with contextlib.suppress(CommandError):
                await cluster.keep_asleep()
            await asyncio.sleep(_PROBE_SECONDS)


async def _probe(session: aiohttp.ClientSession, edge_url: str, kind: FaultKind, model: str, key: str) -> Probe:
    began_at = time.monotonic()
    body = {"model": model, "prompt": "x", "max_tokens": 1}
    try:
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post(f"{edge_url}/v1/completions", json=body, headers=headers) as response:
            code, _ = error_in(await response.read())
            answer = f"{response.status} {code}".rstrip()
    except (aiohttp.ClientError, OSError):
        answer = "no answer"
    return Probe(kind, model, began_at, time.monotonic(), answer)
