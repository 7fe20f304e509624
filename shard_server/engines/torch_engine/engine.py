"""TorchEngine: the embedded engine. A dedicated thread loads the model and runs the steps; the event loop reads its
outputs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from kvloom_common.config import ShardConfig
from kvloom_common.limits.fair_threads import FairThreads
from kvloom_common.process.freed_memory import return_freed_memory
from shard_server.engines.adapters.host import AdapterHost
from shard_server.engines.base import (
    AdapterError,
    Adapters,
    Capability,
    EngineError,
    EngineInfo,
    EngineRequest,
    PoolingKind,
    StepOutput,
)
from shard_server.engines.torch_engine.block_pool import BlockPool
from shard_server.engines.torch_engine.checkpoint.sentence_config import SentenceConfig, load_sentence_config
from shard_server.engines.torch_engine.core_share import available_cores
from shard_server.engines.torch_engine.encoder.config import is_encoder
from shard_server.engines.torch_engine.lora.reader import PeftReader
from shard_server.engines.torch_engine.memory import forget_code
from shard_server.engines.torch_engine.model_runner import ModelRunner
from shard_server.engines.torch_engine.sampling.speculation import MAX_STEP_ROWS
from shard_server.engines.torch_engine.scheduler import (
    MAX_PROMPT_LOGITS_PER_STEP,
    Scheduler,
    max_prompt_logits_on_cpu,
)
from shard_server.engines.torch_engine.speed import StepSpeed
from shard_server.engines.torch_engine.step_loop import StepLoop

if TYPE_CHECKING:
    from shard_server.engines.torch_engine.device.runner import DeviceRunner
    from shard_server.engines.torch_engine.encoder.step_loop import EncoderLoop
    from shard_server.engines.torch_engine.sampling.guides import GuideState
    from shard_server.engines.torch_engine.sampling.llguidance_guides import GuideCompiler

MAX_UNREAD_OUTPUTS: Final = 32
"""The engine pauses when this many step outputs wait to be read."""

_COMPILE_THREADS: Final = 2
"""More than one, so that a slow guide does not keep all others waiting."""
_CAPABILITIES: Final = frozenset(
    {
        Capability.GENERATE,
        Capability.EMBED,
        Capability.LOGPROBS,
        Capability.PENALTIES,
        Capability.TOP_K,
        Capability.MIN_P,
        Capability.REPETITION_PENALTY,
        Capability.LOGIT_BIAS,
        Capability.MIN_TOKENS,
        Capability.PROMPT_LOGPROBS,
        Capability.PREFIX_CACHING,
        Capability.KV_SHARES,
        Capability.FAIR_PREFILL,
        Capability.PREDICTION,
    }
)
_IF_INVARIANT: Final = frozenset({Capability.SEEDED_RESUME, Capability.BATCH_INVARIANT})
"""Capabilities that exist only if the runner found its arithmetic to be the same in every batch."""

_OF_SENTENCE_MODELS: Final = frozenset({Capability.RERANK, Capability.SCORE})
"""Capabilities of models whose embeddings were trained to be compared."""
_TEXTS_PER_BATCH: Final = 2
"""How many times its batch an encoder is sent, at most."""

_Submitted = tuple[EngineRequest, float, "Future[GuideState] | None", "Future[Any] | None"]
"""A request, the time of its submission, its guide, which is being compiled, and its adapter, which is being loaded."""

_log = structlog.get_logger(__name__)


class TorchEngine:
    """Implements `shard_server.engines.base.Engine` for Llama-family weights in `model_dir`.

    Requests and cancellations are passed to the compute thread in one bounded inbox, and outputs return in one bounded
    queue. The condition guards both and is never held while computing.
    """

    def __init__(
        self,
        model_dir: Path,
        model_name: str,
        config: ShardConfig,
        *,
        max_loaded_adapters: int = 8,
        max_adapter_rank: int = 64,
        load_runner: Callable[..., ModelRunner | DeviceRunner] | None = None,
        on_load_progress: Callable[[str], None] = lambda _message: None,
    ) -> None:
        """`load_runner` defaults to the one for the configured device. `on_load_progress` is called with a message at
        every stage of loading, in the compute thread."""
        self._model_dir = model_dir
        self._model_name = model_name
        self._config = config
        self._load_runner = load_runner or _loader(config)
        self._on_load_progress = on_load_progress
        self._max_loaded_adapters, self._max_adapter_rank = max_loaded_adapters, max_adapter_rank
        self._adapters: AdapterHost[Any] | None = None
        """None: the runner cannot compute with adapters, or none may be loaded."""
        self._have_adapters: set[str] = set()
        """The live request ids of sequences with adapters."""
        self._info: EngineInfo | None = None
        self._live: set[str] = set()
        """Request ids that were submitted and whose end has not been read from `steps`."""
        self._cancelled: set[str] = set()
        """The live request ids whose cancellation has been sent to the compute thread."""
        self._condition = threading.Condition()
        self._inbox: deque[_Submitted | str] = deque()
        """Submitted requests and request ids to cancel, in order."""
        self._guides: GuideCompiler | None = None
        """None until it is loaded, and if guided decoding is not installed."""
        self._compiling = FairThreads[str](_COMPILE_THREADS, "guides")
        self._unread_outputs: deque[StepOutput] = deque()
        self._closing = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readable = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineError("the engine has not started")
        return self._info

    @property
    def adapters(self) -> Adapters:
        """See AdapterEngine."""
        assert self._adapters is not None, "the engine lacks Capability.ADAPTERS"
        return self._adapters

    async def start(self) -> None:
        """Load the weights and allocate the KV blocks. Raises EngineError."""
        if self._thread is not None:
            raise EngineError("the engine has been started before")
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        # The thread that loads also computes, because torch's worker threads belong to the thread that first called
        # torch.
        self._thread = threading.Thread(target=self._main, args=(started,), name="torch-engine", daemon=True)
        self._thread.start()
        try:
            await started
        except Exception as error:
            raise EngineError(f"cannot load {self._model_name}: {error}") from error

    def submit(self, request: EngineRequest) -> None:
        """Queue a sequence. Raises EngineError when it can never run or the engine is not running."""
        self._check_submit(request)
        adapter = self._acquire_adapter(request) if request.adapter else None
        guide = None
        if request.guide is not None:
            assert self._guides is not None, "checked"
            guide = self._compiling.submit(
                request.tenant,
                functools.partial(
                    self._guides.start,
                    request.guide,
                    request.stop_token_ids,
                    request.output_token_ids,
                    request.root_hash,
                ),
            )
        self._live.add(request.request_id)
        self._post((request, time.perf_counter(), guide, adapter))
        if guide is not None:
            guide.add_done_callback(self._wake)
        if adapter is not None:
            adapter.add_done_callback(self._wake)

    def cancel(self, request_id: str) -> None:
        """End a sequence; its blocks are free before the next step."""
        if request_id in self._live and request_id not in self._cancelled:
            self._cancelled.add(request_id)
            self._post(request_id)

    async def steps(self) -> AsyncIterator[StepOutput]:
        """Outputs in order; see `Engine.steps`."""
        while not self._closing:
            while self._unread_outputs and not self._closing:
                output = self._unread_outputs.popleft()
                if len(self._unread_outputs) == MAX_UNREAD_OUTPUTS - 1:
                    with self._condition:
                        self._condition.notify()
                for end in output.ends:
                    self._live.discard(end.request_id)
                    self._cancelled.discard(end.request_id)
                    if end.request_id in self._have_adapters:
                        self._release_adapter(end.request_id)
                yield output
            if self._failure is not None:
                raise EngineError(f"the engine has died: {self._failure!r}") from self._failure
            self._readable.clear()
            if not (self._unread_outputs or self._closing or self._failure):
                await self._readable.wait()

    async def close(self) -> None:
        """Stop after the step in progress and free everything."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._readable.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._compiling.shutdown()
        if self._adapters is not None:
            await self._adapters.close()
        self._guides = None
        self._live.clear()
        self._cancelled.clear()
        self._inbox.clear()
        self._unread_outputs.clear()

    def _check_submit(self, request: EngineRequest) -> None:
        info = self.info
        if self._closing or self._failure is not None:
            raise EngineError("the engine is no longer running")
        request_id = request.request_id
        if request_id in self._live:
            raise EngineError(f"request_id {request_id!r} is in use")
        if len(self._live) >= info.max_batch + self._config.max_waiting:
            raise EngineError(f"{len(self._live)} sequences are queued already")
        num_prompt_tokens = len(request.prompt_token_ids)
        if not num_prompt_tokens:
            raise EngineError("the prompt is empty")
        if request.pooling is None and Capability.GENERATE not in info.capabilities:
            raise EngineError("this model generates no text")
        if request.pooling is not None:
            if request.max_tokens or request.output_token_ids:
                raise EngineError("an embedding has no output tokens")
        elif request.max_tokens < 1:
            raise EngineError(f"max_tokens must be at least 1, got {request.max_tokens}")
        if num_prompt_tokens + request.max_tokens > info.max_model_len:
            raise EngineError(
                f"prompt ({num_prompt_tokens}) + max_tokens ({request.max_tokens}) exceed the window of "
                f"{info.max_model_len} tokens"
            )
        if len(request.output_token_ids) > request.max_tokens:
            raise EngineError(
                f"{len(request.output_token_ids)} output tokens given, max_tokens is {request.max_tokens}"
            )
        for token_ids in (request.prompt_token_ids, request.output_token_ids):
            if token_ids and not (min(token_ids) >= 0 and max(token_ids) < info.vocab_size):
                raise EngineError(f"a token id lies outside the vocabulary of {info.vocab_size}")
        if any(token_id >= info.vocab_size for token_id, _ in request.sampling.logit_bias):
            raise EngineError(f"logit_bias has a token id outside the vocabulary of {info.vocab_size}")
        if request.guide is not None and Capability.GUIDED not in info.capabilities:
            raise EngineError("guided decoding is not available here")

    def _acquire_adapter(self, request: EngineRequest) -> Future[Any]:
        """Raises EngineError."""
        if self._adapters is None:
            raise EngineError("this engine takes no adapters")
        try:
            adapter = self._adapters.acquire(request.request_id, request.adapter)
        except AdapterError as error:
            raise EngineError(str(error)) from error
        self._have_adapters.add(request.request_id)
        return adapter

    def _release_adapter(self, request_id: str) -> None:
        assert self._adapters is not None, "a sequence has one"
        self._have_adapters.remove(request_id)
        self._adapters.release(request_id)

    def _wake(self, _prepared: Future[Any]) -> None:
        with self._condition:
            self._condition.notify()

    def _post(self, message: _Submitted | str) -> None:
        with self._condition:
            self._inbox.append(message)
            self._condition.notify()

    # The methods below run in the compute thread.

    def _main(self, started: asyncio.Future[None]) -> None:
        try:
            step_loop = self._load()
        except Exception as error:
            self._failure = error
            self._call_loop(_set_exception, started, error)
            return
        self._call_loop(_set_result, started)
        try:
            self._run(step_loop)
        except BaseException as error:
            _log.exception("engine_died", model=self._model_name)
            self._failure = error
            self._call_loop(self._readable.set)

    def _load(self) -> StepLoop | EncoderLoop:
        return self._load_encoder() if is_encoder(self._model_dir) else self._load_decoder()

    def _load_encoder(self) -> EncoderLoop:
        # What decoders do not need is not imported for them.
        from shard_server.engines.torch_engine.device.runner import find_device
        from shard_server.engines.torch_engine.encoder.runner import EncoderRunner
        from shard_server.engines.torch_engine.encoder.step_loop import EncoderLoop

        config = self._config
        runner = EncoderRunner(
            self._model_dir,
            config.torch,
            max_model_len=config.max_model_len,
            num_threads=config.torch.num_threads or max(1, available_cores() // config.num_started),
            device=find_device(config.torch.device),
            on_progress=self._on_load_progress,
        )
        # Nothing is stored in blocks, but routers count in them: there are enough for all that they send.
        blocks_per_text = -(-runner.max_model_len // config.block_size)
        num_blocks = config.num_blocks or _TEXTS_PER_BATCH * config.max_batch * blocks_per_text
        max_model_len = min(runner.max_model_len, num_blocks * config.block_size)
        loop = EncoderLoop(
            runner,
            num_blocks=num_blocks,
            max_batch=config.max_batch,
            max_tokens_per_step=config.max_prefill_tokens_per_step,
            queue_order=config.queue_order,
            default_pooling=runner.default_pooling or PoolingKind.MEAN,
            score=None if runner.score_head is None else runner.score_head.score,
        )
        speed = loop.warm_up(max_model_len)
        capabilities = {Capability.EMBED}
        if runner.is_sentence_model:
            capabilities |= _OF_SENTENCE_MODELS
        if runner.score_head is not None:
            capabilities.add(Capability.CROSS_ENCODE)
        if runner.batch_invariant:
            capabilities.add(Capability.BATCH_INVARIANT)
        self._info = EngineInfo(
            engine="torch",
            model=self._model_name,
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_batch=config.max_batch,
            max_model_len=max_model_len,
            vocab_size=runner.vocab_size,
            eos_token_ids=frozenset(),
            capabilities=frozenset(capabilities),
            prefill_tokens_per_second=speed.prefill_tokens_per_second,
            variant=runner.variant,
            description=f"{runner.description}, {speed.prefill_tokens_per_second:.0f} tok/s",
            embedding_size=runner.hidden_size if runner.score_head is None else 1,
        )
        self._on_load_progress(f"engine: {self._info.description}")
        return_freed_memory()
        forget_code()
        return loop

    def _load_decoder(self) -> StepLoop:
        config, cores = self._config, available_cores()
        sentence = load_sentence_config(self._model_dir)
        runner = self._load_runner(
            self._model_dir,
            dtype=config.torch.dtype,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_model_len=config.max_model_len,
            num_threads=config.torch.num_threads or max(1, cores // config.num_started),
            shared_cores=0 if config.torch.num_threads else cores,
            shares_weights=config.num_started > 1,
            wants_batch_invariance=config.torch.deterministic,
            weights=config.torch.weights,
            kernels=config.torch.kernels,
            on_progress=self._on_load_progress,
        )
        if self._max_loaded_adapters:
            reader = PeftReader(runner.config, self._max_adapter_rank, runner.adapter)
            self._adapters = AdapterHost(reader, self._max_loaded_adapters)
        self._on_load_progress("vocabulary for guided decoding")
        self._guides = _load_guides(self._model_dir, runner, self._on_load_progress)
        # A sequence that fills all blocks can still run alone; a longer one never could.
        max_model_len = min(runner.max_model_len, runner.num_blocks * config.block_size)
        scheduler = Scheduler(
            BlockPool(runner.num_blocks, config.block_size),
            max_batch=config.max_batch,
            max_prefill_tokens_per_step=config.max_prefill_tokens_per_step,
            max_prompt_logits_per_step=_max_prompt_logits(runner),
            queue_order=config.queue_order,
        )
        step_loop = StepLoop(
            runner,
            scheduler,
            speculation=config.torch.speculation,
            default_pooling=sentence.pooling or PoolingKind.MEAN,
        )
        speed = step_loop.warm_up(min(config.max_prefill_tokens_per_step, max_model_len - 1))
        self._info = EngineInfo(
            engine="torch",
            model=self._model_name,
            block_size=config.block_size,
            num_blocks=runner.num_blocks,
            max_batch=config.max_batch,
            max_model_len=max_model_len,
            vocab_size=runner.vocab_size,
            eos_token_ids=runner.eos_token_ids,
            capabilities=_capabilities(runner, self._guides, sentence)
            | (frozenset() if self._adapters is None else {Capability.ADAPTERS}),
            prefill_tokens_per_second=speed.prefill_tokens_per_second,
            decode_step_seconds=speed.decode_step_seconds,
            variant=runner.variant,
            description=_description(runner, speed),
            embedding_size=runner.hidden_size,
            yield_tokens=config.max_prefill_tokens_per_step,
        )
        self._on_load_progress(f"engine: {self._info.description}")
        return_freed_memory()
        forget_code()  # the warm-up has loaded and compiled what there is
        return step_loop

    def _run(self, step_loop: StepLoop | EncoderLoop) -> None:
        while self._take_messages(step_loop):
            output = step_loop.step()
            if output is not None:
                self._unread_outputs.append(output)
                if not self._readable.is_set():
                    self._call_loop(self._readable.set)
            if not step_loop.has_work:
                step_loop.check_integrity()

    def _take_messages(self, step_loop: StepLoop | EncoderLoop) -> bool:
        """Wait until there is work and room for its output; returns False when the engine closes."""
        with self._condition:
            while not self._closing and (
                not (self._inbox or step_loop.has_work) or len(self._unread_outputs) >= MAX_UNREAD_OUTPUTS
            ):
                self._condition.wait()
            messages = list(self._inbox)
            self._inbox.clear()
        for message in messages:
            if isinstance(message, str):
                step_loop.cancel(message)
            else:
                step_loop.add(*message)
        return not self._closing

    def _call_loop(self, callback: Callable[..., object], *args: object) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed and reads no more outputs
            self._loop.call_soon_threadsafe(callback, *args)


def _max_prompt_logits(runner: ModelRunner | DeviceRunner) -> int:
    on_cpu = isinstance(runner, ModelRunner)
    return max_prompt_logits_on_cpu(runner.vocab_size) if on_cpu else MAX_PROMPT_LOGITS_PER_STEP


def _loader(config: ShardConfig) -> Callable[..., ModelRunner | DeviceRunner]:
    device = config.torch.device
    if device == "cpu":
        return ModelRunner
    from shard_server.engines.torch_engine.device.runner import load_device_runner

    return functools.partial(load_device_runner, device=device, max_rows=max(config.max_batch, MAX_STEP_ROWS))


def _load_guides(
    model_dir: Path, runner: ModelRunner | DeviceRunner, on_progress: Callable[[str], None]
) -> GuideCompiler | None:
    """The guide compiler, or None: a vocabulary that only guided requests need must not keep the engine from
    loading."""
    path = model_dir / "tokenizer.json"
    if not path.exists():
        return None
    try:
        from shard_server.engines.torch_engine.sampling.llguidance_guides import GuideCompiler
    except ImportError:
        return None
    try:
        return GuideCompiler(path, runner.vocab_size, runner.eos_token_ids)
    except EngineError as error:
        on_progress(f"no guided decoding: {error}")
        return None


def _capabilities(
    runner: ModelRunner | DeviceRunner, guides: GuideCompiler | None, sentence: SentenceConfig
) -> frozenset[Capability]:
    capabilities = _CAPABILITIES
    if sentence.is_sentence_model:
        capabilities |= _OF_SENTENCE_MODELS
    if runner.batch_invariant:
        capabilities |= _IF_INVARIANT
    return capabilities if guides is None else capabilities | {Capability.GUIDED, Capability.STRUCTURAL_TAGS}


def _description(runner: ModelRunner | DeviceRunner, speed: StepSpeed) -> str:
    prefill, decode = speed.prefill_tokens_per_second, 1 / max(speed.decode_step_seconds, 1e-9)
    return f"{runner.description}, {prefill:.0f} tok/s prefill, {decode:.0f} tok/s decode"


def _set_result(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _set_exception(future: asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
