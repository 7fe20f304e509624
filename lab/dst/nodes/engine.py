"""The engine of a shard: continuous batching of sequences whose answers are known beforehand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Tokens

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason
from lab.dst.environment import Environment
from lab.dst.nodes.block_cache import BlockCache, prompt_hashes
from lab.dst.nodes.shard_stream import ShardStream
from lab.dst.scenario import ShardShape
from lab.dst.script import ScriptedSampling, text_shown
from router.core.events import KvChange, Request, ShardLoad
from router.core.frames import Finish, Start, Step
from tools.stable_hash import stable_hash


@dataclasses.dataclass(slots=True)
class SimulatedSequence:
    request: Request
    tokens: Tokens[int]
    """The whole answer, including the tokens that the request brought along."""
    max_tokens: int
    position: int
    num_chars: int
    has_started: bool = False
    handoff: bytes = b""
    """The hand-off in its finish, so that another shard can fetch its KV."""


class SimulatedEngine:
    """`sequences` are keyed by (stream, slot), in the order of their arrival. The first `max_batch` of them run, as far
    as there are blocks for them: one that outgrows what is left takes the blocks of the latest."""

    def __init__(
        self,
        env: Environment,
        shape: ShardShape,
        cache: BlockCache,
        on_stored: Callable[[Request, list[KvChange]], None],
        on_handoff: Callable[[SimulatedSequence], None],
    ) -> None:
        """`on_stored` is called when the blocks of a request have entered the cache, `on_handoff` when a sequence ends
        whose KV another shard may fetch."""
        self._env = env
        self._shape = shape
        self._cache = cache
        self._on_stored = on_stored
        self._on_handoff = on_handoff
        self.failure_share = 0.0
        """How many of its sequences fail, apart from those that fail by chance."""
        self.sequences: dict[tuple[ShardStream, int], SimulatedSequence] = {}

    def step(self) -> list[KvChange]:
        """Run one iteration. Tokens and finishes are added to the pending step of each stream."""
        changes: list[KvChange] = []
        rng = self._env.rng
        is_ragged = rng.random() < 0.3
        for stream, slot in self._running():
            changes += self._run(stream, slot, num_tokens=rng.randrange(4) if is_ragged else 1)
        return changes

    def load(self, stream: ShardStream, *, draining: bool) -> ShardLoad:
        """The load as reported to the router of `stream`, including that router's own share."""
        counts = [0] * 8
        for (owner, _), sequence in self.sequences.items():
            num_prompt_tokens = len(sequence.request.prompt_token_ids)
            own = 4 if owner is stream else None
            kinds = (
                ((0, 1), (3, num_prompt_tokens + sequence.position))
                if sequence.has_started
                else (
                    (1, 1),
                    (2, num_prompt_tokens),
                )
            )
            for kind, amount in kinds:
                counts[kind] += amount
                if own is not None:
                    counts[own + kind] += amount
        return ShardLoad(
            num_running=counts[0],
            num_waiting=counts[1],
            num_queued_prefill_tokens=counts[2],
            num_decode_context_tokens=counts[3],
            num_available_blocks=self._num_available_blocks(),
            prefill_tokens_per_second=2000.0,
            decode_step_seconds=self._env.scenario.step_seconds,
            draining=draining,
            num_own_running=counts[4],
            num_own_waiting=counts[5],
            num_own_queued_prefill_tokens=counts[6],
            num_own_decode_context_tokens=counts[7],
        )

    def _running(self) -> list[tuple[ShardStream, int]]:
        """The sequences that have places and blocks now."""
        keys = list(self.sequences)[: self._shape.max_batch]
        if not self._shape.has_scarce_blocks:
            return keys
        num_left = self._shape.num_blocks
        for count, key in enumerate(keys):
            num_left -= self._num_blocks(self.sequences[key])
            if num_left < 0:
                return keys[: max(1, count)]
        return keys

    def _num_available_blocks(self) -> int:
        if not self._shape.has_scarce_blocks:
            return self._shape.num_blocks
        held = sum(self._num_blocks(self.sequences[key]) for key in self._running())
        return max(0, self._shape.num_blocks - held)

    def _num_blocks(self, sequence: SimulatedSequence) -> int:
        num_tokens = len(sequence.request.prompt_token_ids) + sequence.position + 1
        return -(-num_tokens // self._shape.block_size)

    def end(self, stream: ShardStream, slot: int, sequence: SimulatedSequence) -> None:
        """Send the remaining text of a complete sequence, and its finish."""
        text = text_shown(sequence.tokens, len(sequence.tokens), is_final=True)
        if len(text) > sequence.num_chars:
            _add_entry(stream.parts, slot, (), text[sequence.num_chars :])
        at_limit = len(sequence.tokens) >= sequence.max_tokens
        reason = FinishReason.FINISH_REASON_LENGTH if at_limit else FinishReason.FINISH_REASON_STOP
        if sequence.handoff:
            self._on_handoff(sequence)
        finish = Finish(slot, reason, num_output_tokens=len(sequence.tokens), handoff=sequence.handoff)
        stream.parts.finishes.append(finish)

    def _is_to_fail(self, sequence: SimulatedSequence) -> bool:
        """It depends on the request, so that the failures of one engine change nothing for others."""
        if not self.failure_share or self._env.is_calm:
            return False
        return stable_hash(sequence.request.request_id, "fails") % 1000 < 1000 * self.failure_share

    def _run(self, stream: ShardStream, slot: int, num_tokens: int) -> list[KvChange]:
        sequence = self.sequences[stream, slot]
        if self._env.chance("engine_failure") or self._is_to_fail(sequence):
            del self.sequences[stream, slot]
            error = KvloomError(ErrorReason.ERROR_REASON_ENGINE_FAILED, "the engine failed")
            stream.parts.finishes.append(Finish(slot, FinishReason.FINISH_REASON_ERROR, error=error))
            return []
        changes: list[KvChange] = []
        if not sequence.has_started:
            sequence.has_started = True
            hashes = prompt_hashes(sequence.request, self._shape.block_size)
            num_cached_tokens = self._cache.count_overlap(hashes) * self._shape.block_size
            share = sequence.request.kv_share
            changes = self._cache.store(hashes[: self._shape.num_blocks], share, self._env.timeline.now)
            self._on_stored(sequence.request, changes)
            stream.parts.starts.append(Start(slot, num_cached_tokens, 0.001))
            num_tokens = max(1, num_tokens)
        begin = sequence.position
        end = min(begin + num_tokens, len(sequence.tokens))
        is_final = end == len(sequence.tokens)
        delta = text_shown(sequence.tokens, end, is_final=is_final)[sequence.num_chars :]
        new = sequence.tokens[begin:end]
        if new or delta:
            _add_entry(stream.parts, slot, new, delta)
        sampling = sequence.request.sampling
        if isinstance(sampling, ScriptedSampling) and sampling.wants_logprobs:
            stream.parts.logprobs.extend((slot, ("logprob", token)) for token in new)
        sequence.position = end
        sequence.num_chars += len(delta)
        if is_final and not self._env.chance("late_finish"):
            del self.sequences[stream, slot]
            self.end(stream, slot, sequence)
        return changes


def _add_entry(parts: Step, slot: int, token_ids: Tokens[int], delta: str) -> None:
    """Add an entry for a slot. A frame has one entry per slot: a second one is merged into the first, as in steps that
    wait for the writer."""
    if slot in parts.slots:
        i = parts.slots.index(slot)
        position = sum(parts.num_tokens[: i + 1])
        parts.token_ids[position:position] = token_ids
        parts.num_tokens[i] += len(token_ids)
        parts.deltas[i] += delta
        return
    parts.slots.append(slot)
    parts.num_tokens.append(len(token_ids))
    parts.token_ids.extend(token_ids)
    parts.deltas.append(delta)
