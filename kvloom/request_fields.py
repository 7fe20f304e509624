"""The names of a request's fields, as those clients know them whose requests are flat."""

from __future__ import annotations

from typing import Final

_NESTED_IN: Final = ("sampling.", "stop.", "conversation.", "objectives.")


def flat_field(field: str) -> str:
    """Return the name that a field of GenerateRequest or Submit (protos/kvloom/v1) has in a request that is flat, like
    the bodies of the HTTP API and the options of the SDK: "sampling.top_k" is their "top_k"."""
    for message in _NESTED_IN:
        field = field.removeprefix(message)
    return field
