"""Admission holds the places of requests and the memory of their bodies and answers, and ends with the process."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Final

from edge_http.wire.fair_yield import FairYield
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.config import CallersConfig, EdgeConfig
from kvloom_common.limits.address_limit import KeyedCounts
from kvloom_common.limits.byte_budget import ByteBudget, memory_error
from kvloom_common.limits.memory_watch import LARGE_BYTES, MemoryLevel

BUSY_RETRY_SECONDS: Final = 1.0
DRAINING_RETRY_SECONDS: Final = 5.0
PENDING_BODIES: Final = 64
"""All bodies together that are being received or parsed may have so many times `max_body_bytes`. Beyond that requests
are rejected at once."""


class EdgeSettings(EdgeConfig):
    stream_head_seconds: float = 0.5
    """A stream that was not refused in this time begins, with status 200 and headers, before twice the time is over.
    From then on an error is an event. 0: it begins with its first token, or with what keeps it alive."""
    max_header_bytes: int = 16 * 2**10
    """A request line or a header; all together may have twice that. Proxies and browsers send at most 8 or 16 KiB."""
    max_messages: int = 4096
    """More messages than any context window holds."""
    max_buffered_bytes: int = 256 * 2**10
    """The bytes that may wait for a slow reader, per stream: some ten thousand tokens. Beyond that the request is
    cancelled."""
    max_answer_bytes: int = 32 * 2**20
    """The size of an answer that is not streamed. Beyond that the request is cancelled. No model's longest answers,
    with log-probabilities, come near."""
    max_pending_answer_bytes: int = 256 * 2**20
    """The size of all answers together that are not streamed, while they are collected and sent. Beyond that the
    answer that needs more fails."""


class AdmissionPermit:
    """A running request's place under the concurrency limit. The end of the `with` block releases it, unless
    `handed_over` is set: then the code that took the permit over must call `release`."""

    __slots__ = ("handed_over", "release")

    def __init__(self, release: Callable[[], None]) -> None:
        self.release = release
        self.handed_over = False

    def __enter__(self) -> AdmissionPermit:
        return self

    def __exit__(self, *_fault: object) -> None:
        if not self.handed_over:
            self.release()


class Admission:
    """Decides which requests are served. It lives on the event loop."""

    def __init__(self, config: EdgeSettings, caller_limits: CallersConfig) -> None:
        self.caller_limits = caller_limits
        self._config = config
        self.bodies = ByteBudget(
            PENDING_BODIES * config.max_body_bytes,
            "request bodies",
            least_share_bytes=config.max_body_bytes,
            ends_large=True,
        )
        """The bytes of requests that have been received but not processed yet."""
        self.collected = ByteBudget(
            config.max_pending_answer_bytes, "answers that are not streamed", least_share_bytes=config.max_answer_bytes
        )
        """The bytes of answers that are collected or being sent."""
        self.pipelined = ByteBudget(PENDING_BODIES * config.max_body_bytes // 4, "pipelined requests")
        """The bytes of requests that wait behind another one of their connection."""
        self.fair_yield = FairYield()
        self.num_running = 0
        self._num_running_by_caller = KeyedCounts[str]()
        self.draining = False
        self.leaving = False
        """True when a successor accepts new connections: each existing one is served one last request, then closed."""
        self._refuses_all = False
        """Draining, or out of memory."""
        self._idle = asyncio.Event()
        self._idle.set()

    def drain(self) -> None:
        """Admit no new requests from now on; running ones continue."""
        self.draining = self._refuses_all = True

    def on_memory_level(self, level: MemoryLevel) -> None:
        """Running answers continue at every level."""
        self._refuses_all = self.draining or level >= MemoryLevel.FULL
        for budget in (self.bodies, self.collected, self.pipelined):
            budget.restrict(None if level == MemoryLevel.NORMAL else LARGE_BYTES)

    def is_idle(self) -> bool:
        """True when no request runs."""
        return not self.num_running

    async def wait_idle(self) -> None:
        """Return once no request runs."""
        await self._idle.wait()

    def admit(self, caller: str) -> AdmissionPermit:
        """Admit one more running request of this caller. Raises KvloomError (DRAINING, OVERLOADED, RATE_LIMITED,
        QUEUE_FULL)."""
        if self._refuses_all:
            raise draining_error() if self.draining else memory_error()
        limit = self.caller_limits.max_concurrent_requests
        if caller and self._num_running_by_caller[caller] >= limit:
            raise caller_limit_error(limit)
        self.check_room()
        self.num_running += 1
        self._num_running_by_caller.add(caller)
        self._idle.clear()
        return AdmissionPermit(functools.partial(self._release, caller))

    def check_room(self) -> None:
        """A request whose body is still being received does not count until the body is complete. Raises KvloomError
        (QUEUE_FULL)."""
        if self.num_running - self.bodies.num_leases >= self._config.max_concurrent_requests:
            raise KvloomError(
                ErrorReason.ERROR_REASON_QUEUE_FULL,
                "This server is at its limit of concurrent requests.",
                retry_after_seconds=BUSY_RETRY_SECONDS,
            )

    def _release(self, caller: str) -> None:
        self.num_running -= 1
        self._num_running_by_caller.remove(caller)
        if not self.num_running:
            self._idle.set()


def caller_limit_error(max_requests: int) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_RATE_LIMITED,
        f"You have {max_requests} requests running at this server, which is the most that one caller may have "
        "(callers.max_concurrent_requests).",
        retry_after_seconds=BUSY_RETRY_SECONDS,
    )


def draining_error() -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_DRAINING,
        "This server is stopping and takes no new requests.",
        retry_after_seconds=DRAINING_RETRY_SECONDS,
    )
