"""A damaged layer is found by shadow traffic, with an engine that computes."""

from __future__ import annotations

from pathlib import Path

from kvloom.v1.generation_pb2 import SamplingParams
from kvloom_common.config import ShardConfig, TorchConfig
from kvloom_common.models.likelihood_gap import gap_interval, lower_bound_at_any_time
from lab.damaged_model import damage
from shard_server.engines.torch_engine.engine import TorchEngine
from tests.fakes.shadow_world import CANDIDATE, MODEL, shadow_world
from tests.fakes.tiny_llama import write_tiny_llama
from tests.fakes.tiny_tokenizer import model_tokenizer
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

NUM_ANSWERS = 24
CONFIG = ShardConfig(num_blocks=64, max_batch=8, max_prefill_tokens_per_step=64, torch=TorchConfig(num_threads=1))


async def test_a_damaged_layer_is_found_and_a_sound_one_is_not(router_redis_url: str, tmp_path: Path) -> None:
    """Sound weights must not be taken for worse, not even by rounding: log-probabilities of decode steps are compared
    with those of a prefill. Then the candidate's weights are replaced by damaged ones."""
    sound = write_tiny_llama(tmp_path / "sound")
    assert damage(sound, tmp_path / "damaged", layer=1, noise=1.0)
    for weights, is_worse in ((sound, False), (tmp_path / "damaged", True)):
        async with shadow_world(router_redis_url, model_tokenizer()) as world:
            await world.add_model(MODEL, TorchEngine(sound, MODEL, CONFIG))
            await world.add_model(CANDIDATE, TorchEngine(weights, CANDIDATE, CONFIG))
            await world.start_router()
            link = await world.connect()
            await world.wait_for_shards(link, 2)
            world.shadow(max_in_flight=4)
            for number in range(NUM_ANSWERS):
                await world.ask(link, [3 + number, 7, 9], 16, model=MODEL, sampling=SamplingParams(seed=number))
            await eventually(lambda world=world: world.sums.num_answers == NUM_ANSWERS, "the scores")
            interval = gap_interval(world.sums)
            assert interval is not None
            if is_worse:
                assert lower_bound_at_any_time(world.sums) > 0.01
            else:
                assert abs(interval.low) < 1e-3 > abs(interval.high)
