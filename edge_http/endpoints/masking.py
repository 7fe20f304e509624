"""Hides personal data in prompts: the model reads placeholders, and the client gets back what they stand for.

The edge masks messages before they become tokens, so that the text is neither cached nor sent to shards, and keeps what
the placeholders stand for as long as the answer takes. Whatever it does not mask, the safety service refuses.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from aiohttp import web

from edge_http.answers.answer import EdgeAnswer
from edge_http.edge import Edge
from edge_http.formatting.response_formatter import ChoiceFinish
from edge_http.submission import OnSubmitted, RunAnswer, Submission, on_submitted
from kvloom.errors import KvloomError, unsupported
from kvloom.text.chat_message import ChatMessage
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import SamplingParams, TokenLogprobs
from kvloom.v1.router_service_pb2 import ModerateRequest
from kvloom.v1.safety_service_pb2 import MaskWish
from kvloom_common.text.restored_text import RestoredText

NOTHING_HIDDEN: Final[Mapping[str, str]] = {}
_BETWEEN: Final = "\n\0\n"
"""Nothing to be hidden begins in one text and ends in the next."""


async def masked(
    edge: Edge,
    request: web.BaseRequest,
    messages: Sequence[ChatMessage],
    guardrails: Sequence[str] | None,
    conversation: str,
    sampling: SamplingParams,
) -> tuple[Sequence[ChatMessage], Mapping[str, str]]:
    """The messages with placeholders, and what these stand for. Raises KvloomError, also if it is not known what to
    hide."""
    texts = [text for message in messages for text in _texts(message)]
    caller = edge.callers.caller_of(request)
    held = edge.callers.guardrails(caller, guardrails)
    wish = MaskWish(tenant=caller, conversation=conversation, guardrails=held)
    joined = _BETWEEN.join(texts)
    answer = await edge.link.moderate(ModerateRequest(texts=[joined], mask=wish))
    [found] = answer.results
    if not found.masks:
        return messages, {}
    if sampling.HasField("logprobs"):
        message = "logprobs: they would tell the tokens of placeholders, and this request has texts that are hidden."
        raise unsupported(message, "logprobs")
    originals: dict[str, str] = {}
    pieces: list[str] = []
    end = 0
    for mask in found.masks:
        originals[mask.placeholder] = joined[mask.start : mask.end]
        pieces += (joined[end : mask.start], mask.placeholder)
        end = mask.end
    shown = iter("".join((*pieces, joined[end:])).split(_BETWEEN))
    return [_with_texts(message, [next(shown) for _ in _texts(message)]) for message in messages], originals


def _texts(message: ChatMessage) -> list[str]:
    return [message.content, message.reasoning, *(call.arguments for call in message.tool_calls)]


def _with_texts(message: ChatMessage, texts: Sequence[str]) -> ChatMessage:
    content, reasoning, *arguments = texts
    calls = tuple(call._replace(arguments=own) for call, own in zip(message.tool_calls, arguments, strict=True))
    return message._replace(content=content, reasoning=reasoning, tool_calls=calls)


@dataclasses.dataclass(frozen=True, slots=True)
class RestoredRun:
    """Brings an answer to its end as `inner` does, with the hidden texts in it."""

    inner: RunAnswer
    originals: Mapping[str, str]
    prompt_sizes: Sequence[int]
    n: int

    async def __call__(
        self, edge: Edge, submission: Submission, answer: EdgeAnswer, on_submitted: OnSubmitted = on_submitted
    ) -> None:
        for each in submission.requests:
            if each is not None:
                edge.resume.keep_here(each.wanted.request_id)  # another edge does not know the texts
        part = RestoringAnswer(answer, self.originals, self.prompt_sizes, self.n)
        await self.inner(edge, submission, part, on_submitted)


class RestoringAnswer(EdgeAnswer):
    """Passes everything on to the answer that the client gets. Output is restored as the model wrote it, before
    reasoning and calls are told apart in it."""

    __slots__ = ("_answer", "_texts")

    def __init__(self, answer: EdgeAnswer, originals: Mapping[str, str], prompt_sizes: Sequence[int], n: int) -> None:
        super().__init__(prompt_sizes, n)
        self._answer = answer
        self._texts = [RestoredText(originals) for _ in range(self.num_choices)]
        self.request_context = answer.request_context
        answer.ended.add_done_callback(self._on_answer_ended)

    def fail(self, error: KvloomError) -> None:
        super().fail(error)
        self._answer.fail(error)

    @property
    def _is_visible(self) -> bool:
        return self._answer._is_visible

    def _add_start(self, index: int) -> None:
        self._answer.on_start(index, self.starts[index])

    def _add_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self._note_first_token()
        self._answer.on_tokens(index, self._texts[index].feed(delta), token_ids, logprobs)

    def _add_finish(self, index: int, finish: ChoiceFinish) -> None:  # noqa: ARG002
        if rest := self._texts[index].finish():
            self._answer.on_tokens(index, rest, (), ())
        self._answer.on_finish(index, self.finishes[index])

    def _complete(self) -> None:
        pass

    def _on_answer_ended(self, _ended: asyncio.Future[None]) -> None:
        """By itself, if its client reads too slowly or has cancelled it."""
        if not self.ended.done():
            message = "The answer has ended."
            self.fail(self._answer.error or KvloomError(ErrorReason.ERROR_REASON_CANCELLED, message))
