"""Finds the messages of a conversation that are history, and what stands in them for content that no model here can
take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MEDIA: Final = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "computer_screenshot": "image",
    "input_audio": "audio",
    "audio": "audio",
    "file": "file",
    "input_file": "file",
}
"""Maps the types of content parts, in any API, to what they are."""


def omitted(kind: str) -> str:
    """The note that stands for an image and the like in the history."""
    return f"[{kind} left out: this model reads text only]"


def asked_message(roles: Sequence[str]) -> int | None:
    """The number of the message by which the new turn asks for something: the user's last one, if neither the assistant
    nor a tool has said anything since. All others are history, and so is one that follows a tool's result: agents put
    there the images that a tool has given, which a result in chat completions cannot hold."""
    for number in range(len(roles) - 1, -1, -1):
        if roles[number] == "user":
            return number if not number or roles[number - 1] != "tool" else None
        if roles[number] not in ("system", "developer"):
            return None
    return None
