"""Conversations that are too long for the model's window, with `truncation: "auto"`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from edge_http.edge import Edge
from edge_http.openai.responses.context_window import fitting, left_out
from edge_http.openai.responses.left_summaries import LeftTurns, with_summary
from kvloom.conversation.tools import Tool
from kvloom.text.chat_message import ChatMessage
from kvloom_common.models.served_model import ServedModel

MAX_SUMMARY_TOKENS: Final = 1024
SUMMARY_SHARE: Final = 8
"""A summary has at most this part of the room."""


class Shortened(NamedTuple):
    """The messages that a model gets."""

    messages: Sequence[ChatMessage]
    unsummed: LeftTurns | None = None
    """The turns that were left out, if there is no summary of all of them yet."""
    has_summary: bool = False


async def shortened(
    edge: Edge,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
    model: ServedModel,
    room: int,
    scope: str,
    *,
    may_have_summary: bool,
) -> Shortened:
    """The messages that fit the room, with the summary of the others if there is one. Raises KvloomError."""
    summaries = edge.summaries if may_have_summary else None
    by = None if summaries is None else edge.models.by_name.get(summaries.model)
    if summaries is None or by is None:
        return Shortened(await fitting(messages, tools, model.tokenizer, room, scope))
    most = min(MAX_SUMMARY_TOKENS, room // SUMMARY_SHARE)
    kept = await fitting(messages, tools, model.tokenizer, room - most, scope)
    left = left_out(messages, kept)
    if not left:
        return Shortened(kept)
    turns = LeftTurns(scope, f"{by.name} {by.system_fingerprint}", most, left)
    summary, num_summed = summaries.find(turns)
    unsummed = turns if num_summed < len(left) else None
    if not summary or len(await model.tokenizer.encode(summary, scope=scope)) > most:
        return Shortened(kept, unsummed)
    return Shortened(with_summary(kept, summary), unsummed, has_summary=True)
