"""The guide of an answer, with the field of the body that asked for it, whatever the API."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvloom.errors import invalid_argument
from kvloom.v1.generation_pb2 import Guide
from kvloom_common.conversation.tool_plan import ToolPlan

ALL_OUTPUT: Final = "structured_outputs"
"""The field whose form is that of all output, not only of messages."""
GUIDED: Final = "guided_"
"""The fields that preceded `structured_outputs` begin with it."""
_ANY_OBJECT: Final = '{"type": "object"}'


class BodyGuide(NamedTuple):
    guide: Guide
    field: str
    """The field of the body that requested the guide."""


def with_calls(guide: BodyGuide | None, plan: ToolPlan, field: str) -> BodyGuide | None:
    """Return the guide of an answer that has this form, or calls as `plan` says; `field` has the tools. As OpenAI's, a
    response format is about messages: an answer may be a call instead where a guide can tell calls from JSON, and one
    that must be a call has no other form. `structured_outputs` is about all output: there are no calls, and KvloomError
    (INVALID_ARGUMENT) is raised if one is demanded as well."""
    if not plan.tools:
        return guide
    if guide is None:
        return None if plan.guide is None else BodyGuide(plan.guide, field)
    if guide.field.startswith((ALL_OUTPUT, GUIDED)):
        if plan.demands_call:
            raise invalid_argument("tool_choice demands a call, which has no room for another form.", guide.field)
        return guide
    if plan.guide is not None and plan.demands_call:
        return BodyGuide(plan.guide, field)
    either = plan.or_form(guide.guide.json_schema or _ANY_OBJECT)
    return guide if either is None else BodyGuide(either, guide.field)
