"""Conversations of a tenant with a guaranteed share of the KV blocks, while another tenant floods the engine."""

from __future__ import annotations

from kvloom_common.config import ShardConfig, SimConfig
from kvloom_common.kv_share import KvShare
from kvloom_common.text.block_hash import root_hash
from shard_server.engines.base import EngineRequest
from shard_server.engines.sim_engine import SimEngine
from tests.conformance.engine_driver import EngineDriver, prompt_of, request_of

NUM_CONVERSATIONS = 4
NUM_TURNS = 4
NUM_FLOOD_REQUESTS = 16
"""In each turn, of 20 blocks each; the engine has 256."""
SHARE = KvShare(owner=1, percent=50)


async def hit_rate(*, has_flood: bool, share: KvShare | None) -> float:
    """The share of the conversations' prompt tokens that were cached, from their second turns on."""
    sim = SimConfig(step_ms=0, prefill_tokens_per_second=1e9)
    config = ShardConfig(engine="sim", num_blocks=256, sim=sim)
    engine = SimEngine("model", config, vocab_size=49152, eos_token_ids=frozenset({2}))
    await engine.start()
    driver = EngineDriver(engine)
    histories: list[list[int]] = [[] for _ in range(NUM_CONVERSATIONS)]
    num_tokens = num_cached = 0
    for turn in range(NUM_TURNS):
        flood = flood_of(turn) if has_flood else []
        for request in flood:
            engine.submit(request)
        await driver.step_until(lambda flood=flood: all(one.request_id in driver.ends for one in flood[::2]))
        questions = [
            request_of(
                f"own-{turn}-{i}",
                [*history, *prompt_of(100 * turn + i, 64)],
                16,
                kv_share=share,
                root_hash=root_hash("model", cache_salt="own"),
            )
            for i, history in enumerate(histories)
        ]
        answers = await driver.run(*questions)
        await driver.step_until(lambda flood=flood: all(one.request_id in driver.ends for one in flood))
        histories = [[*asked.prompt_token_ids, *answer] for asked, answer in zip(questions, answers, strict=True)]
        if turn:
            num_tokens += sum(len(question.prompt_token_ids) for question in questions)
            num_cached += sum(driver.starts[question.request_id].num_cached_tokens for question in questions)
    if share is not None:
        assert driver.load.kv_shares is not None
        assert driver.load.kv_shares.num_last_resorts == 0
    await engine.close()
    return num_cached / num_tokens


def flood_of(turn: int) -> list[EngineRequest]:
    root = root_hash("model", cache_salt="flood")
    numbers = range(1000 + NUM_FLOOD_REQUESTS * turn, 1000 + NUM_FLOOD_REQUESTS * (turn + 1))
    return [request_of(f"flood-{number}", prompt_of(number, 320), 8, root_hash=root) for number in numbers]


async def test_a_flood_costs_a_guaranteed_tenant_less_than_a_twentieth_of_its_hits() -> None:
    """The promise of docs/operate/kv-shares.md; without the share, the same flood leaves nothing."""
    alone = await hit_rate(has_flood=False, share=None)
    assert await hit_rate(has_flood=True, share=None) < 0.5 * alone
    assert await hit_rate(has_flood=True, share=SHARE) > 0.95 * alone
