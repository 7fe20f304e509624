"""Drives one RouterCore with simulated shards, clients and a safety service; everything follows from one seed."""

from __future__ import annotations

import random
from collections import Counter

from kvloom.v1.generation_pb2 import FinishReason
from router.core.actions import (
    CancelOnShard,
    CheckPrompt,
    FleetChanged,
    RequestEnded,
    ScreenAnswers,
    SendStep,
    SubmitAttempt,
    WantKvSnapshot,
)
from router.core.core import CoreConfig, RouterCore
from router.core.events import (
    ChoiceSpec,
    ClientGone,
    Event,
    Request,
    RequestArrived,
    RequestCancelled,
    SafetyDown,
    SafetyUp,
    ShardDown,
    SlotsCancelled,
    Tick,
)
from tests.simulation.router_core_client import SimClient
from tests.simulation.router_core_safety import SimSafety
from tests.simulation.router_core_script import BLOCKED_WORD, HALTED_TOKEN, MODEL
from tests.simulation.router_core_shard import SimShard


class World:
    """`run` lives through `num_rounds` rounds with faults, then lets everything come to rest and checks the end."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = random.Random(seed)
        self._config = CoreConfig(
            max_queued_requests=rng.choice([2, 8, 64]),
            max_queue_seconds=rng.choice([0.05, 1.0]),
            request_timeout_seconds=rng.choice([0.3, 10.0]),
            max_attempts=rng.choice([1, 3, 5]),
            policy=rng.choice(["ect", "ect", "round_robin", "least_requests", "least_prefill"]),
            answer_mode=rng.choice(["gate", "gate", "async", "off"]),
            safety_required=rng.random() < 0.6,
            max_held_tokens=rng.choice([6, 1000]),
        )
        self.core = RouterCore(self._config, seed)
        self._screens = (rng.random() < 0.8, rng.random() < 0.8)
        max_batch = rng.choice([1, 2, 8])
        self._shards = {
            f"shard-{i}": SimShard(f"shard-{i}", rng, max_batch=max_batch, num_blocks=rng.choice([8, 64]))
            for i in range(rng.choice([1, 2, 4]))
        }
        self._safety = SimSafety(rng)
        self._clients: dict[str, SimClient] = {}
        self._gone: list[SimClient] = []
        self._num_clients = 0
        self._num_requests = 0
        self._num_submitted: Counter[str] = Counter()
        self.ended: dict[str, RequestEnded] = {}
        self.now = 100.0

    def run(self, num_rounds: int) -> None:
        self._start_safety()
        for shard in self._shards.values():
            self._handle(shard.start())
        for _ in range(2):
            self._add_client()
        for _ in range(num_rounds):
            self._live_one_round()
        self._come_to_rest()

    def _live_one_round(self) -> None:
        rng = self._rng
        self.now += rng.choice([0.001, 0.005, 0.02])
        for _ in range(rng.choice([0, 0, 1, 1, 3])):
            self._submit_one()
        for shard in self._shards.values():
            self._disturb(shard)
            if shard.is_up and rng.random() < 0.8:
                shard.step()
                self._deliver(shard, rng.randrange(len(shard.outbox) + 1))
        self._disturb_clients()
        if self._safety.is_up:
            for event in self._safety.answer(all_now=False):
                self._handle(event)
            if rng.random() < 0.01:
                self._safety.is_up = False
                self._safety.reset()
                self._handle(SafetyDown())
        elif rng.random() < 0.3:
            self._start_safety()
        deadline = self.core.next_deadline()
        if deadline is not None and deadline <= self.now:
            self._handle(Tick())
            deadline = self.core.next_deadline()
            assert deadline is None or deadline > self.now

    def _disturb(self, shard: SimShard) -> None:
        rng = self._rng
        if not shard.is_up:
            if rng.random() < 0.2:
                self._handle(shard.start())
        elif rng.random() < 0.015:
            shard.stop()
            # A new incarnation may be there before the router has noticed the break.
            self._handle(shard.start() if rng.random() < 0.3 else ShardDown(shard.shard_id))
        elif rng.random() < 0.01:
            shard.is_draining = not shard.is_draining

    def _disturb_clients(self) -> None:
        rng = self._rng
        client = rng.choice(list(self._clients.values()))
        if client.open and rng.random() < 0.05:
            self._handle(SlotsCancelled(client.client_id, [rng.choice(list(client.open)), 10**6]))
        if client.open and rng.random() < 0.03:
            request_id = rng.choice(list(client.open.values())).request.request_id
            self._handle(RequestCancelled(request_id))
            assert not self.core.has_request(request_id)
        if rng.random() < 0.01:
            del self._clients[client.client_id]
            self._gone.append(client)
            self._handle(ClientGone(client.client_id))
            self._add_client()

    def _come_to_rest(self) -> None:
        """No more faults: everything that is open must end, and nothing may be left behind."""
        if not self._safety.is_up:
            self._start_safety()
        for shard in self._shards.values():
            shard.is_healthy, shard.is_draining = True, False
            if not shard.is_up:
                self._handle(shard.start())
        for _ in range(400):
            self.now += 0.02
            for shard in self._shards.values():
                shard.step()
                self._deliver(shard, len(shard.outbox))
            for event in self._safety.answer(all_now=True):
                self._handle(event)
            self._handle(Tick())
            if self._is_at_rest():
                break
        assert self._is_at_rest(), "something never ended"
        for client in (*self._clients.values(), *self._gone):
            for request_id, answers in client.answers.items():
                assert self._num_submitted[request_id] == 1
                ended = self.ended[request_id]
                delivered = sum(len(answer.token_ids) for answer in answers)
                assert ended.num_output_tokens == delivered, "billed tokens are delivered tokens"
        assert len(self.ended) == self._num_requests

    def _is_at_rest(self) -> bool:
        is_idle = all(not shard.sequences and not shard.outbox for shard in self._shards.values())
        return is_idle and self._safety.is_idle and self.core.is_idle

    def _add_client(self) -> None:
        self._num_clients += 1
        client = SimClient(f"client-{self._num_clients}")
        self._clients[client.client_id] = client

    def _start_safety(self) -> None:
        self._safety.is_up = True
        self._handle(SafetyUp(*self._screens))

    def _submit_one(self) -> None:
        rng = self._rng
        self._num_requests += 1
        client = rng.choice(list(self._clients.values()))
        shared = [rng.randrange(3)] * rng.randrange(40)
        request = Request(
            request_id=f"request-{self._num_requests}",
            client_id=client.client_id,
            model=MODEL if rng.random() < 0.98 else "unknown",
            prompt_token_ids=[*shared, *(rng.randrange(1000) for _ in range(rng.randrange(1, 40)))],
            prompt_text=BLOCKED_WORD if rng.random() < 0.1 else "harmless",
            choices=[ChoiceSpec(client.take_slot(), i) for i in range(rng.choice([1, 1, 1, 3]))],
            max_tokens=rng.choice([None, 1, 8, 40]),
            sampling=rng.choice([None, "logprobs"]),
            timeout_seconds=rng.choice([0.0, 0.1, 5.0]),
            tenant=rng.choice(["a", "b"]),
        )
        client.submitted(request)
        self._handle(RequestArrived(request))
        if rng.random() < 0.02 and self.core.has_request(request.request_id):
            self._submit_duplicate(client, request)

    def _submit_duplicate(self, client: SimClient, request: Request) -> None:
        """A name that is taken: refused, and the first request goes on undisturbed."""
        slot = client.take_slot()
        actions = self.core.handle(
            RequestArrived(
                Request(request.request_id, client.client_id, MODEL, [1], "", [ChoiceSpec(slot, 0)]),
            ),
            self.now,
        )
        finishes = [f.slot for a in actions if isinstance(a, SendStep) for f in a.step.finishes]
        assert finishes == [slot]
        self.core.check_integrity()

    def _deliver(self, shard: SimShard, count: int) -> None:
        events, shard.outbox = shard.outbox[:count], shard.outbox[count:]
        for event in events:
            self._handle(event)

    def _handle(self, event: Event) -> None:
        actions = self.core.handle(event, self.now)
        self.core.check_integrity()
        told = Counter(action.client_id for action in actions if isinstance(action, SendStep))
        assert all(count == 1 for count in told.values()), "one SendStep per client and event"
        assert sum(isinstance(action, ScreenAnswers) for action in actions) <= 1
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: object) -> None:
        match action:
            case SubmitAttempt():
                self._shards[action.shard_id].inbox.append(action)
            case CancelOnShard():
                self._shards[action.shard_id].inbox.extend(action.slots)
            case WantKvSnapshot():
                self._shards[action.shard_id].inbox.append("snapshot")
            case SendStep():
                self._clients[action.client_id].receive(action.step)
                self._check_shown(self._clients[action.client_id])
            case CheckPrompt():
                self._safety.check(action)
            case ScreenAnswers():
                self._safety.screen(action)
            case RequestEnded():
                assert action.request_id not in self.ended, "a request ended twice"
                self.ended[action.request_id] = action
                self._num_submitted[action.request_id] += 1
            case FleetChanged():
                assert action == self.core.fleet
            case _:
                raise AssertionError(f"unknown action {action}")

    def _check_shown(self, client: SimClient) -> None:
        """With the safety service required, nothing that it forbids is ever shown."""
        if not self._config.safety_required:
            return
        screens_prompts, screens_answers = self._screens
        for answers in client.answers.values():
            for answer in answers:
                if screens_prompts and BLOCKED_WORD in answer.request.prompt_text:
                    assert not answer.text
                    assert not answer.token_ids
                if screens_answers and self._config.answer_mode == "gate":
                    assert f" {HALTED_TOKEN} " not in f" {answer.text}"
                if answer.reason == FinishReason.FINISH_REASON_CANCELLED:
                    assert answer.spec.slot not in client.open
