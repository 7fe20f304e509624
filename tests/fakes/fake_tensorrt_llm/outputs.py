"""What `generate_async` returns: one object, mutated by every iteration."""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any


class RequestError(RuntimeError):
    """A request's own failure."""


@dataclasses.dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None


@dataclasses.dataclass(slots=True)
class Response:
    """What one engine step brought for one choice. `error` ends the request."""

    index: int = 0
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    cached_tokens: int = 0
    disaggregated_params: Any = None
    error: Exception | None = None


class Aborter:
    """The executor, as a request holds it: weakly."""

    def __init__(self, abort: Any) -> None:
        self.abort = abort


class RequestOutput:
    """`misused` is set when it is iterated behind an exception, which hangs or lies in the library."""

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        params: Any,
        aborter: Aborter,
        before_response: Callable[[], None] = lambda: None,
        disaggregated_params: Any = None,
    ) -> None:
        self._before_response = before_response
        self._disaggregated_params = disaggregated_params
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.outputs = [CompletionOutput(index) for index in range(params.n)]
        self.finished = False
        self.cached_tokens = 0
        self.metrics_dict: dict[str, float] = {}
        self._params = params
        self._aborter = weakref.ref(aborter)
        self._aborted = False
        self._raised = False
        self.misused = False
        self.responses: asyncio.Queue[Response] = asyncio.Queue()
        self.abort_called = asyncio.Event()

    def abort(self) -> None:
        self.abort_called.set()
        aborter = self._aborter()
        if aborter is None:
            raise AttributeError("'NoneType' object has no attribute 'abort_request'")
        self._aborted = True
        aborter.abort(self.request_id)

    def aborted(self) -> bool:
        return self._aborted

    async def aresult(self) -> RequestOutput:
        async for _ in self:
            pass
        return self

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._raised:
            self.misused = True
            raise AssertionError("iterated behind an exception")
        if self.finished:
            raise StopAsyncIteration
        response = await self.responses.get()
        self._before_response()
        if response.error is not None:
            self._raised = True
            raise response.error
        self._handle(response)
        return self

    def _handle(self, response: Response) -> None:
        output = self.outputs[response.index]
        self.cached_tokens = response.cached_tokens or self.cached_tokens
        output.token_ids += response.token_ids
        output.logprobs += response.logprobs
        # Without a hand-off, those that the request was given.
        output.disaggregated_params = response.disaggregated_params or self._disaggregated_params
        if response.finish_reason is None:
            return
        output.finish_reason = response.finish_reason
        output.stop_reason = response.stop_reason
        if response.stop_reason is not None and not self._params.include_stop_str_in_output:
            output.token_ids = output.token_ids[:-1]
        self.finished = all(output.finish_reason is not None for output in self.outputs)
