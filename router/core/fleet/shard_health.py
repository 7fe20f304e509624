"""The health of a shard is its token progress, not an answered ping: a circuit breaker per shard, and its evidence.

    HEALTHY ──symptom──▶ SUSPECTED ──a probe in time──▶ PROBING ──more probes in time──▶ HEALTHY
                             ▲                             │
                             └────────── symptom, or a probe missed

A suspected shard gets no new work, and its running requests move. Probes are requests for one token. While it is being
probed (half-open) it gets a trickle: one request, and more with every first token that it produces.

Pure: callers pass the time. A step frame costs a few additions, whatever it contains.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from statistics import median
from typing import Final

from kvloom.backoff import Backoff
from router.core.events import ShardLoad
from router.core.rule_settings import HealthSettings

MIN_EVIDENCE: Final = 0.6
"""Share of `slow_seconds` during which a shard must have been seen decoding before its pace is judged or compared with.
"""
MAX_EVIDENCE_AGE_SECONDS: Final = 60.0
THROUGHPUT_SHARE: Final = 0.5
"""A shard is slow if it produces less than this share of its peers' throughput. A larger batch makes every sequence
slower, but all of them together faster."""
FLAP_SECONDS: Final = 60.0
"""A shard that trips again within this time continues with its previous back-off."""


class HealthState(enum.Enum):
    HEALTHY = "healthy"
    SUSPECTED = "suspected"
    PROBING = "probing"


class Symptom(enum.StrEnum):
    STALLED = "stalled"
    SLOW = "slow"
    FAILING = "failing"


def check_seconds(settings: HealthSettings) -> float:
    """The time between two checks of the shards."""
    return min(settings.stall_seconds / 10, 0.5)


class Pace:
    """How fast a shard decodes while it prefills nothing: an average over its last `window_seconds` of doing so."""

    __slots__ = ("_decode_seconds", "_num_tokens", "_sequence_seconds", "_window_seconds", "noted_at")

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self.noted_at = 0.0
        self._decode_seconds = 0.0
        self._sequence_seconds = 0.0
        self._num_tokens = 0.0

    def note(self, seconds: float, num_decoding: int, num_tokens: int, now: float) -> None:
        """Record the tokens that came at the end of `seconds` during which `num_decoding` sequences decoded."""
        weight = max(0.0, 1.0 - seconds / self._window_seconds)
        self._decode_seconds = self._decode_seconds * weight + seconds
        self._sequence_seconds = self._sequence_seconds * weight + seconds * num_decoding
        self._num_tokens = self._num_tokens * weight + num_tokens
        self.noted_at = now

    def is_known(self, now: float) -> bool:
        is_new = now - self.noted_at <= MAX_EVIDENCE_AGE_SECONDS
        return is_new and self._decode_seconds >= MIN_EVIDENCE * self._window_seconds

    @property
    def per_sequence(self) -> float:
        """Tokens per second of one sequence."""
        return self._num_tokens / self._sequence_seconds

    @property
    def throughput(self) -> float:
        """Tokens per second of all sequences together."""
        return self._num_tokens / self._decode_seconds

    def is_slow(self, peers: Sequence[Pace], factor: float) -> bool:
        """True when it is slower than its peers by `factor`. All paces must be known; without peers no shard is
        slow."""
        if not peers:
            return False
        usual = median(peer.per_sequence for peer in peers)
        throughput = median(peer.throughput for peer in peers)
        return self.per_sequence * factor <= usual and self.throughput <= THROUGHPUT_SHARE * throughput


class ShardHealth:
    """Evidence about one shard, and its circuit breaker."""

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self.state = HealthState.HEALTHY
        self.symptom: Symptom | None = None
        """The reason why it is not healthy."""
        self.pace = Pace(settings.slow_seconds)
        self.silent_seconds = 0.0
        """Time without progress while it had work and this router was running."""
        self.num_failures = 0
        """Engine failures since a sequence last ended well."""
        self._noted_at = 0.0
        self._load = ShardLoad()
        self._backoff = Backoff(settings.probe_seconds, settings.max_probe_seconds)
        self._closed_at = -FLAP_SECONDS
        self._num_answered = 0
        self._was_missed = False
        self._answer: bool | None = None
        self.probe_slot: int | None = None
        """The slot of the probe on the shard's stream, while there is one."""
        self._probe_sent_at = 0.0
        self._probe_limit_seconds = 0.0
        self.probe_at = 0.0
        """When the next probe is due."""

    # -- evidence -------------------------------------------------------------------------------------------------

    def note_step(self, num_tokens: int, num_decoding: int, now: float, *, is_prefilling: bool) -> None:
        """Record a frame with output. `num_decoding` sequences had their first token before it."""
        self.silent_seconds = 0.0
        seconds = now - self._noted_at
        self._noted_at = now
        if num_decoding and not is_prefilling:
            # A longer silence is a stall, or this router was not running.
            self.pace.note(min(seconds, self._settings.stall_seconds), num_decoding, num_tokens, now)

    def note_end(self, slot: int, now: float, *, is_good: bool, is_failure: bool) -> None:
        """A sequence has ended there: well, by a failure of the engine, or neither (cancelled, refused)."""
        if is_good:
            self.silent_seconds = 0.0
            self.num_failures = 0
        elif is_failure:
            self.num_failures += 1
        if slot == self.probe_slot:
            self.probe_slot = None
            if not self._was_missed:
                self._answer = is_good and now - self._probe_sent_at <= self._probe_limit_seconds
            elif is_good:  # too late, but a sign of life
                self.probe_at = min(self.probe_at, now + self._settings.probe_seconds)

    def note_load(self, load: ShardLoad) -> None:
        """Record a load report. A report whose counts only grow shows that work arrives, not that any is done."""
        last, self._load = self._load, load
        if (
            load.num_queued_prefill_tokens < last.num_queued_prefill_tokens
            or load.num_decode_context_tokens != last.num_decode_context_tokens
            or load.num_running != last.num_running
        ):
            self.silent_seconds = 0.0

    def note_time(self, seconds: float, *, has_work: bool) -> None:
        """Record time in which this router was running."""
        self.silent_seconds = self.silent_seconds + seconds if has_work else 0.0

    # -- the breaker ----------------------------------------------------------------------------------------------

    @property
    def is_suspected(self) -> bool:
        return self.state is HealthState.SUSPECTED

    def trip(self, symptom: Symptom, now: float) -> None:
        """Suspect the shard."""
        is_again = self.state is HealthState.PROBING or now - self._closed_at < FLAP_SECONDS
        if not is_again:
            self._backoff.num_failures = 0
        self.state = HealthState.SUSPECTED
        self.symptom = symptom
        self._reset_evidence()
        self.probe_at = now + self._backoff.next_seconds()

    def send_probe(self, slot: int, limit_seconds: float, now: float) -> None:
        self.probe_slot = slot
        self._probe_sent_at = now
        self._probe_limit_seconds = limit_seconds
        self._was_missed = False

    def is_probe_overdue(self, now: float) -> bool:
        """True once for every probe that has not been answered in time."""
        is_late = self.probe_slot is not None and now - self._probe_sent_at > self._probe_limit_seconds
        return is_late and not self._was_missed

    def miss_probe(self, now: float) -> None:
        """A probe was not answered in time, or answered with a failure."""
        self._was_missed = True
        self._num_answered = 0
        self.state = HealthState.SUSPECTED
        self.probe_at = now + self._backoff.next_seconds()

    def take_answer(self, now: float) -> None:
        """Update the state after an answer that came since the last call."""
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if not answer:
            self.miss_probe(now)
        else:
            self._num_answered += 1
            self.probe_at = now
            self.state = HealthState.PROBING
            if self._num_answered >= self._settings.num_probes:
                self._close(now)

    def reconnect(self, now: float) -> None:
        """The same process is connected again, over a new stream."""
        self.probe_slot = None
        self._answer = None
        self._num_answered = 0
        self.state = HealthState.SUSPECTED
        self._noted_at = now
        self._load = ShardLoad()
        self._reset_evidence()
        self.probe_at = now

    def _close(self, now: float) -> None:
        self.state = HealthState.HEALTHY
        self.symptom = None
        self._closed_at = now
        self._num_answered = 0
        self._reset_evidence()

    def _reset_evidence(self) -> None:
        """Evidence that led to one trip must not lead to the next."""
        self.pace = Pace(self._settings.slow_seconds)
        self.silent_seconds = 0.0
        self.num_failures = 0
