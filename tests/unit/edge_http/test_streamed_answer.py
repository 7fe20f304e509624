"""A streamed answer as its link sees it."""

from __future__ import annotations

from typing import Any

import pytest

from edge_http.answers.streamed_answer import StreamedAnswer
from edge_http.formatting.response_formatter import Envelope
from edge_http.openai.response_formatters import ChatFormatter
from kvloom.v1.generation_pb2 import SequenceStart
from tests.fakes.tiny_tokenizer import model_tokenizer


class Events:
    """An EventSink that has a fast path."""

    has_begun = False

    def begin(self, headers: Any) -> None:
        self.has_begun = True

    def cork(self) -> None:
        pass

    def send(self, *_parts: bytes) -> bool:
        return True

    def fast_writer(self, *_args: Any) -> Any:
        return str


@pytest.mark.parametrize(("n", "has_one"), [(1, True), (2, False)])
async def test_only_an_answer_with_one_choice_takes_the_fast_path(n: int, has_one: bool) -> None:
    """A stream has one prefix for its fast path. A colocated edge sent text of one choice of several as that
    of another."""
    envelope = Envelope("chatcmpl-1", "tiny", "fp", num_choices=n, include_usage=False, num_prompt_tokens=5)
    formatter = ChatFormatter(envelope, model_tokenizer())
    events: Any = Events()
    answer = StreamedAnswer([5], n, formatter, events, {}, with_details=False, with_explanation=False)
    for index in range(n):
        answer.on_start(index, SequenceStart())
        answer.on_tokens(index, "a", [1], ())
    assert [answer.fast_writer(index) is not None for index in range(n)] == [has_one] * n
