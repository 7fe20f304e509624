"""The processes in which clients and the safety service run while it fails, and the memory that they share."""

from __future__ import annotations

import concurrent.futures
import logging
import multiprocessing
from typing import Final

import structlog

_CONTEXT: Final = multiprocessing.get_context("spawn")


class JudgedText:
    """How much of each answer has been judged, by its number, which is the `safety_identifier` of its request."""

    def __init__(self, num_answers: int) -> None:
        self._allowed = _CONTEXT.RawArray("b", num_answers)
        self._clear = _CONTEXT.RawArray("i", num_answers)

    def allow(self, number: int) -> None:
        self._allowed[number] = 1

    def clear(self, number: int, num_chars: int) -> None:
        self._clear[number] = max(num_chars, self._clear[number])

    def num_clear_chars(self, number: int) -> int:
        """How many characters of the answer may be shown by now."""
        return self._clear[number] if self._allowed[number] else 0


class SharedState:
    """Holds all that the processes tell one another. It can be given to a process only when that is started."""

    def __init__(self, num_answers: int) -> None:
        self.judged = JudgedText(num_answers)
        self.safety_listens = _CONTEXT.Event()
        self.num_taken = _CONTEXT.RawValue("i")
        """How many requests the engine has."""
        self.may_write = _CONTEXT.Event()
        """All clients have asked, so the engine may begin."""
        self.is_over = _CONTEXT.Event()
        """Nothing more is to be done."""


_given: SharedState


def shared_state() -> SharedState:
    """That of this process, which `process_pool` has started."""
    return _given


def process_pool(num_processes: int, state: SharedState) -> concurrent.futures.ProcessPoolExecutor:
    """Processes that get this state and log nothing."""
    return concurrent.futures.ProcessPoolExecutor(num_processes, _CONTEXT, _take, (state,))


def _take(state: SharedState) -> None:
    global _given
    _given = state
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
