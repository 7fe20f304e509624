"""Decoding the JSON bodies that clients post. Errors name the field."""

from __future__ import annotations

import codecs
import re
from typing import Final, TypeVar

import msgspec

from kvloom.errors import KvloomError, invalid_argument, unsupported

_T = TypeVar("_T")

_LONE_SURROGATE: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a whole pair, which is passed over
    rb"|(?P<first>\\u[dD][89abAB][0-9a-fA-F]{2})|(?P<second>\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_AT: Final = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_FIELD: Final = re.compile(r"Object missing required field `(.*)`", re.DOTALL)


def decode_body(decoder: msgspec.json.Decoder[_T], raw: bytes | msgspec.Raw, at: str = "") -> _T:
    """Decode a body, or the part of one to which `at` leads, e.g. "tools[0]". Raises KvloomError (INVALID_ARGUMENT,
    UNSUPPORTED_PARAMETER) that names the field."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), at) from error
    except UnicodeDecodeError as error:
        raise invalid_argument(_why_no_text(bytes(raw)) or "The body is not valid UTF-8.") from error
    except msgspec.DecodeError as error:
        why = _why_no_text(bytes(raw)) or f"The body is not valid JSON: {error}."
        raise invalid_argument(why) from error
    except RecursionError as error:
        raise invalid_argument("The body is nested too deeply.") from error


def _why_no_text(raw: bytes) -> str:
    """Names a fault that users would not find by what the JSON library says; "" if there is none of these."""
    if raw.startswith(codecs.BOM_UTF8):
        return "The body begins with a byte order mark, which JSON must not have: send it without."
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "The body is UTF-16: send UTF-8, without a byte order mark."
    at = raw.find(b"\0")
    if at >= 0:
        return f"The body is not valid JSON: it has a null byte at position {at}. In a string, write it as \\u0000."
    halves = (match["first"] or match["second"] for match in _LONE_SURROGATE.finditer(raw))
    half = next(filter(None, halves), b"")
    if half:
        return (
            f"The body is not valid JSON: {half.decode()} is one half of a surrogate pair, as if a character such as "
            "an emoji had been cut in the middle. Leave it out, or send the whole pair."
        )
    return ""


def check_num_messages(num_messages: int, max_messages: int) -> None:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    if not num_messages:
        raise invalid_argument("messages must hold at least one message.", "messages")
    if num_messages > max_messages:
        raise invalid_argument(f"messages has {num_messages} entries; at most {max_messages}.", "messages")


def json_text(raw: msgspec.Raw, field: str) -> str:
    """The text of a part of a body that was not decoded with it. Raises KvloomError (INVALID_ARGUMENT)."""
    try:
        return bytes(raw).decode()
    except UnicodeDecodeError as error:
        raise invalid_argument(f"{field} is not valid UTF-8.", field) from error


def _field_error(text: str, at: str) -> KvloomError:
    """msgspec's "Expected `int`, got `str` - at `$.messages[0].role`" as an error of kvloom."""
    match = _AT.fullmatch(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    path = f"{at}.{path}" if at and path else at or path
    prefix = f"{path}." if path else ""
    if unknown := _UNKNOWN_FIELD.fullmatch(what):
        name = unknown[1] if len(unknown[1]) <= 64 else unknown[1][:64] + "…"
        return unsupported(f"{prefix}{name} is not a known parameter.", f"{prefix}{name}")
    if missing := _MISSING_FIELD.fullmatch(what):
        return invalid_argument(f"{prefix}{missing[1]} is missing.", f"{prefix}{missing[1]}")
    if not path:
        return invalid_argument(f"The body must be a JSON object: {what}.")
    return invalid_argument(f"{path}: {what[:1].lower()}{what[1:].replace('`', '')}.", path)
