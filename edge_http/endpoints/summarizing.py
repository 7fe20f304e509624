"""Sums up the turns that `truncation: "auto"` leaves out, with the model `edge.summary_model`.

It is done in the background, by a request of the caller: it is limited, screened and metered as its others, and waits
for them. An answer never waits for a summary: until there is one, it has the one before it, or none.
"""

from __future__ import annotations

import functools
from typing import Final

import msgspec
import structlog
from aiohttp import web

from edge_http.edge import Edge
from edge_http.endpoints.answering import collected_within
from edge_http.endpoints.response_job import response_job
from edge_http.openai.responses.compaction import PROMPT
from edge_http.openai.responses.left_summaries import LeftSummaries, LeftTurns, transcript
from edge_http.openai.responses.requests import ResponsesBody
from kvloom.errors import KvloomError
from kvloom_common.models.served_model import ServedModel

log = structlog.get_logger()

CHARS_PER_TOKEN: Final = 2
"""So many characters of a conversation have at most as many tokens as there is room for, in most languages."""


class SummaryResponse(msgspec.Struct):
    """A response whose text is a summary."""

    class Output(msgspec.Struct):
        class Part(msgspec.Struct):
            type: str
            text: str = ""

        type: str
        content: list[Part] = []

    id: str
    created_at: int
    output: list[Output]
    usage: msgspec.Raw

    @property
    def text(self) -> str:
        parts = [part for item in self.output if item.type == "message" for part in item.content]
        return "".join(part.text for part in parts if part.type == "output_text").strip()


def begin_summary(edge: Edge, request: web.BaseRequest, body: ResponsesBody, left: LeftTurns) -> None:
    """Have these turns summed up in the background."""
    if edge.summaries is not None:
        edge.summaries.begin(left, functools.partial(_sum_up, edge, request, body, edge.summaries, left))


async def _sum_up(
    edge: Edge, request: web.BaseRequest, body: ResponsesBody, summaries: LeftSummaries, left: LeftTurns
) -> None:
    try:
        with edge.admission.admit(edge.callers.caller_of(request)):
            model = edge.models.find_usable(request, summaries.model)
            asked = ResponsesBody(
                model=model.name,
                input=f"{PROMPT}\n\n{_to_be_read(edge, model, summaries, left)}",
                temperature=0.0,
                max_output_tokens=left.max_tokens,
                service_tier="flex",
                guardrails=body.guardrails,
                safety_identifier=body.safety_identifier,
            )
            job = await response_job(edge, request, b"", asked, model)
            answer = msgspec.json.decode(await collected_within(edge, request, job), type=SummaryResponse)
    except KvloomError as error:
        log.info("summary_failed", model=summaries.model, reason=error.reason_name)
    else:
        if answer.text:
            summaries.add(left, answer.text)


def _to_be_read(edge: Edge, model: ServedModel, summaries: LeftSummaries, left: LeftTurns) -> str:
    summary, number = summaries.find(left)
    window = edge.models.window(model.name) or 4 * left.max_tokens
    room = window - left.max_tokens - len(summary) // CHARS_PER_TOKEN - len(PROMPT)
    return transcript(left.messages[number:], summary, max(room, 1) * CHARS_PER_TOKEN)
