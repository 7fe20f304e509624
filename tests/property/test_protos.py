"""What the last release sends means the same to this version, whatever it is (docs/operate/upgrade.md)."""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc_tools import protoc

import kvloom.v1
from tests.examples import num_examples
from tests.fakes.later_version import with_later_fields
from tests.releases import export_last_release

MAX_DEPTH = 3
_LARGE = (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_FIXED64)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[type[Message], type[Message]]]:
    """Each message of the last release, as it was and as it is."""
    folder = tmp_path_factory.mktemp("last release")
    export_last_release(folder, "protos")
    described = folder / "protos.binpb"
    roots = [f"-I{folder / 'protos'}", f"-I{Path(protoc.__file__).parent / '_proto'}"]
    files = [str(path) for path in folder.rglob("*.proto")]
    assert protoc.main(["protoc", *roots, "--include_imports", f"--descriptor_set_out={described}", *files]) == 0
    for module in pkgutil.iter_modules(kvloom.v1.__path__, "kvloom.v1."):
        importlib.import_module(module.name)
    pool = descriptor_pool.DescriptorPool()
    names: list[str] = []
    for file in descriptor_pb2.FileDescriptorSet.FromString(described.read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
        if not file.package.startswith("google."):
            names += _names_in(file.package, file.message_type)
    now = descriptor_pool.Default()
    return [(_class_of(pool, name), _class_of(now, name)) for name in names]


def _names_in(prefix: str, messages: Iterable[descriptor_pb2.DescriptorProto]) -> Iterator[str]:
    for message in messages:
        if not message.options.map_entry:
            name = f"{prefix}.{message.name}"
            yield name
            yield from _names_in(name, message.nested_type)


def _class_of(pool: descriptor_pool.DescriptorPool, name: str) -> type[Message]:
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def _filled(kind: type[Message], rng: random.Random) -> Message:
    message = kind()
    _fill(message, rng, MAX_DEPTH)
    return message


def _fill(message: Message, rng: random.Random, depth: int) -> None:
    """Sets half of the fields, of which those of one `oneof` replace one another."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.5:
            continue
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            key, value = inner.fields
            entries = getattr(message, field.name)
            if value.message_type is not None:
                entries[_scalar(key, rng)].SetInParent()
            else:
                entries[_scalar(key, rng)] = _scalar(value, rng)
        elif inner is None and field.is_repeated:
            getattr(message, field.name).extend(_scalar(field, rng) for _ in range(rng.randrange(3)))
        elif inner is None:
            setattr(message, field.name, _scalar(field, rng))
        elif depth:
            part = getattr(message, field.name)
            part = part.add() if field.is_repeated else part
            part.SetInParent()
            _fill(part, rng, depth - 1)


def _scalar(field: Any, rng: random.Random) -> object:
    if field.enum_type is not None:
        return rng.choice(field.enum_type.values).number
    match field.type:
        case FieldDescriptor.TYPE_BOOL:
            return True
        case FieldDescriptor.TYPE_STRING:
            return rng.choice(("a", "é🙂", "x" * 200))
        case FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(5)
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return rng.choice((0.5, -2.0, 1e30 if field.type == FieldDescriptor.TYPE_DOUBLE else 8.0))
        case _:
            return rng.choice((1, 127, 128, 2**64 - 1 if field.type in _LARGE else rng.randrange(2**31)))


def test_messages_of_the_last_release_mean_the_same(kinds: list[tuple[type[Message], type[Message]]]) -> None:
    """This version keeps every field of what the last one sends: it knows its number, and as the same type. What it
    does not know would be discarded here."""
    rng = random.Random(1)
    for before, now in kinds:
        for _ in range(num_examples(20)):
            sent = _filled(before, rng)
            read = now.FromString(sent.SerializeToString())
            read.DiscardUnknownFields()
            assert before.FromString(read.SerializeToString()) == sent, before.DESCRIPTOR.full_name


def test_the_last_release_reads_messages_of_this_version(kinds: list[tuple[type[Message], type[Message]]]) -> None:
    """And of later ones: what it does not know it ignores, and what it knows is the same as without that."""
    rng = random.Random(2)
    for before, now in kinds:
        for _ in range(num_examples(10)):
            sent = _filled(now, rng)
            plain = before.FromString(sent.SerializeToString())
            read = before.FromString(with_later_fields(sent).SerializeToString())
            plain.DiscardUnknownFields()
            read.DiscardUnknownFields()
            assert read == plain, before.DESCRIPTOR.full_name
