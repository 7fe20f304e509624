"""The errors of each API have the shapes that /openapi.json describes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from edge_http.formatting.error_formats import ANTHROPIC_ERRORS, OPENAI_ERRORS, ErrorFormat
from edge_http.openai.response_objects import AnthropicError, ErrorBody
from kvloom.errors import KvloomError, unsupported
from kvloom.v1.error_reason_pb2 import ErrorReason

ERRORS = [
    *(KvloomError(reason, "It went wrong.", field="field") for reason in ErrorReason.values()[1:]),
    unsupported("thread is not supported.", "thread"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{error.reason_name}-{error.field}")
@pytest.mark.parametrize(("api", "shape"), [(OPENAI_ERRORS, ErrorBody), (ANTHROPIC_ERRORS, AnthropicError)])
def test_errors_have_the_described_shape(api: ErrorFormat, shape: type[Any], error: KvloomError) -> None:
    """Clients that are generated from the description refuse fields that it does not name."""
    msgspec.convert(api.body(error, "req-1"), shape)
