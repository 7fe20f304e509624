"""Messages that a client adds to a response while it is generated. They are queued, end the response where it may end,
and begin the next one.

A response that has called tools of its client waits for their results first: what was added is then part of the request
that brings them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from edge_http.formatting.json_bytes import Json
from edge_http.sockets.messages import Create, Steer

MAX_STEERS: Final = 16
"""The most messages that wait for one response."""
_OUTPUTS: Final = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
"""The kinds of items by which a client answers those of the output."""


class _Item(msgspec.Struct):
    type: str = ""
    call_id: str = ""
    name: str = ""
    status: str = ""


def can_be_steered(create: Create) -> bool:
    """Not where something else than the response itself says what comes before the next one."""
    return not any(
        name in create.fields and msgspec.json.decode(create.fields[name])
        for name in ("conversation", "context_management")
    )


def required_input(output: Sequence[msgspec.Raw]) -> list[Json]:
    """The items without their contents by which the client has to answer the calls of an output."""
    calls = [msgspec.json.decode(item, type=_Item) for item in output]
    return [
        {
            "type": _OUTPUTS[call.type],
            "call_id": call.call_id,
            **({"name": call.name} if call.type == "function_call" else {}),
        }
        for call in calls
        if call.type in _OUTPUTS and call.status == "completed"
    ]


def successor(create: Create, response_id: str, steers: Sequence[Steer]) -> Create:
    """The request with which a response is continued that `create` has begun: with its settings."""
    fields = {name: value for name, value in create.fields.items() if name not in ("at", "input")}
    fields["previous_response_id"] = msgspec.Raw(msgspec.json.encode(response_id))
    return Create(fields, create.stream_id, steers=steers)


def accepted(steer: Steer, number: int) -> Json:
    return {"type": "response.steer.accepted", "steer": steer.named, "sequence_number": number}


def pending(steer: Steer, required: Sequence[Json], number: int) -> Json:
    return {
        "type": "response.steer.pending",
        "steer": steer.named,
        "reason": "waiting_for_required_input",
        "required_input": required,
        "sequence_number": number,
    }


def failed(steer: Json, code: str, message: str, number: int = 0) -> Json:
    """`steer` has the input, so that the client can send it otherwise."""
    error: dict[str, Any] = {"type": "invalid_request_error", "code": code, "message": message}
    return {"type": "response.steer.failed", "steer": steer, "error": error, "sequence_number": number}
