"""Runs one engine for `kvloom-lab bench engine-peers`: it reads orders as JSON lines from stdin and writes answers to
stdout.

It runs in the engine's own interpreter, so this file imports only the standard library and that engine.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TextIO


class Driver(Protocol):
    """A loaded engine."""

    version: str

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[float]]:
        """Answer all prompts concurrently and greedily with `max_tokens` each. Returns the times (time.perf_counter) at
        which each prompt got its tokens."""
        ...


def serve(load: Callable[[], Driver]) -> None:
    """Serve orders until stdin ends. Output that the engine prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    begin = time.perf_counter()
    driver = load()
    _answer(answers, {"version": driver.version, "load_seconds": time.perf_counter() - begin})
    for line in sys.stdin:
        order = json.loads(line)
        begin = time.perf_counter()
        times = driver.run(order["prompts"], order["max_tokens"])
        _answer(answers, {"times": [[moment - begin for moment in own] for own in times]})


def _answer(answers: TextIO, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


class VllmDriver:
    """vLLM's engine, stepped in this process."""

    def __init__(self, model_dir: str, num_threads: int, max_batch: int) -> None:
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
            OMP_NUM_THREADS=str(num_threads),
        )
        import vllm

        self.version = f"vllm {vllm.__version__}"
        self._vllm: Any = vllm
        self._engine: Any = vllm.LLM(
            model=model_dir,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=max_batch,
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine
        self._num_requests = 0

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[float]]:
        sampling = self._vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        times: dict[str, list[float]] = {}
        for prompt in prompts:
            self._num_requests += 1
            times[str(self._num_requests)] = []
            tokens = self._vllm.TokensPrompt(prompt_token_ids=list(prompt))
            self._engine.add_request(str(self._num_requests), tokens, sampling)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                own = times[output.request_id]
                own += [now] * (len(output.outputs[0].token_ids) - len(own))
        return list(times.values())


class LlamaCppDriver:
    """llama.cpp's server, through the wheel `xllamacpp`."""

    def __init__(self, model_path: str, num_threads: int, max_batch: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = model_path
        params.n_parallel = max_batch
        params.n_ctx = 1024 * max_batch
        params.cpuparams.n_threads = num_threads
        params.cpuparams_batch.n_threads = num_threads
        params.cache_prompt = False
        params.cache_ram_mib = 0
        features = [part.strip() for part in xllamacpp.get_system_info().split("|")]
        used = ", ".join(part.split()[-3] for part in features if part.endswith("= 1") and "AVX" in part)
        self.version = f"xllamacpp {xllamacpp.__version__} ({used or 'no vector extensions'})"
        self._server: Any = xllamacpp.Server(params)

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in prompts]

        def answer(prompt: Sequence[int], own: list[float]) -> None:
            request = {"prompt": list(prompt), "n_predict": max_tokens, "stream": True, "temperature": 0}
            request |= {"ignore_eos": True, "cache_prompt": False}
            self._server.handle_completions(request, lambda _chunk: own.append(time.perf_counter()))

        threads = [threading.Thread(target=answer, args=pair) for pair in zip(prompts, times, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # The last chunk carries statistics and no token.
        return [own[:max_tokens] for own in times]


if __name__ == "__main__":
    drivers: dict[str, Callable[[str, int, int], Driver]] = {"vllm": VllmDriver, "llamacpp": LlamaCppDriver}
    name, model = sys.argv[1:3]
    serve(lambda: drivers[name](model, int(sys.argv[3]), int(sys.argv[4])))
