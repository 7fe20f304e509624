"""What remembering placements costs the router: `python -m tests.decision_bench`.

CPU time of a request's way through the real core (arrival, one step, end) without a decision log, outside its sample,
remembered, and remembered with a file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from kvloom.v1.generation_pb2 import FINISH_REASON_STOP
from router.core.actions import PlacementDecided, RequestEnded, SubmitAttempt
from router.core.core import CoreConfig, RouterCore
from router.core.events import (
    ChoiceSpec,
    KvSnapshotArrived,
    Request,
    RequestArrived,
    SafetyUp,
    ShardDescription,
    ShardUp,
    StepArrived,
)
from router.core.frames import Finish, Start, Step
from router.decisions.journal import DecisionJournal
from router.decisions.log import DecisionLog

BLOCK_SIZE = 16
REPEATS = 5


class CountingSink:
    def __init__(self) -> None:
        self.num_bytes = 0

    def put(self, header: bytes, line: bytes) -> bool:
        self.num_bytes += len(header) + len(line)
        return True


def new_core(num_shards: int, sample_share: float) -> RouterCore:
    core = RouterCore(CoreConfig(decision_sample_share=sample_share), seed=1)
    core.handle(SafetyUp(False, False), 0.0)
    for number in range(num_shards):
        shard = ShardDescription(f"shard-{number}", "1", "m", BLOCK_SIZE, 8192, 64, 131_072)
        core.handle(ShardUp(shard), 0.0)
        core.handle(KvSnapshotArrived(shard.shard_id, 0, ()), 0.0)
    return core


def serve(core: RouterCore, log: DecisionLog | None, requests: Sequence[Request]) -> None:
    for number, request in enumerate(requests):
        now = number * 0.01
        shard_id, slot = "", 0
        for action in core.handle(RequestArrived(request), now):
            if isinstance(action, PlacementDecided) and log is not None:
                log.placement_decided(action)
            elif isinstance(action, SubmitAttempt):
                shard_id, slot = action.shard_id, action.choices[0].slot
        step = Step([slot], [], [7], ["x"], starts=[Start(slot, 0)], finishes=[Finish(slot, FINISH_REASON_STOP)])
        for action in core.handle(StepArrived(shard_id, step), now + 0.005):
            if isinstance(action, RequestEnded) and log is not None:
                log.request_ended(action)


def measure(num_shards: int, num_requests: int, num_prompt_tokens: int) -> None:
    prompts = [[i * 7919 + n for n in range(num_prompt_tokens)] for i in range(num_requests)]
    requests = [
        Request(f"request-{i}", "c", "m", prompt, "", [ChoiceSpec(1, 0)], max_tokens=8)
        for i, prompt in enumerate(prompts)
    ]
    base = 0.0
    for name, share in (("no log", 0.0), ("outside the sample", 1e-9), ("remembered", 1.0), ("with a file", 1.0)):
        seconds = float("inf")
        for _ in range(REPEATS):
            core = new_core(num_shards, share)
            sink = CountingSink()
            journal = None
            if name == "with a file":
                journal = DecisionJournal(sink, lambda _: None, lambda core=core: core.shards, policy="", router_id="")
            log = DecisionLog(4096, journal) if share else None
            started = time.process_time()
            serve(core, log, requests)
            seconds = min(seconds, time.process_time() - started)
        microseconds = seconds / num_requests * 1e6
        base = base or microseconds
        size = f", {sink.num_bytes / num_requests:.0f} bytes a line" if sink.num_bytes else ""
        more = microseconds - base
        print(f"{num_shards:4} shards, {name:18}: {microseconds:7.1f} µs a request ({more:+.1f}){size}")  # noqa: T201


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    arguments = parser.parse_args()
    for count in (2, 8, 64):
        measure(count, arguments.requests, arguments.prompt_tokens)
