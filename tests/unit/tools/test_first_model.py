"""Which model a command asks that names none."""

from __future__ import annotations

import pytest

from kvloom.v1.router_service_pb2 import ModelInfo
from tools.cli.router_client import first_that_generates
from tools.failures import CommandError

ENCODER = ModelInfo(name="a-encoder", num_ready_shards=1, capabilities=["embed"])
ASLEEP = ModelInfo(name="b-asleep", num_ready_shards=0, capabilities=["generate"])
LEAVING = ModelInfo(name="c-leaving", num_ready_shards=1, capabilities=["generate"], withdrawn=True)
READY = ModelInfo(name="d-ready", num_ready_shards=1, capabilities=["generate"])


def test_the_first_that_can_chat_is_asked() -> None:
    """Models are listed by name: what stands first may be an encoder, sleep, or be about to leave."""
    assert first_that_generates([ENCODER, ASLEEP, LEAVING, READY]) == "d-ready"
    assert first_that_generates([ENCODER, ASLEEP, LEAVING]) == "b-asleep"


def test_without_one_the_command_says_what_there_is() -> None:
    """An encoder was asked instead, whose refusal says nothing of a choice."""
    with pytest.raises(CommandError, match=r"a-encoder .*--model"):
        first_that_generates([ENCODER])
    with pytest.raises(CommandError, match="no model is served"):
        first_that_generates([])
