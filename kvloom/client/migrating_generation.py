"""An answer of `Generate` that its reader carries from router to router: what has come, and what to ask for next."""

from __future__ import annotations

import secrets
import time
from typing import Final

from kvloom.client.generation import Delta
from kvloom.errors import KvloomError
from kvloom.router_link.link import ChoiceProgress
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, SequenceFinish
from kvloom.v1.router_service_pb2 import CancelRequest, ChoiceDelta, GenerateRequest, GenerateResponse, PartialChoice

SEED_BITS: Final = 64
TOKEN_BYTES: Final = 24


class MigratingGeneration:
    """An attempt is one `Generate`, and every `Resume` of it. Its reader hears of each choice one start, each token
    once, and one end."""

    def __init__(self, request: GenerateRequest) -> None:
        """`request` has a request_id. It gets a seed: all attempts have to draw the same numbers."""
        if not request.sampling.HasField("seed"):
            request.sampling.seed = secrets.randbits(SEED_BITS)
        self._request = request
        self._began_at = time.monotonic()
        self._choices = [ChoiceProgress(index) for index in range(request.n or 1)]
        self._num_tokens = 0
        self._num_tokens_before = 0
        """What had come when the attempt at hand began."""
        self.attempt = request
        """As it was asked for last."""
        self.last_event = 0
        """The event_number of the last response; 0: none, or it is not resumable."""
        self.is_heard = False
        """Something has come."""
        self.is_attempt_heard = False

    @property
    def is_complete(self) -> bool:
        """Nothing is wanted any more, whatever the status says."""
        return all(choice.is_done for choice in self._choices)

    def begin(self) -> GenerateRequest:
        """What the next attempt has to ask for. Raises KvloomError (DEADLINE_EXCEEDED)."""
        attempt = GenerateRequest()
        attempt.CopyFrom(self._request)
        attempt.resume_token = secrets.token_urlsafe(TOKEN_BYTES)  # one each: it names the attempt
        if self.is_heard:
            attempt.partial_choices.extend(_begun(choice) for choice in self._choices)
            attempt.starting_after = self.last_event
            attempt.timeout_seconds = self._seconds_left()
        self.attempt = attempt
        self.is_attempt_heard = False
        self._num_tokens_before = self._num_tokens
        return attempt

    def take(self, response: GenerateResponse) -> list[Delta]:
        """News for the reader."""
        self.last_event = response.event_number
        self.is_heard = self.is_attempt_heard = True
        return [delta for news in response.deltas if (delta := self._take(news)) is not None]

    def settlement(self) -> CancelRequest:
        """What the router of the attempt at hand has to hear when it is given up."""
        return CancelRequest(
            request_id=self.attempt.request_id,
            resume_token=self.attempt.resume_token,
            num_received_tokens=self._num_tokens - self._num_tokens_before,
        )

    def _take(self, news: ChoiceDelta) -> Delta | None:
        choice = self._choices[news.index]
        choice.token_ids.extend(news.token_ids)
        choice.num_chars += len(news.text)
        self._num_tokens += len(news.token_ids)
        delta = Delta.from_proto(news)
        if delta.start is not None:
            if choice.num_cached_tokens is None:
                choice.num_cached_tokens = delta.start.num_cached_tokens
            else:
                delta.start = None
        if delta.finish is not None and delta.finish.reason == FINISH_REASON_ERROR:
            delta.finish = None  # the status tells, and another router may go on
        if delta.finish is not None:
            choice.is_done = True
            if self.attempt.partial_choices:
                delta.finish = _whole_finish(choice, delta.finish)
        return delta if delta.text or delta.token_ids or delta.start or delta.finish else None

    def _seconds_left(self) -> float:
        if not self._request.timeout_seconds:
            return 0.0
        left = self._request.timeout_seconds - (time.monotonic() - self._began_at)
        if left <= 0:
            raise KvloomError(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, "The request took longer than its timeout.")
        return left


def _begun(choice: ChoiceProgress) -> PartialChoice:
    if choice.is_done:
        return PartialChoice(index=choice.index, done=True)
    return PartialChoice(index=choice.index, token_ids=choice.token_ids, num_delivered_chars=choice.num_chars)


def _whole_finish(choice: ChoiceProgress, finish: SequenceFinish) -> SequenceFinish:
    """What was cached for a later attempt is mostly what an earlier one had computed."""
    whole = SequenceFinish()
    whole.CopyFrom(finish)
    whole.num_cached_tokens = choice.num_cached_tokens or 0
    return whole
