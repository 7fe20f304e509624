"""Streams of protobuf messages, mutated field by field and byte by byte.

A frame is {"message": the message in protobuf's JSON form} with, where bytes were changed as well, "edits"
(tests/fuzz/byte_edits.py); or {"raw": bytes}. Strategies are made from the messages' descriptors, so that a new field
is fuzzed without a change here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from tests.fuzz.byte_edits import EDITS, PIECES, edited
from tests.fuzz.target import bytes_of, text_of

Json = Any
Draw = Callable[[st.SearchStrategy[Any]], Any]

MAX_DEPTH: Final = 4
UINT32 = st.integers(0, 5) | st.sampled_from([15, 16, 17, 100, 65_536, 2**31 - 1, 2**31, 2**32 - 1])
UINT64 = (UINT32 | st.sampled_from([2**63, 2**64 - 1])).map(str)
DOUBLES = st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, 1e-300, 1e308, "NaN", "Infinity", "-Infinity"])
TEXTS = st.text(max_size=4) | st.sampled_from(["tiny", "other", "x" * 300, "\x00", "{}", "[" * 3000, "(" * 300, "é🙂"])
ENUMS = st.integers(0, 5) | st.sampled_from([-1, 99, 2**31 - 1])

_SCALARS: Final = {
    FieldDescriptor.TYPE_UINT32: UINT32,
    FieldDescriptor.TYPE_UINT64: UINT64,
    FieldDescriptor.TYPE_FIXED64: UINT64,
    FieldDescriptor.TYPE_DOUBLE: DOUBLES,
    FieldDescriptor.TYPE_FLOAT: DOUBLES.filter(lambda value: value != 1e308),
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_BYTES: st.sampled_from(["", "AA==", "AQAAAA==", "/////w==", "AQAAAAIAAAADAAAA"]),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_ENUM: ENUMS,
}


def encoded(frame: Json, kind: type[Message]) -> bytes:
    """The bytes of a frame."""
    if "raw" in frame:
        return bytes_of(frame["raw"])
    message = json_format.ParseDict(frame["message"], kind())
    return edited(message.SerializeToString(), frame.get("edits", ()))


def histories(
    kind: type[Message], first: Sequence[Json], later: Sequence[Json], max_frames: int = 6
) -> st.SearchStrategy[list[Json]]:
    """Streams: mostly one of `first`, then any of `later`, each of them mutated or not; sometimes in any order."""
    descriptor = kind.DESCRIPTOR

    @st.composite
    def drawn(draw: Draw) -> list[Json]:
        opening = [{"message": draw(st.sampled_from(first))}] if draw(st.integers(0, 9)) else []
        frames = opening + draw(st.lists(_frames(descriptor, [*first, *later]), max_size=max_frames))
        return draw(st.permutations(frames)) if not draw(st.integers(0, 9)) else frames

    return drawn()


def _frames(descriptor: Descriptor, valid: Sequence[Json]) -> st.SearchStrategy[Json]:
    plain = st.sampled_from(valid).map(lambda message: {"message": message})
    mutated = mutations(descriptor, valid).map(lambda message: {"message": message})
    torn = st.builds(
        lambda message, edits: {"message": message, "edits": edits}, mutations(descriptor, valid), EDITS.filter(bool)
    )
    raw = st.lists(PIECES, max_size=6).map(lambda pieces: {"raw": "".join(pieces)})
    unknown = st.builds(_unknown_field, st.integers(1, 40), st.integers(0, 7), st.binary(max_size=6))
    return st.one_of(plain, mutated, mutated, mutated, torn, raw, unknown)


def _unknown_field(number: int, wire_type: int, payload: bytes) -> Json:
    """A field of a later version, or of a wrong wire type."""
    tag = number << 3 | wire_type
    return {"raw": text_of(bytes([tag & 0x7F | 0x80, tag >> 7]) + payload)}


@st.composite
def mutations(draw: Draw, descriptor: Descriptor, valid: Sequence[Json]) -> Json:
    """A valid message of which some fields were dropped, set to any value, repeated or replaced."""
    message = copy.deepcopy(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 4))):
        node, inner = draw(st.sampled_from(_nodes(message, descriptor)))
        field = draw(st.sampled_from(list(inner.fields)))
        kinds = ["set"] + (["drop", "drop", "repeat"] if field.name in node else [])
        match draw(st.sampled_from(kinds)):
            case "drop":
                del node[field.name]
            case "repeat" if field.is_repeated and isinstance(node[field.name], list):
                node[field.name] = node[field.name] * draw(st.sampled_from([2, 3, 20]))
            case _:
                _clear_oneof(node, field)
                node[field.name] = draw(_values(field, MAX_DEPTH))
    return message


def _nodes(message: Json, descriptor: Descriptor) -> list[tuple[Json, Descriptor]]:
    """All messages inside a message, with itself, that have fields."""
    found = [(message, descriptor)] if descriptor.fields else []
    for name, value in message.items():
        inner = descriptor.fields_by_name[name].message_type
        if inner is not None and not inner.GetOptions().map_entry:
            for part in value if isinstance(value, list) else [value]:
                found += _nodes(part, inner)
    return found


def _clear_oneof(node: Json, field: FieldDescriptor) -> None:
    if field.containing_oneof is not None:
        for other in field.containing_oneof.fields:
            node.pop(other.name, None)


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Json]:
    if field.message_type is None:
        one = _SCALARS[field.type]
    elif field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return st.dictionaries(_SCALARS[key.type].map(str), _values(value, depth), max_size=4)
    else:
        one = _messages(field.message_type, depth - 1)
    return st.lists(one, max_size=4) if field.is_repeated else one


def _messages(descriptor: Descriptor, depth: int) -> st.SearchStrategy[Json]:
    if depth <= 0:
        return st.just({})

    @st.composite
    def drawn(draw: Draw) -> Json:
        message: Json = {}
        for field in draw(st.lists(st.sampled_from(list(descriptor.fields)), max_size=4)) if descriptor.fields else ():
            _clear_oneof(message, field)
            message[field.name] = draw(_values(field, depth))
        return message

    return drawn()
