"""What the document says about one method of one path."""

from __future__ import annotations

import dataclasses
from typing import Any

EVENT_STREAM = "text/event-stream"


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A response that is no error."""

    description: str
    body: Any = None
    """The type of the JSON body, or of an event's data; None: there is no JSON."""
    content_type: str = "application/json"
    status: int = 200
    headers: tuple[str, ...] = ()
    """Names of `parameters.RESPONSE_HEADERS`, besides those of every response."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    path: str
    method: str
    id: str
    """The name for generated clients."""
    tag: str
    summary: str
    description: str = ""
    parameters: tuple[str, ...] = ()
    """Names of `parameters.PARAMETERS`. Those in the path are found by themselves."""
    body: Any = None
    """The type of the JSON body; None: there is none."""
    examples: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Bodies by their titles."""
    answers: tuple[Answer, ...]
    errors: tuple[int, ...] = ()
    """The statuses of errors, besides those of every operation."""
    error: Any = None
    """The type of an error's body, if the API has a shape of its own; None: OpenAI's."""
    headers: tuple[str, ...] = ()
    """Names of `parameters.RESPONSE_HEADERS` that its answers and its errors may have."""
    is_open: bool = False
    """It needs no API key."""
