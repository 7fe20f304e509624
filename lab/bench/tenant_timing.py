"""`kvloom-lab bench tenant-timing`: whether the time to the first token tells a tenant what another one has asked.

An attacker of another tenant sends prompts, of which a victim has sent half just before, and tries to tell by the time
to the first token which half that was. The AUC is the chance that, of one prompt of either half, the attacker takes
the right one for the victim's. Both come in turn, in a random order, so that whatever else the machine does slows them
down alike. The same attack on prompts of the attacker's own tenant, which are cached for it, must succeed, or the
measurement would prove nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import grpc
import grpc.aio
import msgspec

from kvloom.v1 import router_service_pb2 as pb
from kvloom.v1.generation_pb2 import StopConditions
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom_common.config import KvloomConfig
from lab.bench.auc import auc
from lab.bench.experiment import (
    DATA_DIR,
    Column,
    Report,
    TableOf,
    count,
    experiment,
    flag,
    number,
    show_progress,
)
from lab.bench.shared_flags import MODEL, bench_config
from tools.failures import CommandError
from tools.options import EngineName
from tools.supervisor.child_fabric import child_fabric
from tools.supervisor.state import RunFolder

MAX_DISTANCE: Final = 0.05
"""From 0.5, of all of the confidence interval."""
MIN_OWN_AUC: Final = 0.9
NUM_OWN_PROMPTS: Final = 100
_REQUEST_SECONDS: Final = 60.0
_KEY_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.05
_STEP_MS: Final = 1.0
_SIM_PREFILL_TOKENS_PER_SECOND: Final = 20_000.0
_TOKEN_IDS: Final = range(300, 4300)
"""Words and their parts, in the vocabularies of byte pairs."""
_NUM_WARM_UP: Final = 20


class Timing(msgspec.Struct, frozen=True):
    """Measures what an attacker learns of a victim's prompts."""

    num_prompts: int
    """The number of prompts of each half."""
    auc: float
    low: float
    high: float
    """The ends of the 95% confidence interval."""
    repeated_ms: float
    fresh_ms: float
    """Medians of the time to the first token, of prompts that the victim had sent and of others."""
    max_cached_tokens: int
    """The most that an answer to the attacker has said of a prompt of the victim."""


class TimingAttack(NamedTuple):
    stub: RouterServiceStub
    model: str
    num_prompt_tokens: int


_COLUMNS: Final = (
    Column("prompts of", lambda row: row[0], is_left=True),
    Column("repeated, and others", lambda row: row[1].num_prompts),
    Column("AUC", lambda row: row[1].auc, ".4f"),
    Column("95%, from", lambda row: row[1].low, ".4f"),
    Column("to", lambda row: row[1].high, ".4f"),
    Column("first token, repeated", lambda row: row[1].repeated_ms, ".2f", " ms"),
    Column("others", lambda row: row[1].fresh_ms, ".2f", " ms"),
    Column("said to be cached", lambda row: row[1].max_cached_tokens),
)


@experiment(
    "tenant-timing",
    flag("--engine", EngineName(), "sim", "The engine."),
    MODEL,
    count(
        "--num-prompts", 2000, "How many prompts of the victim are tried, and as many others.", least=10, most=100_000
    ),
    count("--prompt-tokens", 256, "The length of a prompt.", least=32, most=4096, to="num_prompt_tokens"),
    number("--max-seconds", 900.0, "End after this time with the prompts that there are.", least=1),
    flag("--seed", int, 1, "Draws the prompts."),
    DATA_DIR,
)
def bench_tenant_timing(
    engine: str,
    model: str,
    num_prompts: int,
    num_prompt_tokens: int,
    max_seconds: float,
    seed: int,
    data_dir: Path | None,
) -> Report:
    """Try to tell by the time to the first token what another tenant has asked, on a fabric that is started for it.

    The exit status is 1 if the 95% confidence interval of the AUC is not within 0.45 to 0.55, or if the same attack
    does not even succeed on prompts that are cached for the attacker.
    """
    config = bench_config(engine, model, "cpu", data_dir)
    config.shard.sim.step_ms = _STEP_MS
    config.shard.sim.prefill_tokens_per_second = _SIM_PREFILL_TOKENS_PER_SECOND
    config.control.enabled = True
    across, own = asyncio.run(_measure(config, num_prompts, num_prompt_tokens, max_seconds, seed))
    is_safe = max(across.high - 0.5, 0.5 - across.low) <= MAX_DISTANCE and not across.max_cached_tokens
    is_proof = own.auc >= MIN_OWN_AUC
    verdict = "nothing can be told" if is_safe else "NOT SHOWN: the interval is not within 0.45 to 0.55"
    if not is_proof:
        verdict = f"NOT SHOWN: even what is cached was not found (AUC {own.auc:.3f})"
    table = TableOf(_COLUMNS, [("another tenant", across), ("its own tenant", own)])
    shown = {"another_tenant": across, "own_tenant": own, "ok": is_safe and is_proof}
    return Report(shown, [table, verdict], is_right=is_safe and is_proof)


async def _measure(
    config: KvloomConfig, num_prompts: int, num_prompt_tokens: int, max_seconds: float, seed: int
) -> tuple[Timing, Timing]:
    """Measures the prompts of another tenant, and those of the attacker's own."""
    folder = Path(tempfile.mkdtemp(prefix="kvloom-bench-"))
    try:
        async with child_fabric(config, folder):
            state = RunFolder(folder).read_running()
            if state is None:
                raise CommandError("the fabric has ended")
            victim, attacker = [await _new_key(folder, project) for project in ("victim/app", "attacker/app")]
            async with grpc.aio.insecure_channel(state.router_address) as channel:
                attack = TimingAttack(RouterServiceStub(channel), config.model.name, num_prompt_tokens)
                for key in (victim, attacker):
                    await _wait_until_valid(attack, key)
                rng = random.Random(seed)
                own_until = time.monotonic() + max_seconds / 3
                await _timing(attack, attacker, attacker, _NUM_WARM_UP, own_until, rng)
                show_progress("the attacker's own prompts")
                own = await _timing(attack, attacker, attacker, min(num_prompts, NUM_OWN_PROMPTS), own_until, rng)
                show_progress("the victim's prompts")
                until = time.monotonic() + max_seconds
                return await _timing(attack, victim, attacker, num_prompts, until, rng), own
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _timing(
    attack: TimingAttack, victim: str, attacker: str, num_prompts: int, until: float, rng: random.Random
) -> Timing:
    """`victim` and `attacker` are keys; `until` on the monotonic clock."""
    repeated: list[float] = []
    fresh: list[float] = []
    max_cached = 0
    while len(fresh) < num_prompts and (len(fresh) < 2 or time.monotonic() < until):  # an interval needs two
        asked = rng.choices(_TOKEN_IDS, k=attack.num_prompt_tokens)
        other = rng.choices(_TOKEN_IDS, k=attack.num_prompt_tokens)
        await _first_token(attack, victim, asked)
        probes = [(repeated, asked), (fresh, other)]
        rng.shuffle(probes)
        for half, probe in probes:
            seconds, num_cached = await _first_token(attack, attacker, probe)
            half.append(seconds)
            max_cached = max(max_cached, num_cached)
    found = auc(fresh, repeated)
    repeated_ms, fresh_ms = 1000 * statistics.median(repeated), 1000 * statistics.median(fresh)
    return Timing(len(fresh), found.value, found.low, found.high, repeated_ms, fresh_ms, max_cached)


async def _first_token(attack: TimingAttack, key: str, prompt: Sequence[int]) -> tuple[float, int]:
    """(seconds to the first token, tokens said to be cached). Raises CommandError."""
    stop = StopConditions(max_tokens=1, ignore_eos=True)
    request = pb.GenerateRequest(model=attack.model, token_ids=pb.TokenIds(ids=prompt), stop=stop)
    began = time.perf_counter()
    first, num_cached = 0.0, 0
    try:
        call = attack.stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),), timeout=_REQUEST_SECONDS)
        async for response in call:
            for delta in response.deltas:
                num_cached = max(num_cached, delta.start.num_cached_tokens)
                if delta.token_ids and not first:
                    first = time.perf_counter() - began
    except grpc.aio.AioRpcError as error:
        raise CommandError(f"the fabric has refused a request: {error.details()}") from error
    if not first:
        raise CommandError("an answer has come without a token")
    return first, num_cached


async def _wait_until_valid(attack: TimingAttack, key: str) -> None:
    """A new key is known to routers a moment later."""
    deadline = time.monotonic() + _KEY_SECONDS
    prompt = list(_TOKEN_IDS[:32])
    while True:
        try:
            await _first_token(attack, key, prompt)
        except CommandError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_POLL_SECONDS)
        else:
            return


async def _new_key(data_dir: Path, project: str) -> str:
    """By the command that operators give. Raises CommandError."""
    arguments = ("keys", "create", "--project", project, "--create", "--json", "--data-dir", str(data_dir))
    command = (sys.executable, "-P", "-m", "tools.cli.commands", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    output, errors = await process.communicate()
    if process.returncode:
        raise CommandError(f"no key could be made: {errors.decode(errors='replace').strip()}")
    return str(json.loads(output)["secret"])
