"""Finds receipts in files and in responses, whatever the API they came by."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, Final

from kvloom_common.receipts.receipt import MAX_BUNDLE_BYTES, Bundle, decode_bundle

_PARTS: Final = frozenset({"receipt", "signature", "key_id", "request", "output"})
_MAX_DEPTH: Final = 64


def bundles_in(text: str) -> list[Bundle]:
    """The receipts in a JSON document, in lines of JSON, or in a stream of server-sent events. Raises ValueError with
    what is wrong."""
    found: dict[str, Bundle] = {}
    for document in _documents(text):
        for raw in _raw_bundles(document):
            encoded = json.dumps(raw)
            if len(encoded) > MAX_BUNDLE_BYTES:
                raise ValueError(f"a receipt has {len(encoded)} bytes; at most {MAX_BUNDLE_BYTES} are read")
            bundle = decode_bundle(encoded)
            found[bundle.signature] = bundle  # some APIs repeat the whole answer in their last events
    return list(found.values())


def _documents(text: str) -> Iterator[Any]:
    with contextlib.suppress(ValueError):
        whole = json.loads(text)
        yield whole
        return
    for line in text.splitlines():
        content = line.removeprefix("data:").strip()
        if not content.startswith("{"):
            continue
        try:
            yield json.loads(content)
        except ValueError as error:
            raise ValueError(f"a line is no JSON: {error}") from error


def _raw_bundles(value: Any, depth: int = 0) -> Iterator[Any]:
    if depth > _MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    if isinstance(value, dict):
        if value.keys() >= _PARTS:
            yield value
            return
        for item in value.values():
            yield from _raw_bundles(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _raw_bundles(item, depth + 1)
