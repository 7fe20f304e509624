"""`kvloom-lab bench kv-shares`: what a flood of another tenant costs a tenant's conversations in cache hits, with and
without a guaranteed share of the KV blocks, on one engine in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvloom_common.config import KvloomConfig
from kvloom_common.kv_share import MAX_KV_SHARES_PERCENT, KvShare
from kvloom_common.text.block_hash import root_hash
from kvloom_common.text.tokenizer import ModelTokenizer
from lab.bench.experiment import Column, Report, TableOf, choice, count, experiment
from lab.bench.shared_flags import SHARD_FLAGS, Device, bench_config
from shard_server.engines.base import Engine, EngineRequest, Sampling, SequenceEnd, SequenceStart
from shard_server.engines.create import create_engine
from tools.failures import CommandError

ANSWER_TOKENS: Final = 16
QUESTION_TOKENS: Final = 64
FLOOD_PROMPT_TOKENS: Final = 320
FLOOD_OUTPUT_TOKENS: Final = 8
_TOKEN_IDS: Final = range(500, 5000)
_TIMEOUT_SECONDS: Final = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class KvSharesPlan:
    """Describes a run. In every round each conversation asks one question, in the middle of a flood."""

    num_blocks: int = 256
    percent: int = 50
    num_conversations: int = 4
    num_turns: int = 6
    num_flood_requests: int = 16
    """In a round."""


@dataclasses.dataclass(frozen=True, slots=True)
class ConversationTurns:
    """The same turn of all conversations."""

    num_prompt_tokens: int
    num_cached_tokens: int

    @property
    def rate(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Hits:
    """The cache hits of the conversations. The totals are without their first turns, which nothing cached can
    answer."""

    turns: Sequence[ConversationTurns]
    num_last_resorts: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(turn.num_prompt_tokens for turn in self.turns[1:])

    @property
    def num_cached_tokens(self) -> int:
        return sum(turn.num_cached_tokens for turn in self.turns[1:])

    @property
    def rate(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens


class _Session:
    """Runs requests on a started engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._starts: dict[str, SequenceStart] = {}
        self._tokens: dict[str, list[int]] = {}
        self._ends: dict[str, asyncio.Future[SequenceEnd]] = {}
        self.num_last_resorts = 0

    async def read(self) -> None:
        """Read the engine's steps until it is closed."""
        async for output in self._engine.steps():
            self._starts.update((start.request_id, start) for start in output.starts)
            for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
                self._tokens.setdefault(request_id, []).extend(token_ids)
            for end in output.ends:
                self._ends[end.request_id].set_result(end)
            if output.load.kv_shares is not None:
                self.num_last_resorts = output.load.kv_shares.num_last_resorts

    def submit(self, request: EngineRequest) -> asyncio.Future[SequenceEnd]:
        self._ends[request.request_id] = asyncio.get_running_loop().create_future()
        self._engine.submit(request)
        return self._ends[request.request_id]

    async def ask(self, request: EngineRequest) -> tuple[list[int], int]:
        """Returns the tokens of the answer, and how many tokens were cached. Raises CommandError."""
        end = await self.submit(request)
        if end.error:
            raise CommandError(f"the engine failed: {end.error}")
        return self._tokens[request.request_id], self._starts[request.request_id].num_cached_tokens


async def play(engine: Engine, plan: KvSharesPlan, *, has_flood: bool, has_share: bool) -> Hits:
    """Play the plan on an engine that has not started, and close it. The same is asked every time."""
    await engine.start()
    session = _Session(engine)
    reading = asyncio.create_task(session.read())
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            return await _play(session, plan, engine.info.model, has_flood=has_flood, has_share=has_share)
    finally:
        await engine.close()
        await reading


async def _play(session: _Session, plan: KvSharesPlan, model: str, *, has_flood: bool, has_share: bool) -> Hits:
    rng = random.Random("kv-shares")
    share = KvShare(1, plan.percent) if has_share else None
    histories: list[list[int]] = [[] for _ in range(plan.num_conversations)]
    turns: list[ConversationTurns] = []
    for turn in range(plan.num_turns):
        flood = [
            session.submit(_request(f"flood-{turn}-{i}", model, "flood", _draw(rng, FLOOD_PROMPT_TOKENS), None))
            for i in range(plan.num_flood_requests if has_flood else 0)
        ]
        if flood:
            await asyncio.gather(*flood[: len(flood) // 2])
        questions = [
            _request(f"own-{turn}-{i}", model, "own", [*history, *_question(turn, i)], share)
            for i, history in enumerate(histories)
        ]
        answers = await asyncio.gather(*map(session.ask, questions))
        num_prompt_tokens = sum(len(question.prompt_token_ids) for question in questions)
        turns.append(ConversationTurns(num_prompt_tokens, sum(num_cached for _, num_cached in answers)))
        for history, question, (token_ids, _) in zip(histories, questions, answers, strict=True):
            history[:] = [*question.prompt_token_ids, *token_ids]
        await asyncio.gather(*flood)
    return Hits(turns, session.num_last_resorts)


def _question(turn: int, conversation: int) -> list[int]:
    return _draw(random.Random(f"{turn} {conversation}"), QUESTION_TOKENS)


def _draw(rng: random.Random, num_tokens: int) -> list[int]:
    return rng.choices(_TOKEN_IDS, k=num_tokens)


def _request(request_id: str, model: str, tenant: str, prompt: Sequence[int], share: KvShare | None) -> EngineRequest:
    return EngineRequest(
        request_id,
        prompt,
        Sampling(temperature=0.0),
        FLOOD_OUTPUT_TOKENS if tenant == "flood" else ANSWER_TOKENS,
        root_hash=root_hash(model, cache_salt=tenant),
        kv_share=share,
    )


def run_bench(config: KvloomConfig, plan: KvSharesPlan) -> list[dict[str, Any]]:
    """One report for each of: alone, a flood without the share, and a flood with it."""
    config.shard.num_blocks = plan.num_blocks
    config.shard.sim.step_ms = 1.0
    tokenizer = ModelTokenizer.load(Path(config.model.path))
    reports: list[dict[str, Any]] = []
    try:
        for case, has_flood, has_share in (
            ("alone", False, False),
            ("flood, no share", True, False),
            ("flood, share", True, True),
        ):
            hits = asyncio.run(play(create_engine(config, tokenizer), plan, has_flood=has_flood, has_share=has_share))
            alone = reports[0]["hit_rate"] if reports else hits.rate
            reports.append(
                {
                    "engine": config.shard.engine,
                    "case": case,
                    "prompt_tokens": hits.num_prompt_tokens,
                    "cached_tokens": hits.num_cached_tokens,
                    "hit_rate": hits.rate,
                    "hit_rate_by_turn": [round(turn.rate, 4) for turn in hits.turns],
                    "loss": 1 - hits.rate / alone,
                    "last_resorts": hits.num_last_resorts,
                }
            )
    finally:
        tokenizer.close()
    return reports


_COLUMNS: Final = (
    Column("engine", "engine", is_left=True),
    Column("case", "case", is_left=True),
    Column("prompt", "prompt_tokens"),
    Column("cached", "cached_tokens"),
    Column("hit rate", "hit_rate", ".1%"),
    Column("loss", "loss", ".1%"),
)


@experiment(
    "kv-shares",
    choice("--engine", ["sim", "torch"], "sim", "The engine."),
    count("--blocks", 256, "KV blocks.", least=64, to="num_blocks"),
    count("--share", 50, "The guaranteed share in percent.", most=MAX_KV_SHARES_PERCENT, to="percent"),
    count("--conversations", 4, most=1000, to="num_conversations"),
    count("--turns", 6, least=2, most=100, to="num_turns"),
    count("--flood", 16, "Requests of the other tenant in each turn.", most=10_000, to="num_flood_requests"),
    *SHARD_FLAGS,
)
def bench_kv_shares(engine: str, model: str, device: Device, data_dir: Path | None, **sizes: int) -> Report:
    """Flood an engine while another tenant holds conversations; print the cache hits of these conversations alone, and
    with the flood without and with a guaranteed share of the KV blocks."""
    rows = run_bench(bench_config(engine, model, device, data_dir), KvSharesPlan(**sizes))
    return Report(rows, [TableOf(_COLUMNS, rows)])
