"""The steps before the first request: they touch memory, load what a device needs, and measure how fast steps are."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shard_server.engines.torch_engine.model_runner import Runner, ScheduledSequence
from shard_server.engines.torch_engine.sampling.device_draws import DeviceDraws
from shard_server.engines.torch_engine.sampling.sampler import all_kinds_of_rows, draw_in_all_ways
from shard_server.engines.torch_engine.scheduler import MIN_PREFILL_TOKENS_PER_STEP, Scheduler
from shard_server.engines.torch_engine.speed import StepSpeed

_MAX_WARM_UPS = 6
_WARM_UP_SECONDS = 0.25
"""A warm-up takes no more tokens than this: on a slow CPU those of a step would take a second."""
_WARM_SHARE = 1.5
"""A step with at most this many times the tokens of the previous one counts as warm."""


def warm_up(
    runner: Runner,
    scheduler: Scheduler,
    num_max_tokens: int,
    drawn_tokens: torch.Tensor | None,
    clock: Callable[[], float],
) -> StepSpeed:
    """Prefill tokens as a step will, at most `num_max_tokens`, decode one, and draw behind a cached prefix; returns the
    speeds, which routers plan with.

    Otherwise the first request would pay for first touches of memory. `drawn_tokens`: those of the runner, if steps
    overlap.
    """
    block_size = scheduler.pool.block_size

    def seconds_of(num_past: int, num_new: int) -> float:
        block_table = range(-(-(num_past + num_new) // block_size))
        begin = clock()
        logits = runner.run([ScheduledSequence([0] * num_new, num_past, block_table, wants_logits=True)])
        logits[0, 0].item()  # a device has returned before it has computed
        return clock() - begin

    speed = StepSpeed()
    num_warm_tokens = 0
    num_tokens = min(MIN_PREFILL_TOKENS_PER_STEP, num_max_tokens)
    for _ in range(_MAX_WARM_UPS):
        speed = StepSpeed()
        speed.add(num_tokens, seconds_of(0, num_tokens), num_decoding=0)
        speed.add(0, seconds_of(num_tokens, 1), num_decoding=1)
        if num_tokens <= _WARM_SHARE * num_warm_tokens:
            break
        num_warm_tokens = num_tokens
        tokens_per_second = speed.prefill_tokens_per_second
        budget = min(scheduler.prefill_budget(tokens_per_second), int(tokens_per_second * _WARM_UP_SECONDS))
        num_tokens = min(max(num_tokens, budget), num_max_tokens)
    # What a device loads at the first use of an operation, no request shall wait for: behind a cached prefix, too.
    num_new = min(block_size, num_max_tokens - block_size)
    if num_new > 0:
        logits = runner.run([ScheduledSequence([0] * num_new, block_size, range(2), wants_logits=True)])
        draw_in_all_ways(logits)
        if drawn_tokens is not None:
            for row in all_kinds_of_rows(logits.shape[1]):
                DeviceDraws(logits, [row], drawn_tokens).read()
    return speed
