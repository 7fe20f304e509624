"""How fast an answer begins must not tell a tenant what another one has asked.

An attacker of another tenant sends prompts, of which a victim has sent half just before, and tries to tell by the time
to the first token which half that was. AUC is the chance that, of a prompt of either half, the attacker takes the right
one for the victim's: 0.5 is guessing. Both halves are interleaved in a random order, so that whatever else the machine
does slows them down alike. What remains is chance: with n prompts in each half, the AUC of a guess has the standard
deviation sqrt((2n + 1) / 12) / n, and the test allows two of them on top of 0.55. A guess is beyond that once in 2,000
runs. The same measurement must find what tenants with a shared cache scope do reveal, or it would prove nothing.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest

from kvloom.v1 import router_service_pb2 as pb
from kvloom.v1.generation_pb2 import StopConditions
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom_common.access.tenants import Tenants
from kvloom_common.config import ControlConfig
from kvloom_common.tenancy.table import Tenant
from kvloom_common.trust.shared_secret import SharedSecret
from tests.fakes.fake_control import OTHER_KEY, SEARCH_KEY, FakeControl, two_organisations
from tests.fakes.router_world import TIMEOUT_SECONDS, RouterWorld
from tests.fakes.shard_world import sim_config
from tests.fakes.trusted_router import MODEL, SECRET, served_router
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

NUM_PROMPTS = 150
"""In each half."""
NUM_TOKENS = 256
PREFILL_TOKENS_PER_SECOND = 20_000.0
"""A prompt that is not cached takes 13 ms."""
MAX_AUC = 0.55
ALLOWANCE = 2 * math.sqrt((2 * NUM_PROMPTS + 1) / 12) / NUM_PROMPTS
VICTIM, ATTACKER = SEARCH_KEY, OTHER_KEY


@pytest.fixture
async def control(world: RouterWorld, tmp_path: Path) -> AsyncIterator[FakeControl]:
    control = FakeControl(trust=SharedSecret(SECRET, ("control",), "control"))
    control.put(*two_organisations())
    port = await control.start()
    world.config.data_dir = str(tmp_path)
    world.config.control = ControlConfig(enabled=True, host="127.0.0.1", port=port)
    yield control
    await control.stop()


async def asked(stub: RouterServiceStub, key: str, prompt: Sequence[int]) -> tuple[float, int]:
    """(seconds to the first token, cached tokens)"""
    request = pb.GenerateRequest(
        model=MODEL, token_ids=pb.TokenIds(ids=prompt), stop=StopConditions(max_tokens=1, ignore_eos=True)
    )
    began = time.perf_counter()
    first, num_cached = 0.0, 0
    call = stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),), timeout=TIMEOUT_SECONDS)
    async for response in call:
        for delta in response.deltas:
            num_cached = max(num_cached, delta.start.num_cached_tokens)
            if delta.token_ids and not first:
                first = time.perf_counter() - began
    return first, num_cached


async def measured(stub: RouterServiceStub, seed: int, num_prompts: int) -> tuple[float, set[int], set[int]]:
    """The AUC, and how many tokens were cached of the victim's prompts and of fresh ones."""
    rng = random.Random(seed)

    def prompt() -> list[int]:
        return [rng.randrange(1, 100) for _ in range(NUM_TOKENS)]

    repeated: list[tuple[float, int]] = []
    fresh: list[tuple[float, int]] = []
    for _ in range(num_prompts):
        victims = prompt()
        await asked(stub, VICTIM, victims)
        probes = [(repeated, victims), (fresh, prompt())]
        rng.shuffle(probes)
        for half, probe in probes:
            half.append(await asked(stub, ATTACKER, probe))
    wins = sum((slow > fast) + 0.5 * (slow == fast) for slow, _ in fresh for fast, _ in repeated)
    return wins / num_prompts**2, {cached for _, cached in repeated}, {cached for _, cached in fresh}


@contextlib.asynccontextmanager
async def asking(world: RouterWorld) -> AsyncIterator[tuple[RouterServiceStub, Tenants]]:
    """A router with a shard whose prompts take their time, and what the router knows of its tenants."""
    shard = sim_config()
    shard.shard.sim.prefill_tokens_per_second = PREFILL_TOKENS_PER_SECOND
    async with served_router(world, config=shard) as (server, address), grpc.aio.insecure_channel(address) as channel:
        identities = server.callers.identities
        assert identities is not None
        await eventually(lambda: identities.tenants.connected, "the table")
        yield RouterServiceStub(channel), identities.tenants


async def share_the_cache(control: FakeControl, tenants: Tenants) -> None:
    control.put(Tenant("acme/search", cache_scope="both"), Tenant("other/app", cache_scope="both"))
    await eventually(lambda: tenants.table.version == control.version, "the change")


async def test_another_tenants_prompt_is_not_cached(world: RouterWorld, control: FakeControl) -> None:
    """What the time to the first token depends on: without a common scope a repeated prompt is prefilled as a fresh one
    is."""
    async with asking(world) as (stub, tenants):
        _, cached, cached_fresh = await measured(stub, seed=1, num_prompts=NUM_PROMPTS // 15)
        assert cached == cached_fresh == {0}
        await share_the_cache(control, tenants)
        _, cached, cached_fresh = await measured(stub, seed=2, num_prompts=NUM_PROMPTS // 15)
        assert min(cached) > NUM_TOKENS // 2
        assert cached_fresh == {0}


@pytest.mark.long
async def test_the_time_to_the_first_token_reveals_nothing_to_another_tenant(
    world: RouterWorld, control: FakeControl
) -> None:
    """And it does as soon as an administrator lets the two share their cache."""
    async with asking(world) as (stub, tenants):
        auc, cached, cached_fresh = await measured(stub, seed=1, num_prompts=NUM_PROMPTS)
        assert cached == cached_fresh == {0}
        assert max(auc, 1 - auc) <= MAX_AUC + ALLOWANCE, auc
        await share_the_cache(control, tenants)
        auc, cached, cached_fresh = await measured(stub, seed=2, num_prompts=NUM_PROMPTS // 4)
        assert min(cached) > NUM_TOKENS // 2
        assert cached_fresh == {0}
        assert auc > 0.9
