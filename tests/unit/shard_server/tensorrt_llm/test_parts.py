"""The adapter's small parts: statistics, health, unread output, adapters, hand-offs, threads."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shard_server.engines.base import EngineError, EngineRequest, Sampling, SequenceFinishReason
from shard_server.engines.tensorrt_llm.api import load_tensorrt_llm
from shard_server.engines.tensorrt_llm.daemon_thread import MAX_FAILURES, DrainThread, call_in_daemon
from shard_server.engines.tensorrt_llm.disaggregation import Handoff, context_only, generation_only, handoff_of
from shard_server.engines.tensorrt_llm.health import HealthVerdict, ProgressWatch
from shard_server.engines.tensorrt_llm.output_buffer import MAX_UNREAD_TOKENS, OutputBuffer
from shard_server.engines.tensorrt_llm.requests.adapter_files import AdapterCheck
from shard_server.engines.tensorrt_llm.requests.lora import AdapterTable
from shard_server.engines.tensorrt_llm.requests.request_stream import RequestStream, StreamDelta
from shard_server.engines.tensorrt_llm.stats import InFlight, IterationStats
from tests.fakes.fake_tensorrt_llm import configs, installed_tensorrt_llm
from tests.fakes.fake_tensorrt_llm.llm import FakeLlm, Variant
from tests.fakes.fake_tensorrt_llm.outputs import Aborter, CompletionOutput, Logprob, RequestOutput
from tests.fakes.tensorrt_llm_engine import write_adapter

TIMEOUT_SECONDS = 10.0


@pytest.fixture
def library() -> Iterator[Any]:
    with installed_tensorrt_llm():
        yield load_tensorrt_llm()


# -- one stream -------------------------------------------------------------------------------------------------------


class Scripted:
    """A RequestOutput whose next states a test writes."""

    def __init__(self, **request: Any) -> None:
        self.output = RequestOutput(1, [1], configs.SamplingParams(), Aborter(lambda _: None))
        sampling = request.pop("sampling", Sampling())
        asked = EngineRequest("a", [1], sampling, **{"max_tokens": 10, **request})
        self.stream = RequestStream(asked, self.output, 0.0)

    @property
    def completion(self) -> CompletionOutput:
        return self.output.outputs[0]

    def becomes(self, *token_ids: int, finish: str | None = None) -> StreamDelta:
        self.completion.token_ids = list(token_ids)
        self.completion.finish_reason = finish
        self.output.finished = finish is not None
        return self.stream.take(self.output)


def test_cumulative_tokens_become_news():
    """The library's own difference is wrong for n > 1."""
    scripted = Scripted()
    assert scripted.becomes(5).token_ids == [5]
    assert scripted.becomes(5, 6, 7).token_ids == [6, 7]
    assert scripted.becomes(5, 6, 7).token_ids == []
    last = scripted.becomes(5, 6, 7, 8, finish="length")
    assert (last.token_ids, last.end) == ([8], SequenceFinishReason.LENGTH)


def test_tokens_that_are_taken_back_stay_delivered():
    """The final trim of a stop word, in a version that ignores include_stop_str_in_output."""
    scripted = Scripted(stop_token_ids=frozenset({9}))
    assert scripted.becomes(5, 6).token_ids == [5, 6]
    delta = scripted.becomes(5, finish="stop")
    assert (delta.token_ids, delta.end) == ([], SequenceFinishReason.STOP)


def test_nothing_lies_behind_a_stop_token_or_beyond_max_tokens():
    """A step of a speculating engine may bring more."""
    scripted = Scripted(stop_token_ids=frozenset({9}))
    delta = scripted.becomes(5, 9, 6)
    assert (delta.token_ids, delta.end) == ([5, 9], SequenceFinishReason.STOP)
    scripted = Scripted(max_tokens=3, output_token_ids=[1])
    delta = scripted.becomes(5, 6, 7)
    assert (delta.token_ids, delta.end) == ([5, 6], SequenceFinishReason.LENGTH)


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "not_finished", None])
def test_an_unrequested_end_is_an_error(reason: str | None):
    """A router would wait for nothing, or take it for its own cancellation."""
    scripted = Scripted()
    scripted.output.finished = True
    scripted.completion.finish_reason = reason
    delta = scripted.stream.take(scripted.output)
    assert delta.end is SequenceFinishReason.ERROR
    assert repr(reason) in delta.error


def test_logprobs_that_do_not_match_the_tokens_are_noticed():
    """Better one failed request than figures of the wrong tokens."""
    scripted = Scripted(sampling=Sampling(num_logprobs=1))
    scripted.completion.logprobs = [{5: Logprob(-0.1)}]
    with pytest.raises(ValueError, match="zip"):
        scripted.becomes(5, 6)


# -- load -------------------------------------------------------------------------------------------------------------


def test_statistics_give_blocks_and_speeds():
    """kvCacheStats and the rest may be null."""
    stats = IterationStats()
    stats.absorb(
        [
            {"iter": 1, "iterLatencyMS": 100.0, "kvCacheStats": None, "inflightBatchingStats": None},
            {
                "iter": 2,
                "iterLatencyMS": 100.0,
                "kvCacheStats": {"maxNumBlocks": 50, "freeNumBlocks": 20, "tokensPerBlock": 32},
                "inflightBatchingStats": {"numCtxTokens": 400, "numGenRequests": 2, "numPausedRequests": 1},
            },
            {
                "iter": 3,
                "iterLatencyMS": 20.0,
                "inflightBatchingStats": {"numCtxTokens": 0, "numGenRequests": 2, "numPausedRequests": 3},
                "specDecodingStats": {"numDraftTokens": 8, "numAcceptedTokens": 5},
            },
        ]
    )
    assert (stats.num_blocks, stats.num_free_blocks, stats.tokens_per_block) == (50, 20, 32)
    assert stats.prefill_tokens_per_second == pytest.approx(4000)
    assert stats.decode_step_seconds == pytest.approx(0.02)
    assert stats.num_preemptions == 3
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (8, 5)


def test_rows_of_ranks_are_summed_where_they_differ_and_counted_once_where_they_are_copies():
    """Attention data parallelism: capacity would otherwise be one rank's, and speculation that of many engines."""

    def row(rank: int, iteration: int, free: int, context: int, generating: int) -> dict[str, Any]:
        return {
            "iter": iteration,
            "iterLatencyMS": 100.0,
            "attentionDpRank": rank,
            "kvCacheStats": {"maxNumBlocks": 50, "freeNumBlocks": free, "tokensPerBlock": 32},
            "inflightBatchingStats": {
                "numCtxTokens": context,
                "numGenRequests": generating,
                "numPausedRequests": rank + 1,
            },
            "specDecodingStats": {"numDraftTokens": 8, "numAcceptedTokens": 5},
        }

    stats = IterationStats()
    stats.absorb([row(0, 1, 20, 300, 1), row(1, 1, 30, 0, 4), row(0, 2, 19, 0, 1), row(1, 2, 29, 0, 4)])
    assert (stats.num_blocks, stats.num_free_blocks) == (100, 48)
    assert stats.prefill_tokens_per_second == pytest.approx(3000)
    assert stats.decode_step_seconds == pytest.approx(0.1)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (16, 10)
    assert stats.num_preemptions == 3
    in_flight = InFlight(max_batch=2, num_blocks=100, block_size=32)
    assert in_flight.load(stats).num_draft_tokens == 16


def test_free_blocks_of_the_past_do_not_count():
    """Statistics stop when the engine goes idle: the last one describes what ran then."""
    stats = IterationStats()
    in_flight = InFlight(max_batch=2, num_blocks=50, block_size=4)
    stats.absorb([{"kvCacheStats": {"freeNumBlocks": 7}}])
    assert in_flight.load(stats).num_available_blocks == 50
    in_flight.add(Scripted().stream, 1.0)
    assert in_flight.load(stats).num_available_blocks == 49, "our own estimate until the next report"
    stats.absorb([{"kvCacheStats": {"freeNumBlocks": 40}}])
    assert in_flight.load(stats).num_available_blocks == 40


# -- health -----------------------------------------------------------------------------------------------------------


def test_progress_is_tokens_or_iterations():
    """A long prefill gives no token for long; a long queue neither."""
    watch = ProgressWatch(probe_interval_seconds=10, stall_timeout_seconds=60, max_failed_requests=3, now=0)
    assert watch.judge(9, is_busy=False, num_records=0) is HealthVerdict.WELL
    assert watch.judge(10, is_busy=False, num_records=0) is HealthVerdict.PROBE
    watch.on_work(100)
    assert watch.judge(159, is_busy=True, num_records=0) is HealthVerdict.WELL
    assert watch.judge(160, is_busy=True, num_records=0) is HealthVerdict.STALLED
    assert watch.judge(160, is_busy=True, num_records=1) is HealthVerdict.WELL
    watch.on_progress(200)
    assert watch.judge(259, is_busy=True, num_records=1) is HealthVerdict.WELL


async def test_a_sequence_that_is_not_read_waits_and_the_others_do_not():
    """What waits here is bounded; what one does not read is not the others' fault."""
    buffer = OutputBuffer()
    buffer.add_delta("a", StreamDelta([1] * MAX_UNREAD_TOKENS, []))
    buffer.add_delta("b", StreamDelta([1], []))
    assert buffer.is_full("a")
    assert not buffer.is_full("b")
    waiting = asyncio.create_task(buffer.until_taken())
    await asyncio.sleep(0)
    assert not waiting.done()
    output = buffer.take()
    assert output is not None
    assert [len(tokens) for tokens in output.token_ids] == [MAX_UNREAD_TOKENS, 1]
    await asyncio.wait_for(waiting, TIMEOUT_SECONDS)
    assert not buffer.is_full("a")
    assert buffer.take() is None


# -- adapters and hand-offs -------------------------------------------------------------------------------------------


def test_adapters_have_the_same_number_in_every_shard(library: Any, tmp_path: Path):
    """A number is what the engine's cache knows an adapter by."""
    for name in ("b", "a"):
        write_adapter(tmp_path / name)
    paths = {name: str(tmp_path / name) for name in ("b", "a")}
    table = AdapterTable(library, paths, AdapterCheck(tmp_path, 64, frozenset()), 4, _never)
    request = table.request_of("a")
    assert request is not None
    assert (request.lora_name, request.lora_int_id) == ("a", 1)
    assert table.request_of("") is None
    with pytest.raises(EngineError, match="'c'"):
        table.request_of("c")


async def _never(adapter: Any) -> None:
    raise AssertionError("no adapter is to be loaded")


async def _prefill(llm: FakeLlm, params: Any, prompt: list[int], disaggregated: Any) -> RequestOutput:
    output = llm.generate_async({"prompt_token_ids": prompt}, params, disaggregated_params=disaggregated)
    return await output.aresult()


async def test_a_hand_off_goes_from_prefill_to_decode(library: Any):
    """The state is opaque, and survives the way between two processes."""
    llm = library.symbol("LLM")(
        model="m",
        backend="pytorch",
        kv_cache_config=configs.KvCacheConfig(),
        max_batch_size=2,
        enable_chunked_prefill=True,
        disable_overlap_scheduler=True,
    )
    params = configs.SamplingParams(end_id=0, ignore_eos=True, max_tokens=9)
    output = await asyncio.wait_for(_prefill(llm, params, [1, 2, 3], context_only(library)), TIMEOUT_SECONDS)
    assert params.max_tokens == 1, "the library changes the params it is given"
    handoff = handoff_of(output)
    assert handoff is not None
    assert list(handoff.first_token_ids) == output.outputs[0].token_ids
    again = Handoff.from_bytes(handoff.to_bytes())
    assert again == handoff
    decode = generation_only(library, again)
    assert (decode.request_type, decode.ctx_request_id) == ("generation_only", handoff.ctx_request_id)
    assert decode.opaque_state == handoff.opaque_state
    assert decode.draft_tokens is None


async def test_only_a_context_request_id_proves_a_hand_off():
    """Params alone are there also when the request was answered whole."""
    scripted = Scripted()
    assert handoff_of(scripted.output) is None
    scripted.completion.disaggregated_params = configs.DisaggregatedParams(request_type="context_only")
    assert handoff_of(scripted.output) is None
    scripted.completion.disaggregated_params.ctx_request_id = 0
    assert handoff_of(scripted.output) is not None, "0 is an id"


def test_damaged_hand_offs_are_refused():
    """They come from another process."""
    with pytest.raises(ValueError, match="hand-off"):
        Handoff.from_bytes(b"\xc1")


# -- the fake itself --------------------------------------------------------------------------------------------------


async def test_the_fake_has_the_quirks_it_is_there_for(library: Any):
    """The same object, n > 1 done per request, the final trim, an abort that ends later, greedy n > 1 refused."""
    llm = library.symbol("LLM")(
        model="m",
        backend="pytorch",
        kv_cache_config=configs.KvCacheConfig(),
        max_batch_size=4,
        enable_chunked_prefill=True,
    )
    params = configs.SamplingParams(end_id=0, ignore_eos=True, max_tokens=5, n=2, temperature=1.0, seed=3)
    output = llm.generate_async([1, 2], params, streaming=True)
    seen = [(id(step), step.finished, [len(choice.token_ids) for choice in step.outputs]) async for step in output]
    assert {identity for identity, _, _ in seen} == {id(output)}
    assert [finished for _, finished, _ in seen].count(True) == 1
    assert seen[-1][2] == [5, 5]
    stop = output.outputs[0].token_ids[2]
    trimming = dataclasses.replace(params, n=1, stop_token_ids=[stop])
    lengths = [len(step.outputs[0].token_ids) async for step in llm.generate_async([1, 2], trimming)]
    assert lengths == [1, 2, 2], "the third token was never to be seen"
    aborted = llm.generate_async([1, 2], dataclasses.replace(params, n=1, max_tokens=1000))
    await anext(aborted)
    aborted.abort()
    assert not aborted.finished
    assert (await aborted.aresult()).outputs[0].finish_reason == "cancelled"
    first = llm.generate_async([1, 2], dataclasses.replace(params, n=1, max_tokens=1000))
    others = [llm.generate_async([1, 2], dataclasses.replace(params, n=1, max_tokens=1000)) for _ in range(4)]
    await anext(first)
    others[-1].abort()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(others[-1]), 0.2)  # one that waits is dropped without an answer
    with pytest.raises(ValueError, match="Greedy"):
        configs.SamplingParams(n=2)
    with pytest.raises(IndexError):
        llm.generate_async([], params)
    assert Variant().window_sizes == (4096,)


# -- threads ----------------------------------------------------------------------------------------------------------


async def test_a_drain_survives_empty_queues_and_gives_up_after_repeated_failures():
    """Versions raise QueueEmpty for "nothing"; a getter that is broken must not be called for ever."""
    answers: queue.Queue[Any] = queue.Queue()
    for answer in [asyncio.QueueEmpty(), queue.Empty(), [1, 2], [], [3]] + [RuntimeError("gone")] * MAX_FAILURES:
        answers.put(answer)

    def fetch(timeout_seconds: float) -> list[int]:
        answer = answers.get(timeout=TIMEOUT_SECONDS)
        if isinstance(answer, Exception):
            raise answer
        return answer

    delivered: list[int] = []
    lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    drain = DrainThread("drain", fetch, list, delivered.extend, lost.set_result, failure_pause_seconds=0)
    drain.start()
    error = await asyncio.wait_for(lost, TIMEOUT_SECONDS)
    assert str(error) == "gone"
    assert delivered == [1, 2, 3]
    await drain.stop()


async def test_calls_in_a_daemon_pass_results_and_errors_on():
    """And a call that hangs keeps no process alive."""
    assert await call_in_daemon("a", lambda: threading.current_thread().daemon) is True

    def fail() -> None:
        raise SystemExit(1)

    with pytest.raises(RuntimeError, match="SystemExit"):
        await call_in_daemon("a", fail)
