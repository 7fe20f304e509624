"""The decision log records why requests were placed where they were: the latest ones for `Explain`, and all of them for
the decision log's file, if there is one."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR
from router.core.actions import PlacementDecided, RequestEnded
from router.core.priority_classes import CLASS_OF_TIER, PriorityClass
from router.decisions.journal import DecisionJournal
from router.decisions.packing import pack_attempt, unpack_attempt
from router.decisions.records import AttemptRecord, RequestLine

MAX_REMEMBERED_BYTES: Final = 64 * 2**20
"""The limit for everything that is remembered. It is reached before `max_remembered` only with hundreds of shards."""


UNPLACED_PART: Final = 4
"""One in so many remembered requests may be one that was never placed."""


class RememberedRequest(msgspec.Struct):
    """A request that was placed, or ended with an error before."""

    request_id: str
    num_prompt_tokens: int
    tenant: str
    priority_class: PriorityClass
    fairness_id: str = ""
    client_request_id: str = ""
    brownout: str = ""
    """How its answer is degraded; see SequenceStart.brownout in generation.proto."""
    packed_attempts: list[bytes] = []
    last_attempt_id: int = 0
    """0 while only its prompt has been placed (router/core/dispatch/prefill_handoffs.py)."""
    ended: RequestEnded | None = None
    """None while it still runs."""
    refused_at: float = 0.0
    """When it ended, if it was never placed; in Unix seconds."""
    line: RequestLine | None = None
    """The file's line, which is written once the request has ended."""

    @property
    def attempts(self) -> list[AttemptRecord]:
        return [unpack_attempt(packed) for packed in self.packed_attempts]

    @property
    def arrived_at(self) -> float:
        """In Unix seconds, to some milliseconds: the first placement, less the time in the queue."""
        placed_at = unpack_attempt(self.packed_attempts[0]).decided_at if self.packed_attempts else self.refused_at
        return placed_at - (0.0 if self.ended is None else self.ended.queue_time_seconds)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.packed_attempts)) + (len(self.line.block_hashes) if self.line is not None else 0)


class DecisionLog:
    """Joins the placements and the end of each request by request id. Its size is bounded: the oldest requests are
    forgotten."""

    def __init__(
        self,
        max_remembered: int,
        journal: DecisionJournal | None = None,
        *,
        max_remembered_bytes: int = MAX_REMEMBERED_BYTES,
        remembers_unplaced: Callable[[str], bool] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`remembers_unplaced` says by its id whether a request is to be remembered that ended with an error before it
        was placed; None: none is. `clock` returns Unix seconds."""
        self._remembers_unplaced = remembers_unplaced
        self._max_remembered = max_remembered
        self._journal = journal
        self._max_remembered_bytes = max_remembered_bytes
        self._clock = clock
        self._remembered: OrderedDict[str, RememberedRequest] = OrderedDict()
        self._by_client_request_id: dict[str, dict[str, None]] = {}
        """The ids of the remembered requests that a caller gave the same id, oldest first."""
        self._num_bytes = 0
        self._max_unplaced = max_remembered // UNPLACED_PART
        self._unplaced: dict[str, None] = {}
        """The ids of the remembered requests that were never placed, oldest first."""

    @property
    def num_remembered(self) -> int:
        return len(self._remembered)

    def find(self, request_id: str) -> RememberedRequest | None:
        return self._remembered.get(request_id)

    def find_by_client_request_id(self, client_request_id: str) -> list[str]:
        """The ids of the requests that have this id of their caller's, latest first."""
        return list(reversed(self._by_client_request_id.get(client_request_id, {})))

    def latest_ended(self, is_wanted: Callable[[str], bool], most: int) -> list[RememberedRequest]:
        """At most so many requests that have ended and whose tenant is wanted, the latest placed first."""
        newest = reversed(self._remembered.values())
        ended = (one for one in newest if one.ended is not None and is_wanted(one.tenant))
        return list(itertools.islice(ended, most))

    def placement_decided(self, decision: PlacementDecided) -> None:
        request, now = decision.request, self._clock()
        request_id = request.request_id
        remembered = self._remembered.get(request_id)
        attempt_id = decision.attempt_id
        if remembered is None or (attempt_id <= 1 and (remembered.last_attempt_id or remembered.ended is not None)):
            remembered = RememberedRequest(
                request_id,
                decision.pick.num_prompt_tokens,
                request.tenant,
                request.priority_class or CLASS_OF_TIER[request.tier],
                request.fairness_id,
                request.client_request_id,
                "" if request.degradation is None else str(request.degradation),
            )
            self._remember(remembered)
            if self._journal is not None and attempt_id <= 1:
                remembered.line = self._journal.begin_line(decision, now)
                self._num_bytes += len(remembered.line.block_hashes)
        remembered.last_attempt_id = attempt_id
        packed = pack_attempt(decision, now)
        remembered.packed_attempts.append(packed)
        self._num_bytes += len(packed)
        if len(self._remembered) > self._max_remembered or self._num_bytes > self._max_remembered_bytes:
            self._forget_oldest()

    def _remember(self, remembered: RememberedRequest) -> None:
        request_id, client_request_id = remembered.request_id, remembered.client_request_id
        if request_id in self._remembered:
            self._forget(request_id)  # This is an earlier request of the same id.
        self._remembered[request_id] = remembered
        if client_request_id:
            self._by_client_request_id.setdefault(client_request_id, {})[request_id] = None

    def request_ended(self, ended: RequestEnded) -> None:
        if not ended.num_attempts:
            # A rejected one may have the id of an earlier request, which still runs.
            remembers = self._remembers_unplaced
            if remembers is not None and ended.reason == FINISH_REASON_ERROR and remembers(ended.request_id):
                self._remember_unplaced(ended)
                if self._journal is not None:
                    self._journal.write_refused(ended)
            return
        remembered = self._remembered.get(ended.request_id)
        if remembered is None or remembered.ended is not None:
            return
        remembered.ended = ended
        line, remembered.line = remembered.line, None
        if line is not None and self._journal is not None:
            self._num_bytes -= len(line.block_hashes)
            self._journal.end_line(line, ended, remembered.attempts)

    def _remember_unplaced(self, ended: RequestEnded) -> None:
        """Remember a request that was refused, or left the queue with an error. One of the same id that was placed is
        not forgotten for it. In a flood of refusals, most displace only earlier ones."""
        request_id = ended.request_id
        if request_id in self._remembered and request_id not in self._unplaced:
            return
        while self._unplaced and len(self._unplaced) >= self._max_unplaced:
            self._forget(next(iter(self._unplaced)))
        if self._max_unplaced:
            remembered = RememberedRequest(
                request_id,
                ended.num_prompt_tokens,
                ended.tenant,
                ended.priority_class,
                client_request_id=ended.client_request_id,
                ended=ended,
                refused_at=self._clock(),
            )
            self._remember(remembered)
            self._unplaced[request_id] = None
            self._forget_oldest()

    def fleet_changed(self) -> None:
        """Called when shards have come, gone or begun to drain."""
        if self._journal is not None:
            self._journal.fleet_changed()

    def _forget_oldest(self) -> None:
        """Keep within the bounds."""
        while len(self._remembered) > self._max_remembered or (
            self._num_bytes > self._max_remembered_bytes and len(self._remembered) > 1
        ):
            self._forget(next(iter(self._remembered)))

    def _forget(self, request_id: str) -> None:
        forgotten = self._remembered.pop(request_id, None)
        if forgotten is None:
            return
        self._num_bytes -= forgotten.num_bytes
        self._unplaced.pop(request_id, None)
        siblings = self._by_client_request_id.get(forgotten.client_request_id)
        if siblings is not None:
            del siblings[request_id]
            if not siblings:
                del self._by_client_request_id[forgotten.client_request_id]
        if forgotten.line is not None and self._journal is not None:
            self._journal.drop_line()
