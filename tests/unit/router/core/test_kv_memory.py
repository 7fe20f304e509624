"""How long KV blocks are waited for, what decoding beside others costs, and what the placement makes of it."""

from __future__ import annotations

import itertools
import random

import pytest

from router.core.actions import SubmitAttempt
from router.core.dispatch.prefix_copies import COPY_NAME, MIN_COPIED_TOKENS, is_worthwhile
from router.core.events import LoadReported, ShardLoad, Tick
from router.core.load.decode_speed import DecodeSpeed, shared_tokens
from router.core.load.kv_memory import num_common, pressure_seconds, wait_seconds
from router.core.load.load_view import LoadView
from router.core.load.speed_model import SpeedModel
from tests.fakes.core_rig import CoreRig, has, only

BLOCK = 512


def test_a_wait_for_blocks_is_that_of_the_sequences_that_have_to_end() -> None:
    """It was the share of all blocks that was missing, of which a shared prefix is never freed: 1.2 s instead of 28."""
    assert wait_seconds(0, 12, 6, 30.0) == 0.0
    assert wait_seconds(10, 12, 6, 30.0) == pytest.approx(30.0 / 6)
    assert wait_seconds(30, 12, 6, 30.0) == pytest.approx(30.0 * (1 / 6 + 1 / 5 + 1 / 4))
    drawn = random.Random(1)
    ends = [sorted(drawn.expovariate(1 / 30.0) for _ in range(6))[2] for _ in range(20_000)]
    assert wait_seconds(36, 12, 6, 30.0) == pytest.approx(sum(ends) / len(ends), rel=0.03)
    waits = [wait_seconds(number, 12, 200, 30.0) for number in range(0, 5000, 7)]
    assert all(one <= other for one, other in itertools.pairwise(waits))


def test_memory_is_dear_only_where_it_is_nearly_used_up() -> None:
    """A constant price of blocks would turn requests away from what is cached on a shard with room."""
    prices = [pressure_seconds(10, free, 10.0, 20, 30.0) for free in (2000, 400, 100, 20, 0)]
    assert prices[0] < 1e-6
    assert prices == sorted(prices)
    assert prices[-1] == pytest.approx(30.0 / 20)


def test_the_cost_of_context_is_learned_from_reports() -> None:
    """A sequence of 100,000 tokens makes every step of its batch longer, which no prefill shows."""
    speed = DecodeSpeed()
    assert speed.step_seconds(100_000) == 0.0
    for number in range(200):
        num_tokens = 10_000 * (1 + number % 40)
        speed.observe(num_tokens, 0.008 + 5e-8 * num_tokens)
    assert speed.base_seconds == pytest.approx(0.008, rel=0.05)
    assert speed.seconds_per_token == pytest.approx(5e-8, rel=0.05)
    assert speed.used_slack(460_000, 1.0, 0.1) == pytest.approx(0.25, rel=0.05)
    assert speed.used_slack(460_000, 2.0, 0.1) > 0.5
    assert speed.used_slack(2_000_000, 1.0, 0.1) == 1.0
    assert speed.used_slack(1, 1.0, 0.005) == 1.0
    assert speed.learned_factor(1.0, 100_000, 0.026) > 1.0
    assert shared_tokens(1000, 1000) == 500


def test_prefill_takes_its_share_of_the_time_between_tokens() -> None:
    """Context that leaves half of the objective free on a shard which only decodes uses all of it up on one that
    prefills for half of the time."""

    def delay(prefill_seconds: float, tpot_seconds: float) -> float:
        view = LoadView("m", 1000, SpeedModel(), DecodeSpeed())
        for num_tokens in range(10_000, 400_000, 10_000):
            view.decode_speed.observe(num_tokens, 0.001 + 1e-7 * num_tokens)
        view.report = ShardLoad(num_running=4, num_decode_context_tokens=400_000)
        view.busy.add(prefill_seconds, 10.0)
        return view.decode_delay_seconds(10_000, 100, 10.0, tpot_seconds)

    assert delay(30.0, 0.2) == pytest.approx(delay(0.0, 0.1))
    assert delay(30.0, 0.1) == pytest.approx(2 * delay(0.0, 0.1), rel=0.3)


def test_common_beginnings_are_counted() -> None:
    """What running sequences hold needs no room."""
    assert num_common([1, 2, 3], [1, 2, 4]) == 2
    assert num_common([1, 2, 3], [7]) == 0
    assert num_common([1, 2, 3], [1, 2, 3, 4], at_least=1) == 3
    assert num_common([], [1]) == 0


def rig_of(**shards: int) -> CoreRig:
    rig = CoreRig(policy="ect", prefill_chunks=None)
    for shard_id, num_blocks in shards.items():
        rig.add_shard(
            shard_id, block_size=BLOCK, num_blocks=num_blocks, max_batch=16, max_model_len=200_000, reserves_output=True
        )
    return rig


def report(rig: CoreRig, shard_id: str, num_available: int, num_running: int, num_tokens: int) -> None:
    load = ShardLoad(
        num_running=num_running,
        num_own_running=num_running,
        num_available_blocks=num_available,
        num_decode_context_tokens=num_tokens,
        num_own_decode_context_tokens=num_tokens,
        decode_step_seconds=0.008 + 5e-8 * num_tokens,
    )
    rig.handle(LoadReported(shard_id, load))


def test_a_request_waits_in_the_router_for_blocks_and_smaller_ones_pass_it() -> None:
    """In the engine's queue it would make all that come later wait, and could not go elsewhere."""
    rig = rig_of(s0=20)
    rig.submit("first", slots=(1,), prompt_token_ids=[1] * BLOCK * 4, max_tokens=4 * BLOCK)
    rig.start("s0", 1)
    report(rig, "s0", 12, 1, 4 * BLOCK)
    assert not has(
        rig.submit("large", slots=(2,), prompt_token_ids=[2] * BLOCK * 6, max_tokens=8 * BLOCK), SubmitAttempt
    )
    small = rig.submit("small", slots=(3,), prompt_token_ids=[3] * BLOCK * 2, max_tokens=BLOCK)
    assert only(small, SubmitAttempt).request.request_id == "small"
    rig.now += 6.0  # from now on the large one is passed no more
    rig.handle(Tick())
    assert not has(rig.submit("late", slots=(4,), prompt_token_ids=[4] * BLOCK, max_tokens=BLOCK), SubmitAttempt)
    deadline = rig.core.next_deadline()
    assert deadline is not None
    assert deadline >= rig.now + 0.5, "only an end or a report frees blocks: looking again every millisecond is in vain"


def test_no_request_waits_for_blocks_where_nothing_runs() -> None:
    """A shard whose blocks seem to be used by nobody must not make a request wait for ever."""
    rig = rig_of(s0=20)
    report(rig, "s0", 0, 0, 0)
    assert has(rig.submit("r", prompt_token_ids=[1] * BLOCK * 4, max_tokens=BLOCK), SubmitAttempt)


def test_a_copy_is_made_where_a_prefix_is_in_demand_and_a_shard_is_idle() -> None:
    """Each request of a prefix went to the one shard that had it until it was full, and the next one then computed the
    whole prefix elsewhere while its client waited."""
    rig = rig_of(s0=400, s1=400)
    prompt = [1] * BLOCK * 180
    copies: list[str] = []
    for number in range(12):
        actions = rig.submit(f"r{number}", slots=(number,), prompt_token_ids=[*prompt, number], max_tokens=1000)
        for action in actions:
            if isinstance(action, SubmitAttempt) and action.request.request_id.endswith(f"~{COPY_NAME}"):
                copies.append(action.shard_id)
                assert len(action.request.prompt_token_ids) == len(prompt) >= MIN_COPIED_TOKENS
            elif isinstance(action, SubmitAttempt) and action.attempt_id == 1:
                rig.start(action.shard_id, action.choices[0].slot)
                running = number + 1
                report(rig, action.shard_id, 400 - 180 - 3 * running, running, running * len(prompt))
    assert copies
    assert len(set(copies)) == 1


def test_a_copy_must_be_worth_its_prefill_and_what_it_evicts() -> None:
    """Conversations are nobody else's: copies of them evicted what others needed (WEKA's sessions: TTFT +50%)."""
    assert is_worthwhile(2.0, 3, 30.0, 9.0, 0.5, 0.0)
    assert not is_worthwhile(2.0, 0, 30.0, 9.0, 0.5, 0.0)
    assert not is_worthwhile(0.01, 3, 30.0, 9.0, 0.9, 0.0)
    assert not is_worthwhile(2.0, 3, 30.0, 9.0, 0.5, 20.0)
