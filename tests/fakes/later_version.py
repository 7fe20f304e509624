"""Messages of a version that does not exist yet."""

from __future__ import annotations

from typing import Final, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

LATER_FIELDS: Final = b"\x80\x7d\x01" + b"\x82\x7d\x05later"
"""Field 2000 as a number, and again as text."""


def with_later_fields(message: M) -> M:
    """Gives the message, and every message in it, fields that no version knows, and returns it."""
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else (value,):
                with_later_fields(part)
    message.MergeFromString(LATER_FIELDS)
    return message
