"""Protobuf messages as values of JSON, and back. (protobuf's own JSON makes strings of large integers, and leaves out
fields with their defaults.)"""

from __future__ import annotations

import re
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvloom.errors import invalid_argument

_INTEGERS: Final = frozenset(
    (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)
)


def as_plain(message: Message) -> dict[str, Any]:
    """All fields, except messages and optional fields that are not there. Values of enums are words: "stop" for
    FINISH_REASON_STOP, and "" for UNSPECIFIED."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        is_message = field.message_type is not None
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            found[field.name] = dict(value)
        elif field.enum_type is not None and not field.is_repeated:
            found[field.name] = _word(field.enum_type, value)
        elif field.is_repeated:
            found[field.name] = [as_plain(one) if is_message else one for one in value]
        elif not field.has_presence or message.HasField(field.name):
            found[field.name] = as_plain(value) if is_message else value
    return found


def _word(enum: Any, number: int) -> str:
    value = enum.values_by_number.get(number)
    if value is None or not number:
        return ""
    prefix = re.sub("(?<!^)(?=[A-Z])", "_", enum.name).upper()
    return value.name.removeprefix(f"{prefix}_").lower()


def fill(message: Message, plain: Any, at: str = "") -> None:
    """Set the fields of a message from an object of JSON; null leaves a field as it is. `at`: how errors call the
    object. Raises KvloomError (INVALID_ARGUMENT) that names the field."""
    if not isinstance(plain, dict):
        raise invalid_argument(f"{at or 'The body'} must be an object.", at)
    for name, value in plain.items():
        field = message.DESCRIPTOR.fields_by_name.get(name)
        place = f"{at}.{name}" if at else str(name)
        if field is None:
            raise invalid_argument(f"There is no field {place[:128]!r}.", place[:128])
        if value is None:
            continue
        if not field.is_repeated:
            _set(message, field, value, place)
            continue
        if not isinstance(value, list):
            raise invalid_argument(f"{place} must be a list.", place)
        for number, one in enumerate(value):
            _add(getattr(message, name), field, one, f"{place}[{number}]")


def _set(message: Message, field: Any, value: Any, place: str) -> None:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        submessage = getattr(message, field.name)
        submessage.SetInParent()
        fill(submessage, value, place)
        return
    try:
        setattr(message, field.name, _checked(field, value, place))
    except ValueError as error:  # an integer out of range, or text that is not UTF-8
        raise invalid_argument(f"{place} is out of range.", place) from error


def _add(values: Any, field: Any, value: Any, place: str) -> None:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        fill(values.add(), value, place)
        return
    try:
        values.append(_checked(field, value, place))
    except ValueError as error:
        raise invalid_argument(f"{place} is out of range.", place) from error


def _checked(field: Any, value: Any, place: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if field.type == FieldDescriptor.TYPE_STRING and isinstance(value, str):
        return value
    if field.type == FieldDescriptor.TYPE_BOOL and isinstance(value, bool):
        return value
    if field.type in _INTEGERS and is_number and isinstance(value, int):
        return value
    if field.type == FieldDescriptor.TYPE_DOUBLE and is_number:
        return float(value)
    kinds = {FieldDescriptor.TYPE_STRING: "a string", FieldDescriptor.TYPE_BOOL: "true or false"}
    kinds[FieldDescriptor.TYPE_DOUBLE] = "a number"
    raise invalid_argument(f"{place} must be {kinds.get(field.type, 'an integer')}.", place)
