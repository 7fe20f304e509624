"""One model and its candidate: ended answers that wait, requests under way at the candidate, and what they gave."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from kvloom.errors import reason_name
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    TokenLogprobs,
)
from kvloom_common.config import ShadowConfig
from kvloom_common.finish_reasons import FINISH_REASON_NAMES
from router.core.frames import Finish
from router.features.shadow.metrics import PairMetrics, ShadowMetrics
from router.features.shadow.sampling import Sample

MAX_WAIT_SECONDS: Final = 30.0
"""How long an ended answer waits for the candidate to have room."""


class ShadowSettings(ShadowConfig):
    max_queued: int = 64
    """How many ended answers a router keeps until the candidate has room, within `MAX_WAIT_SECONDS`. Further ones are
    skipped."""
    max_tokens: int = 4096
    """The largest prompt and answer together. Larger ones are skipped, so that no sample takes long."""


GOOD_ENDS: Final = (FINISH_REASON_STOP, FINISH_REASON_LENGTH)
_BUSY: Final = frozenset(
    {
        ErrorReason.ERROR_REASON_QUEUE_FULL,
        ErrorReason.ERROR_REASON_QUEUE_TIMEOUT,
        ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED,
        ErrorReason.ERROR_REASON_DRAINING,
        ErrorReason.ERROR_REASON_NO_SHARD_READY,
    }
)


class Skip(enum.StrEnum):
    """Why a sampled answer is not compared."""

    CHOICES = "choices"
    """The request asks for several answers, or continues one."""
    ADAPTER = "adapter"
    """The answer is that of an adapter, which the candidate need not have."""
    NO_CANDIDATE = "no_candidate"
    """The candidate has no shard that is ready."""
    TOKENIZER = "tokenizer"
    """Model and candidate have different tokens."""
    ENGINE = "engine"
    """The model's engine gives no logprobs, or the candidate's none of a prompt."""
    TOO_LONG = "too_long"
    UNFINISHED = "unfinished"
    """The answer failed, was cancelled or was halted."""
    QUEUE_FULL = "queue_full"
    BUSY = "busy"
    """The candidate had no room, or clients' requests needed it."""
    LOGPROBS = "logprobs"
    """Some token of the answer has no finite logprob."""


class SpareRoom(Protocol):
    """The part of `RouterCore` that says whether the candidate has something better to do."""

    def has_spare_room(self, model: str) -> bool: ...


@dataclasses.dataclass(slots=True)
class Running:
    """A request under way at the candidate."""

    pair: Pair
    sample: Sample
    sent_at: float
    prompt_logprobs: Sequence[object] = ()


class Pair:
    """Holds the shadow requests of a model and its candidate. Those that wait are bounded by `max_queued` and by time,
    those under way by `max_in_flight`."""

    def __init__(self, config: ShadowSettings, metrics: ShadowMetrics) -> None:
        self.config = config
        self.metrics = PairMetrics(metrics, config.model, config.candidate)
        self.waiting: deque[Sample] = deque()
        self.num_running = 0
        self.is_closed = False

    @property
    def scores(self) -> bool:
        return self.config.mode == "score"

    def skip(self, reason: Skip) -> None:
        self.metrics.skipped(reason.value)

    def offer(self, sample: Sample) -> None:
        """Keep an ended answer until the candidate has room."""
        if self.is_closed:
            return
        if sample.num_tokens > self.config.max_tokens:
            self.skip(Skip.TOO_LONG)
        elif len(self.waiting) >= self.config.max_queued:
            self.skip(Skip.QUEUE_FULL)
        else:
            self.waiting.append(sample)

    def drop_old(self, now: float) -> None:
        while self.waiting and now - self.waiting[0].ended_at > MAX_WAIT_SECONDS:
            self.waiting.popleft()
            self.skip(Skip.BUSY)

    def take(self, core: SpareRoom) -> Sample | None:
        """The next answer, if the candidate may be given one now."""
        if not self.waiting or self.num_running >= self.config.max_in_flight:
            return None
        return self.waiting.popleft() if core.has_spare_room(self.config.candidate) else None

    def close(self) -> None:
        self.is_closed = True
        self.waiting.clear()

    def finished(self, running: Running, finish: Finish, now: float) -> None:
        """A request at the candidate has ended."""
        if self.is_closed:
            return
        if finish.reason == FINISH_REASON_CANCELLED:
            self.skip(Skip.BUSY)
        elif finish.reason in GOOD_ENDS:
            self.metrics.duration.observe(now - running.sent_at)
            if self.scores:
                self._score(running)
            else:
                outcome = FINISH_REASON_NAMES[finish.reason]
                self.metrics.generated(outcome, finish.num_output_tokens, len(running.sample.token_ids))
        elif finish.error is not None and finish.error.reason in _BUSY:
            self.skip(Skip.BUSY)
        else:
            self.metrics.failed("" if finish.error is None else reason_name(finish.error.reason).lower())

    def _score(self, running: Running) -> None:
        sample = running.sample
        num_tokens = len(sample.token_ids)
        # Shards of an older version report the tokens of the prompt, too.
        entries = running.prompt_logprobs[-num_tokens:]
        surprisal = -sum(entry.logprob for entry in entries if isinstance(entry, TokenLogprobs))
        if len(entries) == num_tokens and math.isfinite(surprisal):
            self.metrics.scored(num_tokens, sample.surprisal, surprisal)
        else:
            self.skip(Skip.LOGPROBS)
