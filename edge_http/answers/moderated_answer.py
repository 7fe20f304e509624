"""An answer whose end is held until its texts are judged: moderation in line (edge_http/endpoints/moderating.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from edge_http.answers.answer import EdgeAnswer
from edge_http.answers.cascade_candidate import CascadeCandidate, Update
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_CONTENT_FILTER, SequenceFinish, SequenceStart, TokenLogprobs
from kvloom_common.limits.byte_budget import ByteLease


class ModeratedAnswer(CascadeCandidate):
    """Passes on what the model writes, or holds that, too, if the answer may be blocked. What is judged is all text as
    the model wrote it: with its reasoning and its calls."""

    __slots__ = ("_answer", "_is_held")

    def __init__(
        self,
        answer: EdgeAnswer,
        prompt_sizes: Sequence[int],
        n: int,
        max_bytes: int,
        lease: ByteLease,
        *,
        is_held: bool,
    ) -> None:
        """`answer` is what the client gets. `lease` is the answer's part of the memory of all answers."""
        super().__init__(prompt_sizes, n, max_bytes, lease, response_id="", shows_logprobs=True)
        self._answer = answer
        self._is_held = is_held
        self.request_context = answer.request_context
        answer.ended.add_done_callback(self._on_answer_ended)

    @property
    def texts(self) -> list[str]:
        """By choice, once the answer has ended without an error."""
        return [candidate.text for candidate in self.candidates()]

    def block(self, messages: Mapping[int, str]) -> None:
        """Leave out the output of these choices, which the policy has ended, and for which it says this."""
        kept: list[tuple[int, Update]] = []
        for index, update in self._updates:
            if index in messages and isinstance(update, SequenceFinish):
                ended = SequenceFinish()
                ended.CopyFrom(update)
                ended.reason, ended.stop_string = FINISH_REASON_CONTENT_FILTER, ""
                ended.error.reason, ended.error.message = ErrorReason.ERROR_REASON_CONTENT_FILTERED, messages[index]
                kept.append((index, ended))
            elif index not in messages or isinstance(update, SequenceStart):
                kept.append((index, update))
        self._updates = kept

    @property
    def _is_visible(self) -> bool:
        return self._answer._is_visible

    def _add_start(self, index: int) -> None:
        if self._is_held:
            super()._add_start(index)
        else:
            self._answer.on_start(index, self.starts[index])

    def _add_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        if self._is_held:
            super()._add_tokens(index, delta, token_ids, logprobs)
            return
        self._note_first_token()
        self._keep_text(index, delta)
        self._answer.on_tokens(index, delta, token_ids, logprobs)

    def _on_answer_ended(self, _ended: asyncio.Future[None]) -> None:
        """By itself, if its client reads too slowly or has cancelled it."""
        if self._answer.error is not None:
            self.fail(self._answer.error)
        elif not self.ended.done():
            self.fail(KvloomError(ErrorReason.ERROR_REASON_CANCELLED, "The answer has ended."))
