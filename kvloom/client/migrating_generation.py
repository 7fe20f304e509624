"""An answer of `Generate` that can move from router to router: what was received, and the request that continues it."""

from __future__ import annotations

import secrets
import time
from typing import Final

from kvloom.client.generation import Delta
from kvloom.errors import KvloomError
from kvloom.objectives import delay_objectives
from kvloom.router_link.link import ChoiceProgress
from kvloom.sampling import draw_seed
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, SequenceFinish
from kvloom.v1.router_service_pb2 import CancelRequest, ChoiceDelta, GenerateRequest, GenerateResponse, PartialChoice

TOKEN_BYTES: Final = 24


class MigratingGeneration:
    """The progress of one answer. It moves to another router with a new `Generate` request; a `Resume` continues the
    request at hand. The reader receives for each choice one start, each token once, and one finish."""

    def __init__(self, request: GenerateRequest) -> None:
        """`request` has a request_id. It gets a seed, because every router must draw the same random numbers."""
        if not request.sampling.HasField("seed"):
            request.sampling.seed = draw_seed()
        self._request = request
        self._began_at = time.monotonic()
        self._choices = [ChoiceProgress(index) for index in range(request.n or 1)]
        self._ticket = b""
        """Proves to other routers that the answer has begun."""
        self._num_tokens = 0
        self._num_tokens_before = 0
        """How many tokens had been received when the current request was made."""
        self.current_request = request
        """The `Generate` request that was made last."""
        self.last_event = 0
        """The event_number of the last response; 0: there was none, or the answer is not resumable."""
        self.has_response = False
        """True once any router has responded."""
        self.has_response_from_router = False
        """True once a router has responded to the current request."""

    @property
    def is_complete(self) -> bool:
        """All choices have finished. The status of the RPC no longer matters."""
        return all(choice.is_done for choice in self._choices)

    def next_request(self) -> GenerateRequest:
        """Make the request for the next router. Raises KvloomError (DEADLINE_EXCEEDED)."""
        request = GenerateRequest()
        request.CopyFrom(self._request)
        request.resume_token = secrets.token_urlsafe(TOKEN_BYTES)  # unique: it names this request to its router
        if self.has_response:
            request.partial_choices.extend(_partial_choice(choice) for choice in self._choices)
            request.continuation_ticket = self._ticket
            request.starting_after = self.last_event
            request.timeout_seconds = self._seconds_left()
        if request.HasField("objectives"):
            elapsed_seconds = time.monotonic() - self._began_at
            delay_objectives(request.objectives, elapsed_seconds, is_admitted=self.has_response)
        self.current_request = request
        self.has_response_from_router = False
        self._num_tokens_before = self._num_tokens
        return request

    def apply(self, response: GenerateResponse) -> list[Delta]:
        """Record a response; returns the deltas for the reader."""
        self.last_event = response.event_number
        self.has_response = self.has_response_from_router = True
        if response.model:  # a route has chosen it, and might choose another one elsewhere
            self._request.model = response.model
        if response.adapter_checksum:  # another adapter may have its name elsewhere, or soon
            self._request.adapter_checksum = response.adapter_checksum
        return [delta for delta_proto in response.deltas if (delta := self._apply(delta_proto)) is not None]

    def settlement(self) -> CancelRequest:
        """The cancellation to send to the current request's router when the request is abandoned. It includes the
        number of tokens that were received over it."""
        return CancelRequest(
            request_id=self.current_request.request_id,
            resume_token=self.current_request.resume_token,
            num_received_tokens=self._num_tokens - self._num_tokens_before,
        )

    def _apply(self, delta_proto: ChoiceDelta) -> Delta | None:
        choice = self._choices[delta_proto.index]
        choice.token_ids.extend(delta_proto.token_ids)
        if delta_proto.HasField("num_delivered_chars"):  # the output is parsed: its text is not all of it
            choice.num_chars = delta_proto.num_delivered_chars
        else:
            choice.num_chars += len(delta_proto.text)
        self._num_tokens += len(delta_proto.token_ids)
        delta = Delta.from_proto(delta_proto)
        if delta.start is not None:
            self._ticket = delta.start.continuation_ticket or self._ticket
            if choice.num_cached_tokens is None:
                choice.num_cached_tokens = delta.start.num_cached_tokens
            else:
                delta.start = None
        if delta.finish is not None and delta.finish.reason == FINISH_REASON_ERROR:
            delta.finish = None  # the status carries the error, and another router may continue
        if delta.finish is not None:
            choice.is_done = True
            if self.current_request.partial_choices:
                delta.finish = _whole_finish(choice, delta.finish)
        has_content = delta.text or delta.token_ids or delta_proto.output
        return delta if has_content or delta.start or delta.finish else None

    def _seconds_left(self) -> float:
        if not self._request.timeout_seconds:
            return 0.0
        left = self._request.timeout_seconds - (time.monotonic() - self._began_at)
        if left <= 0:
            raise KvloomError(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, "The request took longer than its timeout.")
        return left


def _partial_choice(choice: ChoiceProgress) -> PartialChoice:
    if choice.is_done:
        return PartialChoice(index=choice.index, done=True, token_ids=choice.token_ids)  # a part of the answer's usage
    return PartialChoice(index=choice.index, token_ids=choice.token_ids, num_delivered_chars=choice.num_chars)


def _whole_finish(choice: ChoiceProgress, finish: SequenceFinish) -> SequenceFinish:
    """The finish with the first request's number of cached tokens: what is cached for a later one is mostly what an
    earlier one has computed."""
    whole = SequenceFinish()
    whole.CopyFrom(finish)
    whole.num_cached_tokens = choice.num_cached_tokens or 0
    return whole
