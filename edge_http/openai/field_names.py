"""The names of a body's fields for errors of routers and shards, which name the fields of the fabric's messages."""

from __future__ import annotations

from typing import Final

from kvloom.errors import KvloomError
from kvloom.guide import GUIDE_FIELD
from kvloom.request_fields import flat_field

_OTHERS: Final = {"sampling.predicted_token_ids": "prediction"}
_PROMPT_FIELDS: Final = frozenset(("prompt", "prompt_token_ids", "prompt_text"))


def named_for_clients(error: KvloomError, prompt_field: str, guide_field: str) -> KvloomError:
    """The error with the field as the client knows it, in the message too. `prompt_field` is e.g. "messages",
    `guide_field` the one that asked for guided decoding."""
    field = _client_field(error.field, prompt_field, guide_field)
    if field == error.field:
        return error
    message = error.message.replace(error.field, field)
    return error.renamed(field, message)


def _client_field(field: str, prompt_field: str, guide_field: str) -> str:
    if field == GUIDE_FIELD:
        return guide_field
    if field in _OTHERS:
        return _OTHERS[field]
    if field in _PROMPT_FIELDS:
        return prompt_field
    return flat_field(field)
