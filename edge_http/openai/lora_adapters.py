"""The bodies of POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's shape."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from edge_http.formatting.decoding import decode_body
from edge_http.openai.requests import Body
from kvloom_common.config import AdapterName


class LoadAdapterBody(Body, kw_only=True):
    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """A directory below edge.adapters_dir; a relative path is relative to it."""
    base_model_name: str | None = None
    """The model. It need not be given where there is only one."""


class UnloadAdapterBody(Body, kw_only=True):
    lora_name: str
    """The adapter's own name, or MODEL:ADAPTER."""
    lora_int_id: int | None = None
    """Not used: adapters have no numbers here."""


def decode_load(raw: bytes) -> LoadAdapterBody:
    """Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    return decode_body(_LOAD_DECODER, raw)


def decode_unload(raw: bytes) -> UnloadAdapterBody:
    """Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    return decode_body(_UNLOAD_DECODER, raw)


_LOAD_DECODER: Final = msgspec.json.Decoder(LoadAdapterBody)
_UNLOAD_DECODER: Final = msgspec.json.Decoder(UnloadAdapterBody)
