"""Where there can be no vectors, the error says what is missing."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from orchestrator.search.searcher import Searcher

NO_DATABASE: Any = None
SOME_ENCODER: Any = object()


async def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Most orchestrators have no vector stores, and so no packages for them."""
    monkeypatch.setitem(sys.modules, "selectolax", None)
    searcher = Searcher(NO_DATABASE, SOME_ENCODER)
    with pytest.raises(KvloomError, match=r"selectolax is not installed.*kvloom-fabric\[search\]") as caught:
        await searcher.ready()
    assert caught.value.reason == ErrorReason.ERROR_REASON_NOT_IMPLEMENTED
    monkeypatch.undo()
    assert await searcher.ready() is SOME_ENCODER


async def test_a_fabric_without_a_secret_has_no_encoder() -> None:
    """Edges would not believe for whom the orchestrator asks."""
    with pytest.raises(KvloomError, match="secret") as caught:
        await Searcher(NO_DATABASE, None).ready()
    assert caught.value.reason == ErrorReason.ERROR_REASON_FAILED_PRECONDITION
