"""TensorRtLlmEngine: the `Engine` protocol over an in-process `tensorrt_llm.LLM`.

The output that the tasks of running_requests.py collect in one iteration of the event loop becomes one StepOutput. KV
events and statistics are fetched by one thread each.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from kvloom_common.config import ShardConfig, with_constants
from shard_server.engines.base import (
    Capability,
    EngineError,
    EngineInfo,
    EngineRequest,
    RequestRefusedError,
    SequenceFinishReason,
    StepOutput,
)
from shard_server.engines.tensorrt_llm.api import Llm, RequestOutput, TensorRtLlm
from shard_server.engines.tensorrt_llm.daemon_thread import DrainThread
from shard_server.engines.tensorrt_llm.disaggregation import Handoff, context_only, generation_only
from shard_server.engines.tensorrt_llm.health import (
    START_SECONDS,
    HealthVerdict,
    ProgressWatch,
    WatchSettings,
    ask,
    probe,
)
from shard_server.engines.tensorrt_llm.kv_cache.kv_events import KvEventTranslator
from shard_server.engines.tensorrt_llm.kv_cache.kv_records import KvRecord, as_records, parse_events
from shard_server.engines.tensorrt_llm.kv_cache.kv_roots import RootLedger
from shard_server.engines.tensorrt_llm.launch import (
    absorb_capacity,
    absorb_first_stats,
    capabilities_of,
    check_isolation,
    count_blocks,
    launch,
    logits_width,
    shut_down,
)
from shard_server.engines.tensorrt_llm.loop_watchdog import LoopWatchdog
from shard_server.engines.tensorrt_llm.output_buffer import OutputBuffer
from shard_server.engines.tensorrt_llm.reports import Reports
from shard_server.engines.tensorrt_llm.requests.adapter_files import AdapterCheck
from shard_server.engines.tensorrt_llm.requests.lora import AdapterTable
from shard_server.engines.tensorrt_llm.requests.request_fields import cache_salt_of, check_request
from shard_server.engines.tensorrt_llm.requests.request_stream import RequestStream
from shard_server.engines.tensorrt_llm.requests.sampling_params import NO_END, SamplingMapper
from shard_server.engines.tensorrt_llm.requests.scheduling import RequestScheduling
from shard_server.engines.tensorrt_llm.running_requests import RunningRequests
from shard_server.engines.tensorrt_llm.settings import TensorRtSettings
from shard_server.engines.tensorrt_llm.stats import InFlight, IterationStats

log = structlog.get_logger()

MAX_TICK_SECONDS: Final = 1.0
SHUTDOWN_SECONDS: Final = 60.0
PROBE_SALT: Final = "kvloom probe"
MAX_TRACES_PER_BLOCK: Final = 4


class TensorRtLlmEngine:
    """`max_model_len` is the model's window in tokens, used when the configuration does not set one."""

    def __init__(
        self,
        model_dir: Path,
        model_name: str,
        shard: ShardConfig,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
    ) -> None:
        self._model_dir = model_dir
        self._model_name = model_name
        self._shard = shard
        self._config = with_constants(shard.tensorrt_llm, WatchSettings)
        self._settings = TensorRtSettings.of(shard)
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._max_model_len = shard.max_model_len or max_model_len
        self._info: EngineInfo | None = None
        self._library: TensorRtLlm
        self._sampling: SamplingMapper
        self._scheduling: RequestScheduling
        self.adapters: AdapterTable
        """See AdapterEngine."""
        self._in_flight: InFlight
        self._requests: RunningRequests
        self._kv_events: KvEventTranslator
        self._health: ProgressWatch
        self._loop: asyncio.AbstractEventLoop
        self._has_salt = True
        self._llm: Llm | None = None
        self._stats = IterationStats()
        self._buffer = OutputBuffer()
        self._drains: list[DrainThread] = []
        self._watch: asyncio.Task[None] | None = None
        self._probe: asyncio.Task[None] | None = None
        self._asked: asyncio.Task[bool] | None = None
        """The library's own health check."""
        timeout_seconds = self._config.stall_timeout_seconds
        self._stats_reports = Reports("statistics", shard.max_batch, timeout_seconds)
        self._event_reports = Reports("kv_events", shard.max_batch, timeout_seconds)
        self._watchdog = LoopWatchdog(self._config.loop_timeout_seconds)
        self._alarm = asyncio.Event()
        """Set when the engine's health is in doubt."""
        self._last_error = ""
        """The last failure of a request that was none of the library's errors of requests."""
        self._failure: Exception | None = None
        self._closing = False

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineError("the engine has not started")
        return self._info

    # -- start and stop ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Construct the LLM and let it generate one token. Raises EngineError."""
        if self._llm is not None:
            raise EngineError("the engine has been started before")
        self._loop = asyncio.get_running_loop()
        self._library, self._llm = await launch(self._model_dir, self._shard, self._max_model_len)
        try:
            await self._prepare(self._llm)
        except BaseException:
            await self._shut_down()
            raise
        self._start_drains(self._llm)
        if self._config.loop_timeout_seconds:
            self._watchdog.start()
        self._watch = self._loop.create_task(self._watch_over())
        self._watch.add_done_callback(self._on_watch_done)

    async def _prepare(self, llm: Llm) -> None:
        config = self._config
        settings = self._settings
        self._has_salt = check_isolation(self._library, settings)
        self._scheduling = RequestScheduling.of(self._library, config, settings)
        width = logits_width(self._model_dir, self._vocab_size, settings)
        self._sampling = SamplingMapper.of(self._library, settings.guided_decoding_backend, width)
        self.adapters = AdapterTable(
            self._library,
            config.adapters,
            AdapterCheck(self._model_dir, settings.max_rank, settings.target_modules),
            settings.max_loras,
            self._prove_adapter,
        )
        # The first request compiles and captures what the constructor has not; it may take as long as the start.
        await probe(self._submit_probe, START_SECONDS)
        await absorb_capacity(llm, self._stats, settings.num_ranks)
        await absorb_first_stats(llm, self._stats)
        if self._stats.num_blocks is None:
            # Statistics come with iterations: another one may have what the first lacked.
            await probe(self._submit_probe, config.probe_timeout_seconds)
            await absorb_first_stats(llm, self._stats)
        block_size = self._stats.tokens_per_block or self._shard.block_size
        num_blocks = count_blocks(self._stats, self._shard, settings)
        self._info = EngineInfo(
            engine="tensorrt_llm",
            model=self._model_name,
            block_size=block_size,
            num_blocks=num_blocks,
            max_batch=self._shard.max_batch,
            max_model_len=min(self._max_model_len, num_blocks * block_size),
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
            capabilities=capabilities_of(self._library, settings),
            reserves_output=settings.reserves_output,
        )
        self._in_flight = InFlight(self._shard.max_batch, num_blocks, block_size)
        roots = RootLedger(block_size, MAX_TRACES_PER_BLOCK * num_blocks)
        self._kv_events = KvEventTranslator(block_size, num_blocks, roots)
        self._health = ProgressWatch(
            config.probe_interval_seconds, config.stall_timeout_seconds, config.max_failed_requests, self._loop.time()
        )
        self._requests = RunningRequests(
            self._buffer,
            self._in_flight,
            roots,
            block_size,
            self._library.request_error,
            config.cancel_timeout_seconds,
            self._on_progress,
            self._on_request_end,
            self._on_unexplained,
            self._die,
        )

    def _start_drains(self, llm: Llm) -> None:
        """Called after the first request: before it, the getters have nothing to wait for."""
        self._drains.append(
            DrainThread("tensorrt-llm-stats", llm.get_stats, as_records, self._on_stats, self._on_stats_failure)
        )
        if Capability.PREFIX_CACHING in self.info.capabilities:
            fetch = llm.get_kv_cache_events
            self._drains.append(
                DrainThread("tensorrt-llm-events", fetch, parse_events, self._on_kv_records, self._on_kv_events_failure)
            )
        for drain in self._drains:
            drain.start()

    async def close(self) -> None:
        """Abort the running requests, stop the threads, then TensorRT-LLM itself. May be called repeatedly."""
        if self._closing:
            return
        self._closing = True
        self._buffer.wake_reader()
        tasks: list[asyncio.Task[Any]] = [task for task in (self._watch, self._probe, self._asked) if task is not None]
        for task in tasks:
            task.cancel()
        if self._info is not None:
            tasks += self._requests.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(drain.stop() for drain in self._drains))
        if self._stats.num_draft_tokens:
            log.info(
                "speculation_measured", drafted=self._stats.num_draft_tokens, accepted=self._stats.num_accepted_tokens
            )
        await self._shut_down()
        self._watchdog.stop()

    async def _shut_down(self) -> None:
        llm, self._llm = self._llm, None
        if llm is None:
            return

        def on_timeout() -> None:
            log.error("trtllm_shutdown_timed_out", seconds=SHUTDOWN_SECONDS)
            self._watchdog.give_up()  # its threads may keep the process from ending

        with contextlib.suppress(Exception):
            await shut_down(llm, SHUTDOWN_SECONDS, on_timeout)

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        """Submit a sequence to TensorRT-LLM. Raises EngineError when it can never run or the engine is not running."""
        info = self.info
        llm = self._llm
        if self._closing or self._failure is not None or llm is None:
            raise EngineError("the engine is no longer running")
        if request.request_id in self._requests:
            raise EngineError(f"request_id {request.request_id!r} is in use")
        if len(self._requests) >= info.max_batch + self._shard.max_waiting:
            # TensorRT-LLM has no limit of its own.
            raise EngineError(f"{len(self._requests)} sequences are queued already")
        check_request(request, info)
        params = self._sampling.params_of(request, info)
        adapter = self.adapters.request_of(request.adapter)
        token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        leg = self._leg_of(request)
        rank = self._kv_events.rank_of(token_ids, request.root_hash) if self._scheduling.follows_prefix else None
        scheduling = self._scheduling.arguments(request, rank)
        try:
            output = self._generate(llm, token_ids, params, cache_salt_of(request), adapter, leg, scheduling)
        except (ValueError, TypeError, NotImplementedError, IndexError, self._library.request_error) as error:
            raise RequestRefusedError(f"TensorRT-LLM refuses the request: {error}") from error
        except Exception as error:
            self._doubt(request, error)
            raise EngineError(f"TensorRT-LLM failed to take the request: {error!r}") from error
        if not self._requests:
            self._health.on_work(self._loop.time())
        self._requests.add(request, output)
        if adapter is not None:
            self.adapters.use(request.request_id, request.adapter)

    def cancel(self, request_id: str) -> None:
        """Abort a sequence; it ends as CANCELLED once TensorRT-LLM has ended it, or after a bounded wait."""
        if self._info is not None:
            self._requests.abort(request_id, SequenceFinishReason.CANCELLED)

    async def steps(self) -> AsyncIterator[StepOutput]:
        """Outputs in order; see `Engine.steps`."""
        while not self._closing:
            output = self._buffer.take()
            if output is not None:
                output.load = self._in_flight.load(self._stats, self._lost_reports)
                for start in output.starts:
                    self.adapters.on_start(start.request_id)
                for end in output.ends:
                    self.adapters.release(end.request_id)
                yield output
                continue
            if self._failure is not None:
                raise EngineError(f"the engine has died: {self._failure}") from self._failure
            await self._buffer.until_readable()
            await asyncio.sleep(0)  # other sequences' output of this step arrives one loop iteration later

    @property
    def _lost_reports(self) -> tuple[str, ...]:
        return tuple(reports.name for reports in (self._stats_reports, self._event_reports) if reports.is_lost)

    def _leg_of(self, request: EngineRequest) -> Any:
        """The DisaggregatedParams of a request of which only one part is computed here; None: all of it is. Raises
        EngineError for a hand-off that this version cannot use."""
        if not request.prefill_only and request.handoff is None:
            return None
        if request.prefill_only and self._library.release.hands_over_serially and not self._settings.is_serial:
            raise EngineError("TensorRT-LLM computes prompts for others only with shard.role prefill or both")
        if request.sampling.num_logprobs is not None and Capability.HANDOFF_LOGPROBS not in self.info.capabilities:
            raise EngineError(f"TensorRT-LLM {self._library.version} hands the first token over without its logprobs")
        if request.handoff is None:
            return context_only(self._library)
        try:
            return generation_only(self._library, Handoff.from_bytes(request.handoff))
        except ValueError as error:
            raise EngineError(str(error)) from error

    def _generate(
        self,
        llm: Llm,
        token_ids: list[int],
        params: Any,
        salt: str,
        adapter: Any = None,
        leg: Any = None,
        scheduling: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        optional: dict[str, Any] = dict(scheduling or {})
        if leg is not None:
            optional["disaggregated_params"] = leg
        if self._has_salt:
            optional["cache_salt"] = salt
        if adapter is not None:
            optional["lora_request"] = adapter
        return llm.generate_async({"prompt_token_ids": token_ids}, sampling_params=params, streaming=True, **optional)

    async def _prove_adapter(self, adapter: Any) -> None:
        """Generate one token with a LoRARequest. Raises EngineError if that fails, with which the engine may end."""
        await probe(lambda: self._submit_probe(adapter), START_SECONDS)

    def _submit_probe(self, adapter: Any = None) -> RequestOutput:
        llm = self._llm
        if llm is None:
            raise EngineError("the engine is closed")
        token_id = min(self._eos_token_ids, default=0)
        params = self._library.symbol("SamplingParams")(max_tokens=1, end_id=NO_END, pad_id=token_id, detokenize=False)
        return self._generate(llm, [token_id], params, PROBE_SALT, adapter)

    # -- results of the threads ---------------------------------------------------------------------------------------

    def _on_stats(self, records: list[Mapping[str, Any]]) -> None:
        if self._stats_reports.on_records():
            log.info("trtllm_statistics_resumed")
        self._stats.absorb(records)

    def _on_stats_failure(self, error: Exception) -> None:
        if self._stats_reports.on_failure():
            self._on_stats_lost(repr(error))

    def _on_stats_lost(self, error: str) -> None:
        log.error("trtllm_statistics_lost", error=error)
        self._stats.forget_free_blocks()

    def _on_kv_records(self, records: list[KvRecord]) -> None:
        if self._event_reports.on_records():
            log.info("trtllm_kv_events_resumed")
        self._buffer.add_kv_events(self._kv_events.translate(records))

    def _on_kv_events_failure(self, error: Exception) -> None:
        """Only for events that make no sense: in 1.2.1 the getter logs every exception and returns nothing."""
        if self._event_reports.on_failure():
            self._on_kv_events_lost(repr(error))

    def _on_kv_events_lost(self, error: str) -> None:
        log.error("trtllm_kv_events_lost", error=error)
        self._kv_events.forget_all("the events have ended")
        self._buffer.add_kv_events(self._kv_events.take_events())

    def _check_reports(self, now: float) -> None:
        silence = f"none for {self._config.stall_timeout_seconds:g} s of work"
        if self._stats_reports.check(now):
            self._on_stats_lost(silence)
        if self._event_reports.check(now):
            self._on_kv_events_lost(silence)

    # -- health -------------------------------------------------------------------------------------------------------

    def _on_progress(self, now: float) -> None:
        self._health.on_progress(now)
        self._stats_reports.on_due(now)

    def _on_request_end(self, stream: RequestStream, failed: bool) -> None:
        self._health.on_request_end(failed=failed)
        if not failed and Capability.PREFIX_CACHING in self.info.capabilities:
            block_size = self.info.block_size
            if (len(stream.request.prompt_token_ids) - 1) // block_size * block_size > (
                stream.output.cached_tokens or 0
            ):
                self._event_reports.on_due(self._loop.time())

    def _on_unexplained(self, stream: RequestStream, error: Exception) -> None:
        self._on_request_end(stream, True)
        self._doubt(stream.request, error)

    def _doubt(self, request: EngineRequest, error: Exception) -> None:
        """A request has failed in a way that may be the engine's end: find out now."""
        log.warning("trtllm_request_failed", request_id=request.request_id, error=repr(error))
        self._last_error = repr(error)
        self._health.on_unexplained_failure(hash((request.root_hash, *request.prompt_token_ids)))
        self._alarm.set()

    async def _watch_over(self) -> None:
        """Check the engine's health periodically. Raises EngineError when the engine has died."""
        config = self._config
        timeouts = (config.cancel_timeout_seconds, config.unread_timeout_seconds, config.stall_timeout_seconds)
        tick_seconds = min(MAX_TICK_SECONDS, min(*timeouts, config.probe_interval_seconds) / 4)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(tick_seconds):
                    await self._alarm.wait()
            self._alarm.clear()
            now = self._loop.time()
            unread_since = self._buffer.unread_since
            if unread_since is not None and now - unread_since >= config.unread_timeout_seconds:
                # A reader that has stalled must not keep the GPU busy.
                self._requests.abort_all(f"its output was not read for {config.unread_timeout_seconds:g} s")
            self._requests.cut_off(now)
            self._check_reports(now)
            self._ask_library()
            if self._health.is_failing:
                raise EngineError(f"many different requests have failed in a row, the last one by {self._last_error}")
            if self._probe is not None:
                if not self._probe.done():
                    continue
                self._probe.result()
                self._probe = None
                self._health.on_probe_passed(now)
            if unread_since is not None:
                self._health.on_progress(now)  # the reader makes no progress, not the engine
            verdict = self._health.judge(now, is_busy=bool(self._requests), num_records=self._stats.num_records)
            if verdict is HealthVerdict.STALLED:
                raise EngineError(f"no progress for {config.stall_timeout_seconds:g} s with work to do")
            if verdict is HealthVerdict.PROBE:
                self._probe = self._loop.create_task(probe(self._submit_probe, config.probe_timeout_seconds))

    def _ask_library(self) -> None:
        """Raises EngineError if the library's own check has failed."""
        asked, llm = self._asked, self._llm
        if llm is not None and (asked is None or (asked.done() and asked.result())):
            self._asked = self._loop.create_task(ask(llm))

    def _on_watch_done(self, watch: asyncio.Task[None]) -> None:
        error = None if watch.cancelled() else watch.exception()
        if error is not None:
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """Record that the engine has died; `steps` raises the error after the remaining output."""
        if self._failure is not None or self._closing:
            return
        failure = error if isinstance(error, EngineError) else EngineError(repr(error))
        if self._last_error:
            failure = EngineError(f"{failure} (a request had failed by {self._last_error})")
        log.error("engine_died", model=self._model_name, error=str(failure))
        self._failure = failure
        self._requests.stop()
        self._buffer.wake_reader()
