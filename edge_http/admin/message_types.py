"""The types of protobuf messages as JSON has them, for the OpenAPI document."""

from __future__ import annotations

import functools
from typing import Any, Final

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor

_SCALARS: Final[dict[int, Any]] = {
    FieldDescriptor.TYPE_STRING: str,
    FieldDescriptor.TYPE_ENUM: str,
    FieldDescriptor.TYPE_BOOL: bool,
    FieldDescriptor.TYPE_DOUBLE: float,
}


@functools.cache
def type_of(message: Descriptor) -> Any:
    """A type with the fields of a message, none of which is required."""
    return msgspec.defstruct(
        message.name,
        [(field.name, _type_of_field(field), msgspec.UNSET) for field in message.fields],
        module=__name__,
        forbid_unknown_fields=True,
    )


def _type_of_field(field: FieldDescriptor) -> Any:
    message = field.message_type
    if message is None:
        kind = _SCALARS.get(field.type, int)
        return list[kind] if field.is_repeated else kind
    if message.GetOptions().map_entry:
        return dict[str, _type_of_field(message.fields_by_name["value"])]  # pyrefly: ignore[invalid-annotation]
    kind = type_of(message)
    return list[kind] if field.is_repeated else kind
