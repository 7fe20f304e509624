"""The `Submit` of version 0.2, which has each field of `Submit.request` itself: edges and routers of both versions work
together while a fabric is upgraded. It goes with the version after next."""

from __future__ import annotations

from typing import Final

from google.protobuf.message import Message

from kvloom.v1.router_service_pb2 import GenerateRequest, Submit

_FIELDS: Final = tuple(field for field in Submit.DESCRIPTOR.fields if field.GetOptions().deprecated)


def flatten(submit: Submit) -> None:
    """Turn a submit into what routers of version 0.2 read."""
    _move(submit.request, submit)
    submit.ClearField("request")


def nest(submit: Submit) -> None:
    """Turn what clients of version 0.2 write into a submit of today."""
    request = GenerateRequest()
    _move(submit, request)
    submit.request.CopyFrom(request)


def _move(source: Message, target: Message) -> None:
    for field in _FIELDS:
        name = field.name
        if field.message_type is None:
            setattr(target, name, getattr(source, name))
        elif source.HasField(name):
            getattr(target, name).CopyFrom(getattr(source, name))
        if isinstance(source, Submit):
            source.ClearField(name)
