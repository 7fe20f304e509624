"""The bench of KV shares, on the simulated engine."""

from __future__ import annotations

import pytest

from kvloom_common.config import ShardConfig, SimConfig
from lab.bench.kv_shares import ConversationTurns, Hits, KvSharesPlan, play
from shard_server.engines.sim_engine import SimEngine

PLAN = KvSharesPlan(num_turns=4)


async def hits(*, has_flood: bool, has_share: bool) -> Hits:
    sim = SimConfig(step_ms=0, prefill_tokens_per_second=1e9)
    config = ShardConfig(engine="sim", num_blocks=PLAN.num_blocks, sim=sim)
    engine = SimEngine("model", config, vocab_size=49152, eos_token_ids=frozenset({2}))
    return await play(engine, PLAN, has_flood=has_flood, has_share=has_share)


async def test_a_flood_costs_a_guaranteed_tenant_less_than_a_twentieth_of_its_hits() -> None:
    """The promise of docs/operate/kv-shares.md; without the share, the same flood leaves nothing."""
    alone = await hits(has_flood=False, has_share=False)
    flooded = await hits(has_flood=True, has_share=False)
    guaranteed = await hits(has_flood=True, has_share=True)
    assert flooded.rate < 0.5 * alone.rate
    assert guaranteed.rate > 0.95 * alone.rate
    assert guaranteed.num_last_resorts == 0
    assert alone.num_prompt_tokens == guaranteed.num_prompt_tokens


def test_first_turns_do_not_count_as_misses() -> None:
    """Nothing cached can answer them, with a share or without; a plot of all turns shows them."""
    hits = Hits(
        [ConversationTurns(100, 0), ConversationTurns(200, 50), ConversationTurns(300, 200)], num_last_resorts=0
    )
    assert (hits.num_prompt_tokens, hits.num_cached_tokens, hits.rate) == (500, 250, 0.5)
    assert [turn.rate for turn in hits.turns] == pytest.approx([0.0, 0.25, 2 / 3])
