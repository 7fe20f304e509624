"""The simulated engine: the `Engine` protocol with a timing model and real block accounting, and no weights.

For tests, demos and benchmarks of the fabric. A step decodes one token of every running sequence and prefills up to
`max_prefill_tokens_per_step` prompt tokens; it lasts `step_ms` (if it decodes) + prefilled tokens /
`prefill_tokens_per_second`. With `decode_every` = N each sequence decodes in every Nth step only. Text is a function of
(prompt, seed, position, adapter): see `expected_token_id`; embeddings are a function of the prompt. Temperature and the
other sampling parameters change nothing, except that the next word that is no stop token replaces one before
`min_tokens`. A sequence whose adapter is not loaded waits for `adapter_load_ms`.

The engine advances when its consumer requests the next step, on the event loop and without a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Final

from kvloom_common.config import ShardConfig
from shard_server.engines.adapters.host import AdapterHost
from shard_server.engines.base import (
    AdapterError,
    Capability,
    EngineError,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    LoadShare,
    SequenceEnd,
    SequenceFinishReason,
    SequenceStart,
    StepOutput,
)
from shard_server.engines.eviction_order import has_others_outside, preempted_for
from shard_server.engines.prefill_order import PrefillOrder
from shard_server.engines.queue_order import MAX_PATIENCE_SECONDS, admission_rank, class_order, count_cached_blocks
from shard_server.engines.sim_blocks import SimBlockPool
from shard_server.engines.sim_sequence import SimSequence, handoff_of
from shard_server.engines.sim_tokens import (
    EMBEDDING_SIZE,
    WORD_TOKEN_IDS,
    SimAdapterReader,
    expected_token_id,
    sim_embedding,
    stamp_of,
)

__all__ = ["SimEngine", "expected_token_id"]

DEFAULT_NUM_BLOCKS: Final = 8192
DEFAULT_MAX_MODEL_LEN: Final = 8192
_CAPABILITIES: Final = frozenset(
    {
        Capability.GENERATE,
        Capability.EMBED,
        Capability.RERANK,
        Capability.SCORE,
        Capability.LOGPROBS,
        Capability.SEEDED_RESUME,
        Capability.BATCH_INVARIANT,
        Capability.PREFIX_CACHING,
        Capability.KV_SHARES,
        Capability.FAIR_PREFILL,
        Capability.MIN_TOKENS,
        Capability.PROMPT_LOGPROBS,
        Capability.ADAPTERS,
        Capability.KV_HANDOFF,
        Capability.HANDOFF_LOGPROBS,
    }
)
_SCRIPTED: Final = frozenset(
    {Capability.GENERATE, Capability.PREFIX_CACHING, Capability.KV_SHARES, Capability.FAIR_PREFILL}
)
"""The capabilities of an engine whose tokens do not follow from the prompt."""
_IMAGE_TOKENS: Final = (28, 256)
MAX_LAG_SECONDS: Final = 1.0
"""Steps catch up when they are late, so that the pace has no drift; when they are later than this, the clock is
reset."""


class SimEngine:
    """See the module. `max_model_len` is the model's window, used when the config does not set one. `stamps` are tokens
    to emit by the clock (see sim_stamps), and every output begins with the tokens of `opening`. `clock` says when
    requests come and steps end."""

    def __init__(
        self,
        model_name: str,
        config: ShardConfig,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        max_model_len: int = DEFAULT_MAX_MODEL_LEN,
        *,
        stamps: Sequence[int] = (),
        opening: Sequence[int] = (),
        max_loaded_adapters: int = 8,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if vocab_size <= max(WORD_TOKEN_IDS) or eos_token_ids.intersection(WORD_TOKEN_IDS):
            raise EngineError(f"the simulated engine's words are not plain tokens of {model_name}'s vocabulary")
        num_blocks = config.num_blocks or DEFAULT_NUM_BLOCKS
        step_seconds = config.sim.step_ms / 1000
        self._info = EngineInfo(
            variant="sim",
            engine="sim",
            model=model_name,
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_batch=config.max_batch,
            max_model_len=min(config.max_model_len or max_model_len, num_blocks * config.block_size),
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            capabilities=_SCRIPTED if stamps or opening else _capabilities(config, max_loaded_adapters),
            image_tokens=_IMAGE_TOKENS if config.sim.sees_images else None,
            embedding_size=0 if stamps or opening else EMBEDDING_SIZE,
            yield_tokens=config.max_prefill_tokens_per_step,
            prefill_tokens_per_second=config.sim.prefill_tokens_per_second,
            decode_step_seconds=step_seconds,
        )
        self._step_seconds = step_seconds
        self._decode_every = config.sim.decode_every
        self._step_number = 0
        self._prefill_tokens_per_second = config.sim.prefill_tokens_per_second
        self._max_prefill_tokens = config.max_prefill_tokens_per_step
        self._queue_order = config.queue_order
        self._answer_seed = config.sim.answer_seed
        self._stamps = stamps
        self._clock = clock
        self._opening = opening
        self._pool = SimBlockPool(num_blocks)
        self.adapters = AdapterHost(SimAdapterReader(config.sim.adapter_load_ms / 1000), max_loaded_adapters)
        self._preparing: dict[str, tuple[SimSequence, Future[str]]] = {}
        """The sequences whose adapters are not loaded yet."""
        self._failed: list[SequenceEnd] = []
        """The ends of those whose adapters could not be loaded."""
        self._live: dict[str, SimSequence] = {}
        self._waiting: deque[SimSequence] = deque()
        self._running: list[SimSequence] = []
        self._cancelled: set[str] = set()
        self._num_submitted = 0
        self._num_preemptions = 0
        self._order = PrefillOrder(config.max_prefill_tokens_per_step)
        self._step_ends_at = 0.0
        self._closed = False
        self._wake = asyncio.Event()
        self._step_timer: asyncio.Future[None] | None = None

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def start(self) -> None:
        """There is nothing to load."""

    def submit(self, request: EngineRequest) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if request.request_id in self._live:
            raise EngineError(f"request {request.request_id} is already live")
        adapter = self.adapters.find(request.adapter) if request.adapter else None
        checksum = adapter.checksum if adapter is not None else ""
        now = self._clock()
        owner = self._pool.order.owner_of(request.kv_share, now)
        sequence = SimSequence(request, self._info, owner, now, checksum, self._answer_seed)
        if request.adapter:
            self._prepare(sequence)
        else:
            self._waiting.append(sequence)
        self._live[request.request_id] = sequence
        self._order.add(sequence)
        self._num_submitted += 1
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        if request_id in self._live:
            self._cancelled.add(request_id)
            self._wake.set()

    async def steps(self) -> AsyncIterator[StepOutput]:
        while not self._closed:
            if self._preparing:
                self._take_prepared()
            if not (self._running or self._waiting or self._cancelled or self._failed):
                self._wake.clear()
                await self._wake.wait()
                self._step_ends_at = self._clock()
                continue
            output = StepOutput()
            planned, duration_seconds = self._schedule()
            await self._pass_time(duration_seconds)
            if self._closed:
                return
            self._apply_cancels(output)
            if self._failed:
                output.ends += self._failed
                self._failed.clear()
            computed = [
                sequence
                for sequence, num_tokens in planned
                if sequence.request.request_id in self._live and self._compute(sequence, num_tokens)
            ]
            output.kv_events = self._pool.take_events()
            for sequence in computed:
                if sequence.num_output_tokens + 1 >= sequence.request.max_tokens:
                    self._release(sequence)
            # All tokens appear at the step's end, as with a model: stamps encode that time, without delay by
            # accounting.
            for sequence in computed:
                self._emit(sequence, output)
            if output.request_ids or output.ends or output.kv_events:
                output.load = self._load()
                yield output
                # Another engine would schedule its next step without keeping this one's tokens in the process.
                await asyncio.sleep(0)

    async def close(self) -> None:
        self._closed = True
        self._live.clear()
        self._waiting.clear()
        self._running.clear()
        self._preparing.clear()
        await self.adapters.close()
        self._wake.set()
        if self._step_timer is not None and not self._step_timer.done():
            self._step_timer.set_result(None)

    # -- adapters -----------------------------------------------------------------------------------------------------

    def _prepare(self, sequence: SimSequence) -> None:
        """Let a sequence wait for its adapter. Raises EngineError if there is none."""
        request = sequence.request
        try:
            loaded = self.adapters.acquire(request.request_id, request.adapter)
        except AdapterError as error:
            raise EngineError(str(error)) from error
        self._preparing[request.request_id] = sequence, loaded
        loaded.add_done_callback(lambda _loaded: self._wake.set())

    def _take_prepared(self) -> None:
        for request_id, (sequence, loaded) in list(self._preparing.items()):
            if not loaded.done():
                continue
            del self._preparing[request_id]
            error = loaded.exception()
            if error is None:
                self._waiting.append(sequence)
            else:
                self._cancelled.discard(request_id)
                self._forget(sequence)
                self._failed.append(SequenceEnd(request_id, SequenceFinishReason.ERROR, str(error)))

    # -- one step -----------------------------------------------------------------------------------------------------

    def _schedule(self) -> tuple[list[tuple[SimSequence, int]], float]:
        """Returns what this step computes, as (sequence, number of tokens), and how many seconds that takes."""
        planned: list[tuple[SimSequence, int]] = []
        budget = self._max_prefill_tokens
        any_decodes = False
        is_mixed = self._order.is_mixed
        self._step_number += 1
        position = 0
        while position < len(self._running):  # preemption shortens the list from its end
            sequence = self._running[position]
            num_tokens = len(sequence.token_ids) - sequence.num_computed_tokens
            if sequence.is_decoding:
                any_decodes = True
                if sequence.next_decode_step > self._step_number:
                    position += 1
                    continue
                if not self._make_room(sequence):
                    break
            elif is_mixed:
                num_tokens = 0
            else:
                num_tokens = min(num_tokens, budget)
                budget -= num_tokens
            if num_tokens:
                planned.append((sequence, num_tokens))
            position += 1
        has_room = budget and len(self._running) < self._info.max_batch
        if self._queue_order == "shortest_prefill" and has_room and len(self._waiting) > 1:
            self._waiting = deque(self._order.sort_waiting(self._waiting, self._admission_rank))
        elif is_mixed:
            self._waiting = deque(self._order.sort_waiting(self._waiting))
        if is_mixed:
            budget = self._continue_prefill(planned, budget)
        budget = self._admit_waiting(planned, budget)
        num_prefilled = self._max_prefill_tokens - budget
        seconds = num_prefilled / self._prefill_tokens_per_second + (self._step_seconds if any_decodes else 0.0)
        return planned, seconds

    def _continue_prefill(self, planned: list[tuple[SimSequence, int]], budget: int) -> int:
        """Continue prefill that has begun, in the order of classes and tenants; waiting sequences that it gives way to
        are admitted before it. Returns what is left of the budget."""
        for sequence in self._order.sort_begun(one for one in self._running if not one.is_decoding):
            budget = self._admit_waiting(planned, budget, before=sequence)
            num_tokens = min(len(sequence.token_ids) - sequence.num_computed_tokens, budget)
            if num_tokens:
                budget -= num_tokens
                planned.append((sequence, num_tokens))
        return budget

    def _admit_waiting(
        self, planned: list[tuple[SimSequence, int]], budget: int, before: SimSequence | None = None
    ) -> int:
        """Admit sequences, the first one first, and plan their prefill; returns what is left of the budget. As in the
        torch engine's scheduler, one that waits for blocks outside of the guaranteed shares is overtaken by those that
        keep within theirs."""
        skipped: list[SimSequence] = []
        while budget and self._waiting and len(self._running) < self._info.max_batch:
            sequence = self._waiting[0]
            if sequence.request.request_id in self._cancelled:
                break
            if before is not None and not self._order.goes_before(sequence, before):
                break
            if skipped and not self._fits_into_share(sequence):
                skipped.append(self._waiting.popleft())
                continue
            if not self._admit(sequence):
                if not self._pool.order.has_shares or not self._pool.order.uses_lent_blocks:
                    break
                skipped.append(self._waiting.popleft())
                continue
            self._running.append(self._waiting.popleft())
            num_tokens = len(sequence.token_ids) - sequence.num_computed_tokens
            self._order.begin(sequence, 0 if sequence.has_foreign_kv else num_tokens)
            if not sequence.has_foreign_kv:  # otherwise all of them are fetched
                num_tokens = min(num_tokens, budget)
                budget -= num_tokens
            planned.append((sequence, num_tokens))
        self._waiting.extendleft(reversed(skipped))
        return budget

    def _fits_into_share(self, sequence: SimSequence) -> bool:
        """True when a waiting sequence would use no blocks beyond its owner's guarantee."""
        owner = sequence.owner
        return owner.num_used - (-len(sequence.token_ids) // self._info.block_size) <= owner.guarantee

    def _admission_rank(self, sequence: SimSequence) -> float:
        if sequence.scheduled_at is not None:  # it was preempted, and resumes before others of its class start
            order = class_order(sequence.class_rank, sequence.submit_time)
            return order - MAX_PATIENCE_SECONDS if self._order.is_mixed else float("-inf")
        hashes = sequence.known_hashes()
        block_size = self._info.block_size
        sequence.num_expected_blocks = count_cached_blocks(
            lambda position: self._pool.is_cached(hashes[position]),
            sequence.num_reusable_blocks,
            sequence.num_expected_blocks,
        )
        num_uncached = len(sequence.token_ids) - sequence.num_expected_blocks * block_size
        speed = self._prefill_tokens_per_second
        return admission_rank(num_uncached, speed, sequence.submit_time, sequence.class_rank)

    def _admit(self, sequence: SimSequence) -> bool:
        """Allocate the blocks of a waiting sequence, cached ones if possible; returns False if too few are left."""
        hashes = sequence.known_hashes()
        pool, owner = self._pool, sequence.owner
        cached = hashes[: pool.count_cached(hashes[: sequence.num_reusable_blocks])]
        is_last_resort = not pool.order.uses_lent_blocks
        pool.reference(cached, owner)
        num_private = -(-len(sequence.token_ids) // self._info.block_size) - len(cached)
        if num_private > (pool.num_available if is_last_resort else pool.num_available_to(owner)):
            pool.free(cached, 0, owner)
            return False
        pool.allocate(num_private, owner)
        sequence.admit(len(cached), num_private, self._clock())
        return True

    def _make_room(self, sequence: SimSequence) -> bool:
        """See that the next token has a block, preempting the latest sequences if need be; False: itself was."""
        if sequence.num_blocks * self._info.block_size > sequence.num_computed_tokens:
            return True
        pool = self._pool
        while not pool.num_available_to(sequence.owner):
            if pool.num_available and not has_others_outside(sequence, self._running):
                break
            victim = preempted_for(sequence, self._running)
            self._running.remove(victim)
            pool.free(victim.cached_hashes, victim.num_private_blocks, victim.owner)
            victim.preempt()
            self._waiting.appendleft(victim)
            self._num_preemptions += 1
            if victim is sequence:
                return False
        pool.allocate(1, sequence.owner)
        sequence.num_private_blocks += 1
        return True

    def _compute(self, sequence: SimSequence, num_tokens: int) -> bool:
        """Account for computed tokens; returns whether all are computed, so that a new token follows."""
        parent = sequence.last_stored_hash
        new_hashes = sequence.compute(num_tokens)
        if new_hashes:
            self._pool.store(new_hashes, sequence.owner, parent)
        return sequence.num_computed_tokens == len(sequence.token_ids)

    def _emit(self, sequence: SimSequence, output: StepOutput) -> None:
        request = sequence.request
        if not sequence.started:
            sequence.started = True
            output.starts.append(
                SequenceStart(
                    request.request_id,
                    sequence.num_cached_tokens,
                    sequence.queue_time_seconds,
                    sequence.prompt_logprobs(),
                )
            )
        if request.pooling is not None:
            output.ends.append(
                SequenceEnd(
                    request.request_id,
                    SequenceFinishReason.STOP,
                    embedding=sim_embedding(request.prompt_token_ids, request.pooling),
                )
            )
            return
        token_id = sequence.emit(self._chosen_token(sequence))
        sequence.next_decode_step = self._step_number + self._decode_every
        output.request_ids.append(request.request_id)
        output.token_ids.append([token_id])
        if request.sampling.num_logprobs is not None:
            output.logprobs[request.request_id] = [sequence.logprobs_of(token_id, request.sampling.num_logprobs)]
        if token_id in request.stop_token_ids:
            self._end(sequence, SequenceFinishReason.STOP, output)
        elif sequence.num_output_tokens >= request.max_tokens:
            self._end(sequence, SequenceFinishReason.LENGTH, output)

    def _chosen_token(self, sequence: SimSequence) -> int | None:
        """None: the word that follows from the prompt."""
        if sequence.num_output_tokens < len(self._opening):
            return self._opening[sequence.num_output_tokens]
        return self._stamp(sequence) if self._stamps else None

    def _stamp(self, sequence: SimSequence) -> int:
        now = self._clock()
        return self._stamps[stamp_of(now if sequence.num_output_tokens else now - sequence.submit_time)]

    def _end(self, sequence: SimSequence, reason: SequenceFinishReason, output: StepOutput) -> None:
        if sequence.request.request_id in self._live:
            self._release(sequence)
        is_handed_over = sequence.request.prefill_only and reason is SequenceFinishReason.LENGTH
        handoff = handoff_of(sequence.request) if is_handed_over else b""
        output.ends.append(SequenceEnd(sequence.request.request_id, reason, handoff=handoff))

    def _release(self, sequence: SimSequence) -> None:
        """Free the blocks of a sequence that has no more steps."""
        self._running.remove(sequence)
        self._pool.free(sequence.cached_hashes, sequence.num_private_blocks, sequence.owner)
        self._forget(sequence)

    def _forget(self, sequence: SimSequence) -> None:
        del self._live[sequence.request.request_id]
        self._order.remove(sequence)
        if sequence.request.adapter:
            self.adapters.release(sequence.request.request_id)

    def _apply_cancels(self, output: StepOutput) -> None:
        for request_id in self._cancelled:
            sequence = self._live[request_id]
            if sequence in self._running:
                self._end(sequence, SequenceFinishReason.CANCELLED, output)
            else:
                if self._preparing.pop(request_id, None) is None:
                    self._waiting.remove(sequence)
                self._forget(sequence)
                output.ends.append(SequenceEnd(request_id, SequenceFinishReason.CANCELLED))
        self._cancelled.clear()

    async def _pass_time(self, seconds: float) -> None:
        """Wait for the step's end on an absolute clock, so that late wake-ups do not add up."""
        now = self._clock()
        if now - self._step_ends_at > MAX_LAG_SECONDS:
            self._step_ends_at = now
        self._step_ends_at += seconds
        delay_seconds = self._step_ends_at - now
        if delay_seconds <= 0:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        self._step_timer = loop.create_future()
        handle = loop.call_later(delay_seconds, _fire, self._step_timer)
        try:
            await self._step_timer
        finally:
            handle.cancel()

    def _load(self) -> EngineLoad:
        shares: defaultdict[int, LoadShare] = defaultdict(LoadShare)
        for sequence in (*self._waiting, *(sequence for sequence, _ in self._preparing.values())):
            share = shares[sequence.request.origin]
            share.num_waiting += 1
            share.num_queued_prefill_tokens += sequence.request.num_expected_prefill_tokens
        for sequence in self._running:
            share = shares[sequence.request.origin]
            share.num_running += 1
            if sequence.is_decoding:
                share.num_decode_context_tokens += sequence.num_computed_tokens
            else:
                share.num_queued_prefill_tokens += len(sequence.token_ids) - sequence.num_computed_tokens
        return EngineLoad.of(
            shares,
            num_submitted=self._num_submitted,
            num_available_blocks=self._pool.num_available_to_any,
            kv_shares=self._pool.order.usage(),
            num_preemptions=self._num_preemptions,
            prefill_tokens_per_second=self._prefill_tokens_per_second,
            decode_step_seconds=self._step_seconds,
        )


def _capabilities(config: ShardConfig, max_loaded_adapters: int) -> frozenset[Capability]:
    found = _CAPABILITIES if max_loaded_adapters else _CAPABILITIES - {Capability.ADAPTERS}
    return found | {Capability.VISION} if config.sim.sees_images else found


def _fire(timer: asyncio.Future[None]) -> None:
    if not timer.done():
        timer.set_result(None)
