"""`DeltaStream`, the answer that `Client.generate` returns, and how leaving it cancels its request.

An asynchronous generator does not learn that its reader has left the loop as long as anything refers to it. Therefore
`async for` reads through an iterator of its own: the loop alone holds it, so Python frees it, and thereby cancels the
request, when the loop is left, be it by `break`, `return` or an exception.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Self

from kvloom.client.answer import Answer, AnswerBuilder
from kvloom.client.generation import Delta


class DeltaStream:
    """The deltas of one answer, for one reader.

        async for delta in client.generate(model=name, text="Once"):
            print(delta.text, end="")

    Leaving the loop cancels the request at once, also while a variable refers to the stream. So do `aclose()`, the end
    of an `async with` block, a cancelled task, and the garbage collection of a stream that is not read to its end. A
    loop that is left cannot be continued: a second one ends at once.
    """

    def __init__(
        self,
        deltas: AsyncGenerator[Delta, None],
        request_id: str,
        seed: int,
        num_choices: int,
        in_background: Callable[[AsyncGenerator[Delta, None]], None],
    ) -> None:
        """`in_background` closes the generator; it is called on the event loop and does not wait."""
        self._deltas = deltas
        self.request_id = request_id
        """The id of the request, for `Client.cancel` and `Client.explain`."""
        self.seed = seed
        """The seed that the request gave or that was drawn."""
        self._num_choices = num_choices
        self._in_background = in_background
        self._loop: asyncio.AbstractEventLoop | None = None
        """Set while there may be a request to cancel."""
        self._is_closed = False

    def __aiter__(self) -> _DeltaIterator:
        return _DeltaIterator(self)

    async def __anext__(self) -> Delta:
        """The next delta, without a loop. Only `aclose` and the end of all references cancel the request then."""
        if self._is_closed:
            raise StopAsyncIteration
        self._loop = asyncio.get_running_loop()
        try:
            return await self._deltas.__anext__()
        except BaseException:  # it has ended, by itself or because this task was cancelled
            self._is_closed = True
            self._loop = None
            raise

    async def collect(self) -> Answer:
        """Read to the end. Returns the whole answer. Raises the KvloomError of a choice that fails."""
        builder = AnswerBuilder(self._num_choices)
        async for delta in self:
            builder.add(delta)
        return builder.build(self.request_id, self.seed)

    async def aclose(self) -> None:
        """Cancel the request, if it still runs. Calling it again is safe."""
        self._is_closed = True
        self._loop = None
        await self._deltas.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def cancel_soon(self) -> None:
        """Cancel the request in the next turn of its event loop. Can be called from any thread."""
        loop, self._loop = self._loop, None
        self._is_closed = True
        if loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the request has ended with it
            loop.call_soon_threadsafe(self._in_background, self._deltas)

    def __del__(self) -> None:
        self.cancel_soon()


class _DeltaIterator:
    """The iterator that an `async for` holds while it reads."""

    __slots__ = ("_stream",)

    def __init__(self, stream: DeltaStream) -> None:
        self._stream = stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        return await self._stream.__anext__()

    def __del__(self) -> None:
        self._stream.cancel_soon()
