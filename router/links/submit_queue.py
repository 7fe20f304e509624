"""What one client has sent and the router has not taken in: long prompts are taken in one a turn of the event loop.

An edge's frame may bring several that have come to it at the same time; taking them in in a row would keep all other
streams' tokens waiting for some milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvloom.errors import KvloomError
from kvloom.v1.router_service_pb2 import RouterServiceConnectRequest, Submit

LONG_PROMPT_TOKENS: Final = 1024
"""A shorter one takes less time than the turn."""
MAX_WAITING: Final = 1024
"""Of more than these nobody waits for a turn: a client must not make the router keep what it sends."""


class SubmitQueue:
    """Submits and cancels, taken in as they came."""

    def __init__(
        self,
        on_submit: Callable[[Submit], None],
        on_cancel: Callable[[Sequence[int]], None],
        on_fault: Callable[[KvloomError], None],
        on_empty: Callable[[], None],
    ) -> None:
        """`on_submit` and `on_cancel` may raise KvloomError: at once out of `add`, later it goes to `on_fault`.
        `on_empty`: what waited has been taken in."""
        self._on_submit = on_submit
        self._on_cancel = on_cancel
        self._on_fault = on_fault
        self._on_empty = on_empty
        self._waiting: deque[Submit | Sequence[int]] = deque()
        self._num_tokens = 0
        """Taken in since the last turn of its own; from LONG_PROMPT_TOKENS on the next one has been asked for."""
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, frame: RouterServiceConnectRequest) -> None:
        """Raises KvloomError."""
        self._waiting += frame.submits
        if frame.cancel_slots:
            self._waiting.append(frame.cancel_slots[:])
        if self._num_tokens < LONG_PROMPT_TOKENS or len(self._waiting) > MAX_WAITING:
            self._take()

    def clear(self) -> None:
        self._waiting.clear()

    def _take(self) -> None:
        """As much as is left of this turn; several frames may come in it."""
        waiting = self._waiting
        had_turn = self._num_tokens < LONG_PROMPT_TOKENS
        while waiting and (self._num_tokens < LONG_PROMPT_TOKENS or len(waiting) > MAX_WAITING):
            one = waiting.popleft()
            if isinstance(one, Submit):
                self._num_tokens += len(one.prompt_token_ids) or len(one.packed_prompt_token_ids) // 4
                self._on_submit(one)
            else:
                self._on_cancel(one)
        if had_turn and self._num_tokens >= LONG_PROMPT_TOKENS:
            self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._num_tokens = 0
        try:
            self._take()
        except KvloomError as error:
            self.clear()
            self._on_fault(error)
            return
        if not self._waiting:
            self._on_empty()
