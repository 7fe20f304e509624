"""`kvloom-lab bench conversations`: the share of a perfect cache's hits that each placement policy reaches on a live
fabric."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click

from kvloom_common.config import KvloomConfig, ModelConfig
from kvloom_common.text.tokenizer import ChatMessage, ModelTokenizer
from lab.bench.conversations import ConversationTurn, play
from lab.bench.experiment import (
    DATA_DIR,
    MODEL,
    Column,
    Report,
    TableOf,
    choice,
    count,
    experiment,
    flag,
    number,
    show_progress,
)
from lab.bench.infinite_cache import CachedRequest, infinite_cache_tokens
from router.core.placement import POLICIES
from tools.failures import CommandError
from tools.models.resolve import model_cache_dir, resolve_model
from tools.supervisor.child_fabric import child_fabric


@dataclasses.dataclass(frozen=True, slots=True)
class ConversationsPlan:
    """The conversations to play, and the fabric to play them on."""

    model: ModelConfig
    num_shards: int = 2
    engine: str = "torch"
    num_conversations: int = 8
    num_turns: int = 6
    max_tokens: int = 32
    think_seconds: float = 0.5

    def config(self, policy: str) -> KvloomConfig:
        config = KvloomConfig(model=self.model)
        config.shard.num_shards = self.num_shards
        config.shard.engine = self.engine
        config.router.placement.policy = policy
        config.safety.answer_mode = "off"  # it holds the first words back, and it is the prefill that is to be timed
        return config


def run_bench(
    plan: ConversationsPlan,
    policies: Sequence[str],
    num_rounds: int = 1,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Return one report per policy over all rounds. In each round every policy gets a fresh fabric, and the order
    rotates. Raises CommandError."""
    tokenizer = ModelTokenizer.load(Path(plan.model.path))
    turns: dict[str, list[dict[str, Any]]] = {policy: [] for policy in policies}
    try:
        for round_number in range(num_rounds):
            start = round_number % len(policies)
            for policy in (*policies[start:], *policies[:start]):
                on_progress(f"round {round_number + 1} of {num_rounds}, {policy}: starting {plan.num_shards} shards")
                turns[policy] += asyncio.run(_play_on_fresh_fabric(plan, policy, tokenizer, on_progress))
    finally:
        tokenizer.close()
    return [_report(policy, plan, turns[policy]) for policy in policies]


async def _play_on_fresh_fabric(
    plan: ConversationsPlan, policy: str, tokenizer: ModelTokenizer, on_progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    data_dir = Path(tempfile.mkdtemp(prefix="kvloom-bench-"))
    config = plan.config(policy)
    is_log_wanted = False
    try:
        async with child_fabric(config, data_dir) as url:
            on_progress(f"{policy}: playing {plan.num_conversations} conversations of {plan.num_turns} turns")
            exchanges = await play(
                url,
                plan.model.name,
                num_conversations=plan.num_conversations,
                num_turns=plan.num_turns,
                max_tokens=plan.max_tokens,
                think_seconds=plan.think_seconds,
            )
        prompts = [await _prompt_of(exchange, tokenizer) for exchange in exchanges]
    except CommandError:
        is_log_wanted = True
        raise
    finally:
        if not is_log_wanted:
            shutil.rmtree(data_dir, ignore_errors=True)
    return _turns(exchanges, prompts, config.shard.block_size)


async def _prompt_of(exchange: ConversationTurn, tokenizer: ModelTokenizer) -> list[int]:
    messages = [ChatMessage(message["role"], message["content"]) for message in exchange.messages]
    prompt, _ = await tokenizer.encode_chat(messages)
    if len(prompt) != exchange.num_prompt_tokens:
        raise CommandError(
            f"the fabric counted {exchange.num_prompt_tokens} prompt tokens where there are {len(prompt)}"
        )
    return prompt.tolist()


def _turns(
    exchanges: Sequence[ConversationTurn], prompts: Sequence[Sequence[int]], block_size: int
) -> list[dict[str, Any]]:
    requests = [
        CachedRequest(prompt, one.num_output_tokens, one.sent_at, one.first_text_at, one.ended_at)
        for one, prompt in zip(exchanges, prompts, strict=True)
    ]
    return [
        {
            "conversation": one.conversation,
            "turn": one.turn,
            "shard": one.shard,
            "prompt_tokens": one.num_prompt_tokens,
            "cached_tokens": one.num_cached_tokens,
            "infinite_cache_tokens": most,
            "ttft": round(one.ttft_seconds, 4),
        }
        for one, most in zip(exchanges, infinite_cache_tokens(requests, block_size), strict=True)
    ]


def _report(policy: str, plan: ConversationsPlan, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """`cached_share` is relative to the infinite cache's tokens. Tokens that a shard has beyond those (a prefix that
    was still being prefilled when the request was sent) are not counted."""
    infinite = sum(turn["infinite_cache_tokens"] for turn in turns)
    reached = sum(min(turn["cached_tokens"], turn["infinite_cache_tokens"]) for turn in turns)
    ttfts = sorted(turn["ttft"] for turn in turns)
    return {
        "policy": policy,
        "engine": plan.engine,
        "shards": plan.num_shards,
        "requests": len(turns),
        "prompt_tokens": sum(turn["prompt_tokens"] for turn in turns),
        "cached_tokens": sum(turn["cached_tokens"] for turn in turns),
        "infinite_cache_tokens": infinite,
        "cached_share": round(reached / infinite, 4) if infinite else 1.0,
        "ttft_mean": round(statistics.mean(ttfts), 4),
        "ttft_p50": _percentile(ttfts, 0.50),
        "ttft_p99": _percentile(ttfts, 0.99),
        "turns": turns,
    }


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


_COLUMNS: Final = (
    Column("policy", "policy", is_left=True),
    Column("requests", "requests"),
    Column("prompt", "prompt_tokens"),
    Column("cached", "cached_tokens"),
    Column("infinite", "infinite_cache_tokens"),
    Column("share", "cached_share", ".1%"),
    Column("TTFT mean s", "ttft_mean", ".3f"),
    Column("p50", "ttft_p50", ".3f"),
    Column("p99", "ttft_p99", ".3f"),
)


@experiment(
    "conversations",
    count("--shards", 2, "Shards of each fabric.", most=64, to="num_shards"),
    choice("--engine", ["torch", "sim"], "torch", "The engine of its shards."),
    MODEL,
    count("--conversations", 8, most=1000, to="num_conversations"),
    count("--turns", 6, most=100, to="num_turns"),
    count("--max-tokens", 32, "The longest answer."),
    number("--think-seconds", 0.5, "Longest pause between an answer and the next question."),
    flag("--policies", str, "ect,round_robin", "Placement policies, separated by commas."),
    count("--rounds", 1, "All policies again.", to="num_rounds"),
    DATA_DIR,
)
def bench_conversations(model: str, policies: str, num_rounds: int, data_dir: Path | None, **sizes: Any) -> Report:
    """Hold conversations with one fabric per policy; compare cached prompt tokens with an infinite cache, and TTFT."""
    names = [name.strip() for name in policies.split(",")]
    for name in names:
        if name not in POLICIES:
            raise click.BadParameter(f"{name!r} is none of {', '.join(sorted(POLICIES))}", param_hint="--policies")
    found = resolve_model(model, model_cache_dir(data_dir), show_progress)
    plan = ConversationsPlan(model=ModelConfig(name=found.name, path=str(found.path)), **sizes)
    rows = run_bench(plan, names, num_rounds, show_progress)
    return Report(rows, [TableOf(_COLUMNS, rows)])
