"""A shard as the router core sees it: frames in order, faults from a seed."""

from __future__ import annotations

import dataclasses
import random

from kvloom.block_hash import block_hashes, root_hash
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason
from router.core.actions import SubmitAttempt
from router.core.events import (
    Event,
    KvChange,
    KvEventsArrived,
    KvSnapshotArrived,
    LoadReported,
    Request,
    ShardDescription,
    ShardLoad,
    ShardUp,
    StepArrived,
)
from router.core.frames import Finish, Start, Step
from tests.simulation.router_core_script import MODEL, answer_tokens, text_after

BLOCK_SIZE = 4


@dataclasses.dataclass
class Sequence:
    request: Request
    index: int
    tokens: list[int]
    max_tokens: int
    position: int
    num_chars: int
    has_started: bool = False


class SimShard:
    """Works when told to `step`; what it says is delivered later by the world, unless the stream breaks first."""

    def __init__(self, shard_id: str, rng: random.Random, *, max_batch: int, num_blocks: int) -> None:
        self.shard_id = shard_id
        self._rng = rng
        self._max_batch = max_batch
        self._num_blocks = num_blocks
        self._incarnation = 0
        self.is_up = False
        self.is_draining = False
        self.is_healthy = False
        """No new faults."""
        self.inbox: list[object] = []
        self.outbox: list[Event] = []

    def start(self) -> ShardUp:
        self._incarnation += 1
        self.is_up, self.is_draining = True, False
        self.sequences: dict[int, Sequence] = {}
        self.cache: dict[int, None] = {}
        self._event_number = 0
        self.inbox, self.outbox = [], [KvSnapshotArrived(self.shard_id, 0, [])]
        incarnation_id = f"{self.shard_id}-{self._incarnation}"
        return ShardUp(
            ShardDescription(self.shard_id, incarnation_id, MODEL, BLOCK_SIZE, self._num_blocks, self._max_batch, 96)
        )

    def stop(self) -> None:
        self.is_up = False
        self.inbox, self.outbox = [], []

    def submit(self, action: SubmitAttempt, step: Step) -> None:
        for choice in action.choices:
            assert choice.slot not in self.sequences, "a slot is submitted while it is in use"
            tokens = answer_tokens(action.request.request_id, choice.index, action.max_tokens)
            given = list(choice.output_token_ids)
            assert given == tokens[: len(given)], "a later attempt must continue behind the emitted tokens"
            assert len(given) < action.max_tokens, "nothing is left to generate"
            texts = (text_after(tokens, len(given)), text_after(tokens, len(given), is_final=True))
            assert choice.num_delivered_chars in map(len, texts), "a later attempt must continue behind emitted text"
            if self.is_draining:
                error = KvloomError(ErrorReason.ERROR_REASON_DRAINING, "draining")
                step.finishes.append(Finish(choice.slot, FinishReason.FINISH_REASON_ERROR, error=error))
                continue
            self.sequences[choice.slot] = Sequence(
                action.request, choice.index, tokens, action.max_tokens, len(given), choice.num_delivered_chars
            )

    def step(self) -> None:
        """Take in what has arrived, run one engine step, say what came of it."""
        step = Step()
        for message in self.inbox:
            if isinstance(message, SubmitAttempt):
                self.submit(message, step)
            elif message == "snapshot":
                self.outbox.append(KvSnapshotArrived(self.shard_id, self._event_number, list(self.cache)))
            else:
                assert isinstance(message, int)
                if self.sequences.pop(message, None) is not None:
                    step.finishes.append(Finish(message, FinishReason.FINISH_REASON_CANCELLED))
        self.inbox = []
        change = KvChange()
        is_ragged = self._rng.random() < 0.3
        for slot in list(self.sequences)[: self._max_batch]:
            change = self._run(slot, step, change, num_tokens=self._rng.randrange(3) if is_ragged else 1)
        if step.num_tokens and all(count == 1 for count in step.num_tokens):
            step.num_tokens = []
        if step:
            self.outbox.append(StepArrived(self.shard_id, step))
        if change.stored:
            self._event_number += 1
            if self.is_healthy or self._rng.random() > 0.1:
                self.outbox.append(KvEventsArrived(self.shard_id, self._event_number, [change]))
        if self._rng.random() < 0.5 or self.is_healthy:
            self.outbox.append(LoadReported(self.shard_id, self._load()))

    def _run(self, slot: int, step: Step, change: KvChange, num_tokens: int) -> KvChange:
        sequence = self.sequences[slot]
        if not self.is_healthy and self._rng.random() < 0.01:
            del self.sequences[slot]
            error = KvloomError(ErrorReason.ERROR_REASON_ENGINE_FAILED, "engine failed")
            step.finishes.append(Finish(slot, FinishReason.FINISH_REASON_ERROR, error=error))
            return change
        if not sequence.has_started:
            sequence.has_started = True
            change, num_cached_tokens = self._prefill(sequence, change)
            step.starts.append(Start(slot, num_cached_tokens, 0.001))
            num_tokens = max(1, num_tokens)
        end = min(sequence.position + num_tokens, len(sequence.tokens))
        is_final = end == len(sequence.tokens)
        new = sequence.tokens[sequence.position : end]
        delta = text_after(sequence.tokens, end, is_final=is_final)[sequence.num_chars :]
        if new or delta:
            step.slots.append(slot)
            step.num_tokens.append(len(new))
            step.token_ids.extend(new)
            step.deltas.append(delta)
        if sequence.request.sampling == "logprobs":
            step.logprobs.extend((slot, ("logprob", token)) for token in new)
        sequence.position = end
        sequence.num_chars += len(delta)
        # The finish may come a step later than the last token.
        if is_final and (self.is_healthy or self._rng.random() < 0.7):
            del self.sequences[slot]
            at_limit = len(sequence.tokens) == sequence.max_tokens
            reason = FinishReason.FINISH_REASON_LENGTH if at_limit else FinishReason.FINISH_REASON_STOP
            step.finishes.append(Finish(slot, reason, num_output_tokens=end))
        return change

    def _prefill(self, sequence: Sequence, change: KvChange) -> tuple[KvChange, int]:
        root = root_hash(MODEL, "", sequence.request.tenant)
        hashes = block_hashes(sequence.request.prompt_token_ids, BLOCK_SIZE, root)
        num_cached = 0
        while num_cached < len(hashes) and hashes[num_cached] in self.cache:
            num_cached += 1
        new = [block_hash for block_hash in hashes if block_hash not in self.cache]
        self.cache.update(dict.fromkeys(new))
        removed = []
        while len(self.cache) > self._num_blocks:
            removed.append(next(iter(self.cache)))
            del self.cache[removed[-1]]
        stored = [*change.stored, *new]
        gone = {*change.removed, *removed}
        return KvChange([h for h in stored if h not in gone], sorted(gone - set(stored))), num_cached * BLOCK_SIZE

    def _load(self) -> ShardLoad:
        num_waiting = sum(not sequence.has_started for sequence in self.sequences.values())
        return ShardLoad(
            num_running=len(self.sequences) - num_waiting,
            num_waiting=num_waiting,
            num_queued_prefill_tokens=num_waiting * 16,
            prefill_tokens_per_second=1000.0,
            decode_step_seconds=0.01,
            draining=self.is_draining,
        )
