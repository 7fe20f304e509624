"""The fake LLM: an executor in a thread, which steps over its requests, and the API around it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tests.fakes.fake_tensorrt_llm.blocks import BlockCache, EventBuffer
from tests.fakes.fake_tensorrt_llm.configs import StrictModel
from tests.fakes.fake_tensorrt_llm.executor import Executor, Request
from tests.fakes.fake_tensorrt_llm.outputs import Aborter, RequestOutput
from tests.fakes.fake_tensorrt_llm.releases import NEWEST, RELEASE_1_2, LibraryRelease

DEFAULT_NUM_BLOCKS = 256
DEFAULT_VOCAB_SIZE = 49152
"""That of a model without a config.json."""
ERROR_BUDGET = 2
"""How many requests may fail before the health check of releases with a budget does."""
HangsIn = Literal["", "submit", "response", "shutdown"]


def hang() -> None:
    while True:
        time.sleep(60)  # sleep: it hangs


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a version, or a machine, differs."""

    release: LibraryRelease = RELEASE_1_2
    is_stub: bool = False
    """The index's package without the library."""
    without_llm_arguments: Sequence[str] = ()
    takes_cache_salt: bool = True
    raises_queue_empty: bool = False
    """Getters raise instead of returning nothing, and do not wait."""
    has_stats: bool = True
    has_events: bool = True
    step_seconds: float = 0.001
    tokens_per_step: int = 1
    """Speculation."""
    window_sizes: Sequence[int] = (4096,)
    rank: int | None = None
    notices_death: bool = True
    """False for a worker whose crash goes unnoticed: it counts as healthy, takes requests, and answers none."""


IN_1_2 = Variant()
"""Release 1.2.1."""
IN_NEWEST = Variant(release=NEWEST, window_sizes=(4096, 512), rank=1, raises_queue_empty=True)
"""The newest release, with a model of two attention windows and attention data parallelism."""


class FakeLlm:
    """`tensorrt_llm.LLM`. Below its API: what a test makes happen to it."""

    def __init__(self, variant: Variant, args: Any) -> None:
        kv_cache = args.kv_cache_config
        if args.enable_lora and not (args.lora_config.lora_target_modules or args.lora_config.lora_dir):
            raise AssertionError("Expecting at least one lora target module")
        if args.backend != "pytorch":
            raise ValueError(f"backend {args.backend} is another engine")
        self.args = args
        self.variant = variant
        self.reported_usage = variant.release.reports_usage and os.environ.get("TRTLLM_NO_USAGE_STATS") != "1"
        block_size = kv_cache.tokens_per_block
        self._num_ranks = args.tensor_parallel_size if args.enable_attention_dp else 1
        num_blocks = kv_cache.max_tokens // block_size if kv_cache.max_tokens else DEFAULT_NUM_BLOCKS
        self.events = EventBuffer(
            kv_cache.event_buffer_max_size if variant.has_events else 0,
            variant.window_sizes,
            variant.rank,
            hexadecimal=kv_cache.use_kv_cache_manager_v2,
        )
        self.cache = BlockCache(
            num_blocks * self._num_ranks,
            block_size,
            self.events,
            reuse=bool(kv_cache.enable_block_reuse),
            tells_salts=variant.release.tells_salts,
        )
        transceiver = args.cache_transceiver_config
        self.executor = Executor(
            self.cache,
            args.max_batch_size,
            variant.step_seconds,
            variant.tokens_per_step,
            None if transceiver is None else transceiver.kv_transfer_timeout_ms,
            variant.release,
            self._num_ranks,
            args,
            _padded_vocab_size(args, self._num_ranks),
        )
        self.outputs: list[RequestOutput] = []
        self.submitted: list[tuple[list[int], Any, dict[str, Any]]] = []
        self.submit_called = asyncio.Event()
        self.refuse_next: Exception | None = None
        """What the next generate_async raises."""
        self.num_shutdowns = 0
        self.hangs_in: HangsIn = ""
        """What blocks for ever: its caller's thread is the event loop's but for "shutdown"."""
        self.loses_events = False
        """The getter of KV events fails, logs that and returns nothing."""
        self.loses_stats = False
        """The getter of statistics returns nothing."""
        self.stats_error: Exception | None = None
        """What the getter of statistics raises."""
        self.num_pollers: set[int] = set()
        self._ids = itertools.count(1)
        self._aborter = Aborter(self.executor.abort)

    # -- the library's API --------------------------------------------------------------------------------------------

    def generate_async(
        self,
        inputs: Any,
        sampling_params: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
        conversation_params: Any = None,
    ) -> RequestOutput:
        if not 0 <= priority <= 1:
            raise ValueError("priority must be between 0 and 1")
        if trace_headers is not None and not isinstance(trace_headers, Mapping):
            raise TypeError("trace_headers must be a mapping")
        if self.hangs_in == "submit":
            hang()
        if self.num_shutdowns or self._is_down:
            raise RuntimeError("LLM is shutting down")
        if self.refuse_next is not None:
            refusal, self.refuse_next = self.refuse_next, None
            raise refusal
        params = sampling_params
        token_ids = list(inputs["prompt_token_ids"] if isinstance(inputs, dict) else inputs)
        token_ids[-1]  # an empty prompt: IndexError
        if params.end_id is None:
            raise ValueError("end_id must be set without a tokenizer")
        if not self.args.enable_chunked_prefill and len(token_ids) > (self.args.max_num_tokens or 8192):
            raise ValueError(f"the prompt length ({len(token_ids)}) exceeds max_num_tokens")
        if self.args.max_seq_len and len(token_ids) + params.max_tokens > self.args.max_seq_len:
            raise ValueError("the prompt and max_tokens exceed max_seq_len")
        if disaggregated_params is not None and disaggregated_params.request_type == "context_only":
            params.max_tokens = 1
        output = RequestOutput(
            next(self._ids), token_ids, params, self._aborter, self._before_response, disaggregated_params
        )
        self.outputs.append(output)
        self.submit_called.set()
        self.submitted.append(
            (
                token_ids,
                params,
                {
                    "lora_request": lora_request,
                    "cache_salt": cache_salt,
                    "streaming": streaming,
                    "kv_cache_retention_config": kv_cache_retention_config,
                    "scheduling_params": scheduling_params,
                    "trace_headers": trace_headers,
                    "priority": priority,
                    "is_fetched": getattr(disaggregated_params, "request_type", None) == "generation_only",
                },
            )
        )
        salt = (cache_salt, None if lora_request is None else lora_request.lora_int_id)
        request = Request(output, params, cache_salt if lora_request is None else salt, disaggregated_params)
        request.lora_path = None if lora_request is None else lora_request.lora_path
        self.executor.submit(request, asyncio.get_running_loop())
        return output

    def get_stats(self, timeout: float = 2.0) -> list[dict[str, Any]]:
        if not self.variant.has_stats:
            raise RuntimeError("stats are not enabled")
        if self.stats_error is not None:
            raise self.stats_error
        return self._drain(lambda: [] if self.loses_stats else self.executor.drain_stats(), timeout)

    def get_kv_cache_events(self, timeout: float = 2.0) -> list[dict[str, Any]]:
        self.num_pollers.add(threading.get_ident())
        is_pushed = getattr(self.args.kv_cache_config, "kv_events_config", None) is not None
        is_silent = self.loses_events or is_pushed
        return self._drain(lambda: [] if is_silent else self.executor.drain_events(), timeout)

    def _check_health(self) -> bool:
        if self.variant.release.has_error_budget and self.executor.num_failed > ERROR_BUDGET:
            return False
        return not (self.num_shutdowns or self._is_down)

    @property
    def _is_down(self) -> bool:
        """The error of a worker that has ended shuts the LLM down."""
        return self.executor.is_dead and self.variant.notices_death

    def shutdown(self) -> None:
        self.num_shutdowns += 1
        if self.hangs_in == "shutdown":
            threading.Thread(target=hang, daemon=False).start()  # keeps the process, as the library's do
            hang()
        self.stop()

    # -- what a test makes happen -------------------------------------------------------------------------------------

    @property
    def num_held_blocks(self) -> int:
        """Those of finished context-only requests, which wait to be fetched."""
        return self.executor.transfers.num_held_blocks

    def stop(self) -> None:
        self.executor.stop()

    def die(self, error: Exception) -> None:
        """Every stream raises it: the executor's loop has crashed."""
        self.executor.die(error)

    def drop_executor(self) -> None:
        """What requests hold of it is gone: abort() raises."""
        del self._aborter

    def _before_response(self) -> None:
        """The library has noticed that its workers have failed, and waits for them."""
        if self.hangs_in == "response":
            hang()

    def _drain(self, take: Any, timeout: float) -> list[dict[str, Any]]:
        """Destructive; waits up to `timeout` for the first."""
        deadline = time.monotonic() + timeout
        while True:
            found = take()
            if found:
                return found
            if self.variant.raises_queue_empty:
                raise asyncio.QueueEmpty
            if time.monotonic() >= deadline:
                return []
            time.sleep(0.001)  # sleep: as the library waits


def _padded_vocab_size(args: Any, num_ranks: int) -> int:
    """The width of the logits: the output layer is divided evenly among the ranks of tensor parallelism."""
    path = Path(args.model) / "config.json"
    vocab_size = json.loads(path.read_bytes())["vocab_size"] if path.exists() else DEFAULT_VOCAB_SIZE
    num_parts = args.tensor_parallel_size // num_ranks
    return -(-vocab_size // num_parts) * num_parts


class _WithCapacity(FakeLlm):
    def get_kv_cache_capacity(self) -> dict[str, int]:
        """Of one rank."""
        num_blocks, block_size = self.cache.num_blocks // self._num_ranks, self.cache.block_size
        return {"maxNumBlocks": num_blocks, "tokensPerBlock": block_size, "maxNumTokens": num_blocks * block_size}


class _WithoutPriority(FakeLlm):
    """Release 1.2.1."""

    def generate_async(
        self,
        inputs: Any,
        sampling_params: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        return super().generate_async(
            inputs,
            sampling_params,
            lora_request,
            prompt_adapter_request,
            streaming,
            kv_cache_retention_config,
            disaggregated_params,
            trace_headers,
            _postproc_params,
            scheduling_params,
            cache_salt,
        )


class _WithoutSalt(FakeLlm):
    def generate_async(self, inputs: Any, sampling_params: Any = None, streaming: bool = False) -> RequestOutput:
        return super().generate_async(inputs, sampling_params, streaming=streaming)


def make_llm_class(made: list[FakeLlm], variant: Variant, args_class: type[StrictModel]) -> type[FakeLlm]:
    knows_priority = "priority" in variant.release.generate
    base = _WithoutSalt if not variant.takes_cache_salt else FakeLlm if knows_priority else _WithoutPriority
    if variant.release.has_capacity:
        base = _WithCapacity

    class LLM(base):
        def __init__(
            self,
            model: str,
            tokenizer: Any = None,
            skip_tokenizer_init: bool = False,
            trust_remote_code: bool = False,
            tensor_parallel_size: int = 1,
            dtype: str = "auto",
            revision: str | None = None,
            **kwargs: Any,
        ) -> None:
            args = args_class(
                model=model,
                skip_tokenizer_init=skip_tokenizer_init,
                trust_remote_code=trust_remote_code,
                tensor_parallel_size=tensor_parallel_size,
                dtype=dtype,
                **kwargs,
            )
            super().__init__(variant, args)
            made.append(self)

    return LLM
