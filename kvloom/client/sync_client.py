"""The synchronous twin of `Client`, for programs without an event loop.

    with SyncClient("127.0.0.1:8081") as client:
        for delta in client.generate(model="smollm2-135m-instruct", messages=[ChatMessage("user", "Hi")]):
            print(delta.text, end="")

All synchronous clients of a process share one background thread, which runs their event loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypedDict, TypeVar, Unpack

from kvloom.client.answer import Answer
from kvloom.client.client import Client
from kvloom.client.credentials import TlsOptions
from kvloom.client.delta_stream import DeltaStream
from kvloom.client.embedding import Embedding, Input, Moderation, PoolingName
from kvloom.client.generate_request import GenerateOptions
from kvloom.client.generation import Delta
from kvloom.client.option_help import lists_options
from kvloom.enums import CancelOutcome
from kvloom.v1 import router_service_pb2


class ClientOptions(TypedDict, total=False):
    """The keyword arguments of `SyncClient`, which are those of `Client`."""

    other_cells: str | Sequence[str]
    client_id: str
    reattach_seconds: float
    connect_timeout_seconds: float
    max_buffered_tokens: int
    max_retries: int
    api_key: str
    tls: TlsOptions | None


class SyncClient:
    """A connection to one router, or to several that stand in for each other. It may be used from several threads.

    Its methods are those of `Client`, and raise the same errors. An interrupt (Ctrl-C) of a call cancels its request.
    """

    def __init__(self, address: str | Sequence[str], **options: Unpack[ClientOptions]) -> None:
        """Connect to nothing yet: the first call does. The arguments are those of `Client`."""
        client = Client(address, **options)
        self._client = client
        self._thread = open_loop_thread()
        self._finalizer = weakref.finalize(self, _close, client, self._thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the running requests and close all connections. `with` calls it; calling it again is safe."""
        self._finalizer()

    @lists_options
    def generate(self, **options: Unpack[GenerateOptions]) -> SyncDeltaStream:
        """Generate an answer, or `n` of them, as a stream. Yields a `Delta` for each progress update, in order.

        `model` and one of `messages`, `text` and `token_ids` are required. The last Delta of each choice has its
        `finish_reason`. Leaving the loop (`break`, `return`, an exception) cancels the request at once.

            for delta in client.generate(model=name, messages=[ChatMessage("user", "Hi")], timeout_seconds=60):
                print(delta.text, end="")

        Errors, retries and failover are those of `Client.generate`.
        """
        return SyncDeltaStream(self._client.generate(**options), self._open_thread)

    @lists_options
    def complete(self, **options: Unpack[GenerateOptions]) -> Answer:
        """Generate an answer, or `n` of them, and return it when it is complete.

        answer = client.complete(model=name, messages=[ChatMessage("user", "Hi")])
        print(answer.text, answer.finish_reason.name, answer.num_output_tokens)
        """
        return self._open_thread.run(self._client.complete(**options))

    def embed(
        self,
        inputs: Input | Sequence[Input],
        *,
        model: str,
        pooling: PoolingName | None = None,
        normalize: bool = True,
        timeout_seconds: float = 0.0,
        receipt: bool = False,
    ) -> list[Embedding]:
        """Return the embeddings of a text or of several, in their order; see `Client.embed`."""
        found = self._client.embed(
            inputs,
            model=model,
            pooling=pooling,
            normalize=normalize,
            timeout_seconds=timeout_seconds,
            receipt=receipt,
        )
        return self._open_thread.run(found)

    @lists_options
    def plan(self, **options: Unpack[GenerateOptions]) -> router_service_pb2.PlanResponse:
        """Return where a request with these options would be placed, and the score of every shard."""
        return self._open_thread.run(self._client.plan(**options))

    def explain(self, request_id: str = "", *, client_request_id: str = "") -> router_service_pb2.ExplainResponse:
        """Return why a request was placed where it was, and how it ended; see `Client.explain`."""
        return self._open_thread.run(self._client.explain(request_id, client_request_id=client_request_id))

    def list_models(self) -> list[router_service_pb2.ModelInfo]:
        """Return the models that the fleet serves now."""
        return self._open_thread.run(self._client.list_models())

    def moderate(self, *texts: str) -> list[Moderation]:
        """Return which categories of the safety policy each text belongs to; see `Client.moderate`."""
        return self._open_thread.run(self._client.moderate(*texts))

    def cancel(self, request_id: str) -> CancelOutcome:
        """Cancel a running request by its id; see `Client.cancel`. Another thread may be reading it."""
        return self._open_thread.run(self._client.cancel(request_id))

    @property
    def _open_thread(self) -> LoopThread:
        if not self._finalizer.alive:
            raise RuntimeError("The client is closed.")
        return self._thread


class SyncDeltaStream:
    """The deltas of one answer, for one reader. Leaving the loop cancels the request at once, also while a variable
    refers to the stream, and so do `close()` and the end of a `with` block."""

    def __init__(self, stream: DeltaStream, thread: LoopThread) -> None:
        self._stream = stream
        self._thread = thread
        self.request_id = stream.request_id
        """The id of the request, for `SyncClient.cancel` and `SyncClient.explain`."""
        self.seed = stream.seed
        """The seed that the request gave or that was drawn."""

    def __iter__(self) -> _SyncDeltaIterator:
        return _SyncDeltaIterator(self)

    def __next__(self) -> Delta:
        try:
            return self._thread.run(_next(self._stream))
        except StopAsyncIteration:
            raise StopIteration from None
        except BaseException:
            self._stream.cancel_soon()
            raise

    def collect(self) -> Answer:
        """Read to the end. Returns the whole answer. Raises the KvloomError of a choice that fails."""
        return self._thread.run(self._stream.collect())

    def close(self) -> None:
        """Cancel the request, if it still runs. Calling it again is safe."""
        self._stream.cancel_soon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _SyncDeltaIterator:
    """The iterator that a `for` holds while it reads; see kvloom/client/delta_stream.py."""

    __slots__ = ("_stream",)

    def __init__(self, stream: SyncDeltaStream) -> None:
        self._stream = stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        return self._stream.__next__()

    def __del__(self) -> None:
        self._stream.close()


async def _next(stream: DeltaStream) -> Delta:
    return await stream.__anext__()


def _close(client: Client, thread: LoopThread) -> None:
    """Called once: by `close`, when the client is garbage, or at the end of the process."""
    try:
        if thread.is_usable:
            thread.run(client.close())
    finally:
        close_loop_thread(thread)


_T = TypeVar("_T")

STOP_SECONDS = 5.0


class LoopThread:
    """A daemon thread that runs an event loop, from the first `open` to the last `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kvloom", daemon=True)
        self._thread.start()

    @property
    def is_usable(self) -> bool:
        """A thread does not survive a fork."""
        return self._pid == os.getpid() and self._thread.is_alive()

    def run(self, job: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine there, and wait for it. An interrupt of the wait (Ctrl-C) cancels it."""
        if not self.is_usable or threading.current_thread() is self._thread:
            job.close()
            raise RuntimeError("This client cannot be used here: it was made before a fork, or runs in this thread.")
        future = asyncio.run_coroutine_threadsafe(job, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, job: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine there without waiting for it."""
        if self.is_usable:
            asyncio.run_coroutine_threadsafe(job, self._loop)
        else:
            job.close()

    def stop(self) -> None:
        if self.is_usable:
            self._loop.call_soon_threadsafe(self._loop.stop)
            if threading.current_thread() is not self._thread:
                self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            _cancel_all(self._loop)
            self._loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=STOP_SECONDS))
    loop.run_until_complete(loop.shutdown_asyncgens())


_lock = threading.Lock()
_shared: LoopThread | None = None
_num_users = 0


def open_loop_thread() -> LoopThread:
    """The loop of this process, which starts with its first user."""
    global _shared, _num_users
    with _lock:
        if _shared is None or not _shared.is_usable:
            _shared, _num_users = LoopThread(), 0
        _num_users += 1
        return _shared


def close_loop_thread(thread: LoopThread) -> None:
    """One user less. The last one stops the loop."""
    global _shared, _num_users
    with _lock:
        if thread is not _shared:
            return
        _num_users -= 1
        if _num_users:
            return
        _shared = None
    thread.stop()
