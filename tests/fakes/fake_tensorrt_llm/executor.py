"""The fake's executor: a thread that steps. Admission keeps room for a request's whole length (as the library's default
scheduling policy does), first come first served."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tests.fakes.fake_tensorrt_llm.blocks import BlockCache
from tests.fakes.fake_tensorrt_llm.outputs import Logprob, RequestError, RequestOutput, Response
from tests.fakes.fake_tensorrt_llm.releases import RELEASE_1_2, LibraryRelease
from tests.fakes.fake_tensorrt_llm.transfers import Transfers, context_params, fetch

FIRST_TOKEN, NUM_TOKENS = 500, 4500
"""Generated tokens are ordinary ones of any vocabulary."""


@dataclasses.dataclass
class Request:
    output: RequestOutput
    params: Any
    salt: Any
    disaggregated: Any = None
    lora_path: str | None = None
    generated: list[list[int]] = dataclasses.field(default_factory=list)
    """Per choice."""
    finished: set[int] = dataclasses.field(default_factory=set)
    referenced: list[int] = dataclasses.field(default_factory=list)
    num_blocks: int = 0
    num_cached_tokens: int = 0
    loop: asyncio.AbstractEventLoop | None = None
    is_kept: bool = False
    """Whether its blocks wait for another engine."""

    @property
    def is_decode_leg(self) -> bool:
        return self.disaggregated is not None and self.disaggregated.request_type == "generation_only"

    @property
    def is_prefill_leg(self) -> bool:
        return self.disaggregated is not None and self.disaggregated.request_type == "context_only"


class Executor:
    def __init__(
        self,
        cache: BlockCache,
        max_batch: int,
        step_seconds: float,
        tokens_per_step: int,
        transfer_timeout_ms: int | None = None,
        release: LibraryRelease = RELEASE_1_2,
        num_ranks: int = 1,
        args: Any = None,
        padded_vocab_size: int = 49152,
    ) -> None:
        self._args = args
        self._padded_vocab_size = padded_vocab_size
        self._decoding_type = getattr(getattr(args, "speculative_config", None), "decoding_type", None)
        self._release = release
        self._num_ranks = num_ranks
        self.cache = cache
        self.transfers = Transfers(transfer_timeout_ms)
        self.step_seconds = step_seconds
        self.ignores_aborts = False
        self.hangs = False
        self.fail_next: tuple[int, Exception] | None = None
        """The next submitted request raises this after so many tokens."""
        self.fails_all: Exception | None = None
        """What every forward pass raises: the requests get it as their error, and the executor goes on."""
        self.num_failed = 0
        self._tokens_per_step = tokens_per_step
        self._max_batch = max_batch
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._aborted: set[int] = set()
        self._stats: deque[dict[str, Any]] = deque()
        self._num_steps = 0
        self._stopped = False
        self._condition = threading.Condition()
        self._fails: dict[int, tuple[int, Exception]] = {}
        self._death: Exception | None = None
        self.is_dead = False
        self._thread = threading.Thread(target=self._run, name="fake-tensorrt-llm", daemon=True)
        self._thread.start()

    def submit(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        request.loop = loop
        request.generated = [[] for _ in range(request.params.n)]
        with self._condition:
            if self.fail_next is not None:
                self._fails[request.output.request_id] = self.fail_next
                self.fail_next = None
            self._waiting.append(request)
            self._condition.notify()

    def abort(self, request_id: int) -> None:
        with self._condition:
            if not self.ignores_aborts:
                self._aborted.add(request_id)
            self._condition.notify()

    def die(self, error: Exception) -> None:
        with self._condition:
            self._death = error
            self.is_dead = True
            self._condition.notify()

    def stop(self) -> None:
        with self._condition:
            self._stopped = True
            self._condition.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(5)
        self.transfers.close()

    def wait_until_released(self, timeout_seconds: float) -> bool:
        """Wait until nothing is kept for other engines; returns whether that came."""
        with self._condition:
            return self._condition.wait_for(lambda: not self.transfers.num_held_blocks, timeout_seconds)

    def wait_until_held(self, timeout_seconds: float) -> bool:
        """Wait until something is kept for other engines; returns whether that came."""
        with self._condition:
            return self._condition.wait_for(lambda: self.transfers.num_held_blocks > 0, timeout_seconds)

    def drain_stats(self) -> list[dict[str, Any]]:
        with self._condition:
            stats = list(self._stats)
            self._stats.clear()
        return stats

    def drain_events(self) -> list[dict[str, Any]]:
        with self._condition:
            return self.cache.events.drain()

    def lose_events(self) -> None:
        """What waits in the buffer is gone."""
        with self._condition:
            self.cache.events.drain()

    def restart_cache(self) -> None:
        with self._condition:
            self.cache.restart()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._stopped and (self.hangs or not (self._waiting or self._running)):
                    self._condition.wait(0.05)
                    self._release_transfers()
                if self._stopped:
                    return
                responses = self._step()
            for loop, batch in responses.items():
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(_deliver, batch)
            time.sleep(self.step_seconds)  # sleep: what a step takes

    def _step(self) -> dict[asyncio.AbstractEventLoop, list[tuple[RequestOutput, Response]]]:
        batch: list[tuple[Request, Response]] = []
        if self.is_dead:
            dead = [*self._running, *self._waiting]
            if self._death is not None:  # the first time: later requests get no answer at all
                batch += [(request, Response(error=self._death)) for request in dead]
                self._death = None
            self._running.clear()
            self._waiting.clear()
        self._apply_aborts(batch)
        self._release_transfers()
        num_context_tokens = self._admit()
        num_generating = len(self._running)
        ending = self._forward_error()
        for request in [] if self.is_dead else list(self._running):
            if ending is None:
                self._advance(request, batch)
            else:
                self._fail(request, ending, batch)
        self._num_steps += 1
        self._stats += self._rows(num_context_tokens, num_generating)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestOutput, Response]]] = {}
        for request, response in batch:
            assert request.loop is not None
            by_loop.setdefault(request.loop, []).append((request.output, response))
        return by_loop

    def _apply_aborts(self, batch: list[tuple[Request, Response]]) -> None:
        """One that still waits is dropped without any response."""
        for request in [*self._running, *self._waiting]:
            if request.output.request_id not in self._aborted:
                continue
            if request in self._waiting:
                self._waiting.remove(request)
                continue
            unfinished = set(range(request.params.n)) - request.finished
            batch += [(request, Response(index, finish_reason="cancelled")) for index in sorted(unfinished)]
            self._end(request)
        self._aborted.clear()

    def _admit(self) -> int:
        num_context_tokens = 0
        while self._waiting and len(self._running) < self._max_batch:
            request = self._waiting[0]
            prompt = request.output.prompt_token_ids
            per_choice = -(-(len(prompt) + request.params.max_tokens) // self.cache.block_size)
            reused = self.cache.admit(prompt, request.salt, per_choice * request.params.n)
            if reused is None:
                break
            self._waiting.popleft()
            death = self._death_by(request)
            if death is not None:
                self._death, self.is_dead = death, True
                self._running.append(request)
                return num_context_tokens
            self._running.append(request)
            request.referenced = reused
            request.num_blocks = per_choice * request.params.n
            request.num_cached_tokens = len(reused) * self.cache.block_size
            num_context_tokens += len(prompt) - request.num_cached_tokens
            self.cache.store(prompt, request.salt, request.referenced, last=False)
        return num_context_tokens

    def _advance(self, request: Request, batch: list[tuple[Request, Response]]) -> None:
        if request.is_decode_leg and not request.generated[0]:
            self._begin_decode_leg(request, batch)
            return
        failure = self._fails.get(request.output.request_id)
        if failure is not None and len(request.generated[0]) >= failure[0]:
            batch.append((request, Response(error=failure[1])))
            self._end(request)
            return
        for index, generated in enumerate(request.generated):
            if index in request.finished:
                continue
            response = Response(index, cached_tokens=request.num_cached_tokens)
            for _ in range(self._tokens_per_step):
                self._generate(request, index, generated, response)
                if response.finish_reason is not None:
                    request.finished.add(index)
                    break
            batch.append((request, response))
        if len(request.finished) == request.params.n:
            self._end(request)

    def _generate(self, request: Request, index: int, generated: list[int], response: Response) -> None:
        params = request.params
        adapter = request.salt[1:] if isinstance(request.salt, tuple) else ()  # another one gives other tokens
        context = (*adapter, *request.output.prompt_token_ids, *generated)
        token_id = choose_token(context, params, index, len(generated), self._applied)
        generated.append(token_id)
        response.token_ids.append(token_id)
        if params.logprobs and not self._samples_drafts:
            response.logprobs.append(_logprobs(token_id, params.logprobs, chosen_first=params.is_greedy))
        if token_id == params.end_id and not params.ignore_eos:
            response.finish_reason = "stop"
        elif token_id in self._stop_words(params):
            response.finish_reason, response.stop_reason = "stop", token_id
        elif len(generated) >= params.max_tokens:
            response.finish_reason = "length"
            if request.is_prefill_leg:
                state = self.transfers.keep(request.output.prompt_token_ids, request.referenced, request.num_blocks)
                request.is_kept = True
                self._condition.notify_all()
                response.finish_reason = self._release.context_only_finish
                response.disaggregated_params = context_params(
                    request.disaggregated, request.output.request_id, list(generated), response.logprobs, state
                )

    # -- how it misbehaves --------------------------------------------------------------------------------------------

    def _death_by(self, request: Request) -> Exception | None:
        """The exception with which the worker ends when it takes this request; None: it does not."""
        if (
            request.is_prefill_leg
            and self._release.context_only_needs_serial_scheduler
            and not self._args.disable_overlap_scheduler
        ):
            return ValueError("Context-only requests need disable_overlap_scheduler")
        if request.lora_path is not None:
            return _lora_error(Path(request.lora_path))
        return None

    def _forward_error(self) -> Exception | None:
        """What the step raises for all running requests; None: it does not."""
        if self.fails_all is not None:
            return self.fails_all
        for request in self._running:
            bias = request.params.embedding_bias
            if bias is not None and len(bias) != self._padded_vocab_size:
                return RequestError(f"The size of tensor a ({self._padded_vocab_size}) must match ({len(bias)})")
            if request.params.logprobs and self._samples_drafts and self._release.logprobs_with_one_model == "assert":
                return RequestError("return_log_probs not implemented for speculative sampler")
        return None

    def _fail(self, request: Request, error: Exception, batch: list[tuple[Request, Response]]) -> None:
        self.num_failed += 1
        batch.append((request, Response(error=error)))
        self._end(request)

    @property
    def _samples_drafts(self) -> bool:
        """True when one-model speculation samples, with a sampler of its own."""
        return self._decoding_type in self._release.one_model

    @property
    def _applied(self) -> frozenset[str]:
        is_cpp = getattr(self._args, "sampler_type", None) == "TRTLLMSampler"
        return frozenset(self._release.sampling) if is_cpp else self._release.sampler_applies

    def _stop_words(self, params: Any) -> list[int]:
        drops = params.ignore_eos and self._release.ignore_eos_drops_stop_words
        return [] if drops else params.stop_token_ids or []

    def _begin_decode_leg(self, request: Request, batch: list[tuple[Request, Response]]) -> None:
        """The KV is fetched, and the tokens of the hand-off come first. Their log-probabilities are those of the
        hand-off, and lacking without them."""
        if not fetch(request.disaggregated, request.output.prompt_token_ids):
            batch.append((request, Response(error=RequestError("the KV of the context request cannot be fetched"))))
            self._end(request)
            return
        first = list(request.disaggregated.first_gen_tokens)
        request.generated[0] += first
        log_probs = getattr(request.disaggregated, "first_gen_log_probs", None)
        batch.append((request, Response(token_ids=first, logprobs=list(log_probs or ()))))

    def _release_transfers(self) -> None:
        for referenced, num_blocks in self.transfers.take_released():
            self.cache.release(referenced, num_blocks)
            self._condition.notify_all()

    def _end(self, request: Request) -> None:
        self._running.remove(request)
        tokens = [*request.output.prompt_token_ids, *request.generated[0]]
        self.cache.store(tokens[:-1], request.salt, request.referenced, last=True)
        if not request.is_kept:
            self.cache.release(request.referenced, request.num_blocks)

    def _rows(self, num_context_tokens: int, num_generating: int) -> list[dict[str, Any]]:
        """The statistics of one step: a row for each rank that gives one, with its part of all counts. The time and the
        counts of speculation are the first rank's."""
        cache = self.cache
        num_drafted = (self._tokens_per_step - 1) * num_generating
        speculation = {"numDraftTokens": num_drafted, "numAcceptedTokens": num_drafted} if num_drafted else None
        return [
            {
                "iter": self._num_steps,
                "iterLatencyMS": self.step_seconds * 1000,
                "numActiveRequests": self._part(len(self._running), rank),
                "numQueuedRequests": self._part(len(self._waiting), rank),
                "kvCacheStats": {
                    "maxNumBlocks": self._part(cache.num_blocks, rank),
                    "freeNumBlocks": self._part(cache.num_free, rank),
                    "usedNumBlocks": self._part(cache.num_used, rank),
                    "tokensPerBlock": cache.block_size,
                },
                "inflightBatchingStats": {
                    "numScheduledRequests": self._part(len(self._running), rank),
                    "numContextRequests": self._part(1 if num_context_tokens else 0, rank),
                    "numGenRequests": self._part(num_generating, rank),
                    "numPausedRequests": 0,
                    "numCtxTokens": self._part(num_context_tokens, rank),
                },
                "specDecodingStats": speculation,
                **({"attentionDpRank": rank} if self._release.stats_per_rank else {}),
            }
            for rank in range(self._num_ranks if self._release.stats_per_rank else 1)
        ]

    def _part(self, count: int, rank: int) -> int:
        return (count + self._num_ranks - 1 - rank) // self._num_ranks


def next_token(context: tuple[int, ...], seed: Any) -> int:
    """The fake's language model."""
    return FIRST_TOKEN + random.Random(hash((context, seed))).randrange(NUM_TOKENS)


def _lora_error(path: Path) -> Exception | None:
    """What loading an adapter raises; None: it is loaded."""
    if (path / "poison").exists():
        return RuntimeError("an illegal memory access was encountered while the adapter was loaded")
    try:
        with safe_open(path / "adapter_model.safetensors", framework="numpy") as file:
            return None if list(file.keys()) else KeyError("lora_A")
    except (OSError, SafetensorError) as error:
        return error


def choose_token(context: tuple[int, ...], params: Any, index: int, num_generated: int, applied: frozenset[str]) -> int:
    """The model's token, with a logit of 3, unless parameters that the sampler applies make another one likelier; all
    others have 0."""

    def value(name: str) -> Any:
        return getattr(params, name) if name in applied else None

    is_greedy = params.is_greedy or value("min_p") == 1
    logits = {next_token(context, None if is_greedy else (params.seed, index)): 3.0}
    logits.setdefault(next_token(context, "second"), 0.0)
    bias = value("embedding_bias")
    for token_id, change in enumerate(() if bias is None else bias.tolist()):
        if change:
            logits[token_id] = logits.get(token_id, 0.0) + change
    penalty = value("repetition_penalty") or 1.0
    for token_id in logits.keys() & set(context):
        logits[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty
    counts = Counter(context[len(context) - num_generated :])
    for token_id in logits.keys() & counts.keys():
        logits[token_id] -= (value("presence_penalty") or 0) + (value("frequency_penalty") or 0) * counts[token_id]
    if num_generated < (value("min_tokens") or 0):
        logits.pop(params.end_id, None)  # other stop tokens are not kept back
    return max(logits, key=lambda token_id: logits[token_id])


def _logprobs(token_id: int, count: int, *, chosen_first: bool) -> dict[int, Logprob]:
    """The likeliest `count`, and the chosen token also where it is not among them."""
    likeliest = [token_id] if chosen_first else []
    likeliest += [token_id + 1 + i for i in range(count - len(likeliest))]
    entries = {other: Logprob(-0.5 - rank, rank + 1) for rank, other in enumerate(likeliest)}
    entries.setdefault(token_id, Logprob(-9.0, count + 7))
    return entries


def _deliver(batch: list[tuple[RequestOutput, Response]]) -> None:
    for output, response in batch:
        output.responses.put_nowait(response)
