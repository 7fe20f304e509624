"""Refuses requests before the queue is full: those that would wait longer than they may.

Little's law: n requests ahead, served at a rate that was measured while requests waited (so that it is the capacity,
not the demand), take n / rate seconds. A request whose wait would exceed `max_queue_seconds`, or leave it too little
time to be answered before its deadline, is refused on arrival, when that costs nothing. A waiting request is dropped as
soon as it can no longer be answered in time, so that no shard works in vain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import xxhash

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from router.core.actions import Action, RequestEnded, SubmitAttempt
from router.core.dispatch.dispatch_queue import DispatchQueue
from router.core.events import JUDGE_TIER, OWN_CLIENT_IDS, Request, class_of
from router.core.live import LiveRequest
from router.core.priority_classes import MAX_PLACED_RANK
from router.core.rule_settings import OverloadSettings

RATE_SECONDS: Final = 10.0
"""Time constant of the measured rates, in seconds during which requests waited."""
MIN_MEASURED_SECONDS: Final = 0.5
MIN_MEASURED_REQUESTS: Final = 4.0
"""Below this many requests the rate is not known: only the queue's bound holds."""
SERVICE_SMOOTHING: Final = 0.05
"""Weight of one request in the moving averages of service times."""
MIN_WAIT_SHARE: Final = 0.02
"""Share of a request's time: a shorter wait never costs it its answer, whatever the averages say."""
MIN_SHARE_OF_RATE: Final = 0.02
"""The least share of the fleet that the lower tier is assumed to get, however much work the higher one brings."""
MIN_REQUESTS_PER_SECOND: Final = 1e-3
"""A queue that moves slower counts as moving so fast."""
MIN_RETRY_SECONDS: Final = 1.0
MAX_RETRY_SECONDS: Final = 60.0
"""Clients (OpenAI's among them) follow no longer advice."""
MAX_MODELS: Final = 64

_HASH_RANGE: Final = 2.0**64
_WELL: Final = (FINISH_REASON_STOP, FINISH_REASON_LENGTH)


def retry_after_seconds(request_id: str, wait_seconds: float = 2.0) -> float:
    """Advice that spreads requests that were refused together over once the time that they should wait."""
    jitter = xxhash.xxh3_64_intdigest(request_id.encode("utf-8", "replace")) / _HASH_RANGE
    wait_seconds = min(max(wait_seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
    return min(wait_seconds * (0.5 + jitter), MAX_RETRY_SECONDS)


class DrainRate:
    """Requests per second that left the router's queue while others waited in it."""

    __slots__ = ("_at", "_count", "_has_waiting", "_seconds")

    def __init__(self) -> None:
        self._at = 0.0
        self._has_waiting = False
        self._seconds = 0.0
        self._count = 0.0

    def note(self, now: float, num_left: int, *, has_waiting: bool) -> None:
        """Record how many left since the last call, and whether a request waits from now on."""
        if self._has_waiting:
            elapsed = now - self._at
            decay = math.exp(-elapsed / RATE_SECONDS) if elapsed else 1.0
            self._seconds = self._seconds * decay + elapsed
            self._count = self._count * decay + num_left
        self._at = now
        self._has_waiting = has_waiting

    def per_second(self) -> float | None:
        """None: not measured yet."""
        if self._seconds < MIN_MEASURED_SECONDS or self._count < MIN_MEASURED_REQUESTS:
            # A queue that does not move is measured all the same.
            return None if self._seconds < RATE_SECONDS / 2 else self._count / self._seconds
        return self._count / self._seconds


class _Model:
    """The measurements of one model's requests."""

    __slots__ = (
        "drain",
        "interactive_at",
        "interactive_sum",
        "num_dispatched",
        "output_share",
        "output_tokens",
        "prefill_seconds",
        "seconds_per_token",
    )

    def __init__(self) -> None:
        self.drain = DrainRate()
        self.num_dispatched = 0
        """Since the last call of `note`."""
        self.prefill_seconds = 0.0
        """From dispatch to first token."""
        self.seconds_per_token: float | None = None
        self.output_tokens = 0.0
        """The mean number of output tokens of requests without a limit."""
        self.output_share: float | None = None
        """The share of their limit that requests with one used."""
        self.interactive_sum = 0.0
        self.interactive_at = 0.0

    def note_interactive(self, now: float) -> None:
        self.interactive_sum = self.interactive_sum * math.exp((self.interactive_at - now) / RATE_SECONDS) + 1.0
        self.interactive_at = now

    def interactive_per_second(self, now: float) -> float:
        return self.interactive_sum * math.exp((self.interactive_at - now) / RATE_SECONDS) / RATE_SECONDS

    def learn(self, ended: RequestEnded) -> None:
        """Learn from an answer that came to its own end. An embedding says nothing about answers, and neither does a
        prompt that is only scored."""
        if ended.ttft_seconds is None or ended.max_tokens == 0 or ended.client_id in OWN_CLIENT_IDS:
            return
        self.prefill_seconds = _smoothed(self.prefill_seconds, ended.ttft_seconds - ended.queue_time_seconds)
        num_tokens = ended.num_output_tokens / ended.num_choices
        if num_tokens > 1:
            seconds = (ended.e2e_latency_seconds - ended.ttft_seconds) / (num_tokens - 1)
            self.seconds_per_token = _smoothed(self.seconds_per_token, seconds)
        if ended.max_tokens is None:
            self.output_tokens = _smoothed(self.output_tokens or None, num_tokens)
        else:
            self.output_share = _smoothed(self.output_share, min(1.0, num_tokens / ended.max_tokens))

    def decode_seconds(self, max_tokens: int | None) -> float:
        """From first to last token, for a request like earlier ones; 0 when nothing is known."""
        if self.seconds_per_token is None:
            return 0.0
        num_tokens = self.output_tokens if max_tokens is None else max_tokens * (self.output_share or 0.0)
        return num_tokens * self.seconds_per_token

    def service_seconds(self, max_tokens: int | None) -> float:
        """From dispatch to last token."""
        return self.prefill_seconds + self.decode_seconds(max_tokens)


class OverloadGuard:
    """Pure, like all of the core; measures per model."""

    def __init__(self, config: OverloadSettings, queue: DispatchQueue, max_queue_seconds: float) -> None:
        self._config = config
        self._queue = queue
        self._queues = queue.queues
        self._max_queue_seconds = max_queue_seconds
        self._models: dict[str, _Model] = {}
        self.has_waited = False
        """True when a request of any model waited since the last call of `note`."""

    # -- measuring ------------------------------------------------------------------------------------------------

    def note_admitted(self, live: LiveRequest, now: float) -> None:
        if live.priority_class.rank <= MAX_PLACED_RANK:
            self._model(live.request.model).note_interactive(now)

    def note_event(self, actions: Iterable[Action], now: float) -> None:
        """Record the actions that followed an event."""
        is_idle = not (self.has_waited or self._queues.num_requests)
        for action in actions:
            if type(action) is SubmitAttempt:
                is_idle = False
                self._model(action.request.model).num_dispatched += action.attempt_id == 1
            elif type(action) is RequestEnded and action.num_attempts == 1 and action.reason in _WELL:
                self._model(action.model).learn(action)
        if is_idle:  # there is nothing to measure, as with nearly all steps
            return
        # What waits for a first shard says nothing of how fast shards are.
        waiting = {name for name, _ in self._queues.counts() if self._queue.has_shard(name)}
        self.has_waited = False
        for name, model in self._models.items():
            has_waiting = name in waiting
            self.has_waited = self.has_waited or has_waiting
            model.drain.note(now, model.num_dispatched, has_waiting=has_waiting)
            model.num_dispatched = 0

    # -- judging --------------------------------------------------------------------------------------------------

    def refusal(self, request: Request, timeout_seconds: float, now: float) -> KvloomError | None:
        """The reason why the request would wait in vain; None when it would not, or when that is not known."""
        if not self._config.sheds_load_early or request.tier is JUDGE_TIER:  # what waits for it was admitted
            return None
        engine_seconds = self._queue.engine_wait_seconds(request.model, now)
        wait_seconds = engine_seconds
        # Where a shard has nothing to do, those that wait do it for what is cached elsewhere, or for blocks there.
        if self._queues.num_waiting(request.model) and self._queue.is_busy(request.model):
            wait_seconds += self.wait_seconds(request, now) or 0.0
        if not wait_seconds or wait_seconds <= MIN_WAIT_SHARE * min(timeout_seconds, self._max_queue_of(request)):
            return None
        measured = self._model(request.model)
        # The wait in the engine is part of the time measured between dispatch and first token.
        answer_seconds = measured.decode_seconds(request.max_tokens)
        answer_seconds += max(0.0, measured.prefill_seconds - engine_seconds) if answer_seconds else 0.0
        if wait_seconds <= min(self._max_queue_of(request), timeout_seconds - answer_seconds):
            return None
        return KvloomError(
            ErrorReason.ERROR_REASON_QUEUE_FULL,
            f"Too many requests are waiting: this one would wait about {wait_seconds:.1f} seconds, which is more than "
            f"it may.",
            retry_after_seconds=retry_after_seconds(request.request_id, wait_seconds),
        )

    def wait_seconds(self, request: Request, now: float) -> float | None:
        """How long the request would wait in the router if it arrived now; None: not known."""
        measured = self._models.get(request.model)
        rate = None if measured is None else measured.drain.per_second()
        if rate is None or measured is None:
            return None
        priority_class = class_of(request)
        num_ahead = self._queues.num_ahead(request.model, priority_class.rank, request.tenant)
        if priority_class.is_parked:
            # Requests that arrive meanwhile in a more urgent class go first.
            rate = max(rate - measured.interactive_per_second(now), rate * MIN_SHARE_OF_RATE)
        return (num_ahead + 1) / max(rate, MIN_REQUESTS_PER_SECOND)

    def measured(self, model: str) -> tuple[float | None, float]:
        """How many requests for the model leave the queue in a second while others wait, None if that is not known, and
        the seconds from dispatch to first token; 0: not known."""
        found = self._models.get(model)
        return (None, 0.0) if found is None else (found.drain.per_second(), found.prefill_seconds)

    def queue_deadline(self, live: LiveRequest, deadline: float, now: float) -> float:
        """When a waiting request can no longer be answered in time, or has waited as long as any request may."""
        limit = live.priority_class.max_queue_seconds
        latest = min(deadline, now + (self._max_queue_seconds if limit is None else limit))
        if self._config.sheds_load_early and live.request.tier is not JUDGE_TIER:
            measured = self._models.get(live.request.model)
            if measured is not None:
                latest = min(latest, deadline - measured.service_seconds(live.request.max_tokens))
        return max(latest, now)

    def waits_for_deadline(self, live: LiveRequest) -> bool:
        """True when it is its caller's deadline, and not the limit of waiting, that ends its wait."""
        objectives = live.objectives
        if objectives is None or objectives.deadline > live.deadline:
            return False
        return live.queue_deadline < live.arrived_at + self._max_queue_of(live.request)

    def _max_queue_of(self, request: Request) -> float:
        limit = class_of(request).max_queue_seconds
        return self._max_queue_seconds if limit is None else limit

    def full(self, request: Request, now: float) -> KvloomError:
        """The error for a full queue."""
        wait_seconds = self.wait_seconds(request, now)
        return KvloomError(
            ErrorReason.ERROR_REASON_QUEUE_FULL,
            "Too many requests are waiting; try again later.",
            retry_after_seconds=retry_after_seconds(request.request_id, 2.0 if wait_seconds is None else wait_seconds),
        )

    def _model(self, name: str) -> _Model:
        """Only for models that the fleet serves or has served; when there are many, the oldest is forgotten."""
        model = self._models.get(name)
        if model is None:
            if len(self._models) >= MAX_MODELS:
                del self._models[next(iter(self._models))]
            model = self._models[name] = _Model()
        return model


def _smoothed(average: float | None, value: float) -> float:
    return value if not average else average + SERVICE_SMOOTHING * (value - average)
