"""A router counts what it sends to clients outside the fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvloom.v1.generation_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FinishReason,
)
from kvloom_common.delivery_log import DeliveryLog, WitnessLine
from router.core.actions import RequestEnded
from router.core.events import ChoiceSpec, Request, RequestArrived
from router.core.frames import Finish, Step
from router.metering.delivery_witness import DeliveryWitness


class World:
    def __init__(self, folder: Path) -> None:
        self.file = folder / "witness" / "router-0.jsonl"
        self._witness = DeliveryLog(self.file)
        self.tap = DeliveryWitness(self._witness)

    def ask(self, answer_id: str, *choices: ChoiceSpec, client: str = "c", **fields: Any) -> None:
        request = Request("r", client, "m", [1, 2, 3], "", choices, answer_id=answer_id, **fields)
        self.tap.arrived(RequestArrived(request))

    def lines(self) -> list[WitnessLine]:
        self._witness.flush()
        text = self.file.read_bytes() if self.file.exists() else b""
        return [msgspec.json.decode(line, type=WitnessLine) for line in text.splitlines()]


def test_each_request_is_counted_by_itself(tmp_path: Path) -> None:
    """They may have the same id, and what their choices have was computed, too."""
    world = World(tmp_path)
    world.ask("a", ChoiceSpec(1, 0), ChoiceSpec(2, 1, [7, 7, 7, 7]), num_claimed_tokens=4)
    world.ask("b", ChoiceSpec(3, 0))
    world.ask("", ChoiceSpec(1, 0), client="edge")
    world.tap.stepped("edge", Step(slots=[1], token_ids=[7], deltas=["x"]))
    world.tap.stepped("c", Step(slots=[1, 2, 3], token_ids=[7, 7, 7], deltas=["x"] * 3))
    finishes = [Finish(1, FINISH_REASON_STOP), Finish(2, FINISH_REASON_LENGTH)]
    world.tap.stepped(
        "c", Step(slots=[1, 3], num_tokens=[2, 1], token_ids=[7] * 3, deltas=["x"] * 2, finishes=finishes)
    )
    world.tap.stepped("c", Step(finishes=[Finish(3, FINISH_REASON_STOP)]))
    assert world.lines() == [
        WitnessLine("r", 4, answer_id="a", num_prompt_tokens=7),
        WitnessLine("r", 2, answer_id="b", num_prompt_tokens=3),
    ]


def test_a_continuation_has_what_came_before(tmp_path: Path) -> None:
    """A ticket proves that it is the same answer: its earlier output is no prompt, and that of ended choices counts."""
    world = World(tmp_path)
    world.ask("a", ChoiceSpec(1, 0, [7, 7]), num_ended_tokens=5)
    step = Step(slots=[1], token_ids=[7], deltas=["x"], finishes=[Finish(1, FINISH_REASON_STOP)])
    world.tap.stepped("c", step)
    assert world.lines() == [WitnessLine("r", 8, answer_id="a", num_prompt_tokens=3, num_resumed_tokens=7)]


@pytest.mark.parametrize("reason", [FINISH_REASON_ERROR, FINISH_REASON_LENGTH])
def test_a_continuation_for_which_nothing_is_computed_has_nothing(
    tmp_path: Path, reason: FinishReason.ValueType
) -> None:
    """It is refused, or ends at once because no budget is left; no usage record may say that it was continued.
    (`kvloom-lab chaos` found it.)"""
    world = World(tmp_path)
    world.ask("a", ChoiceSpec(1, 0, [7, 7]))
    world.tap.stepped("c", Step(finishes=[Finish(1, reason)]))
    assert world.lines() == [WitnessLine("r", 0, False, "a", 3)]


def test_an_answer_whose_client_leaves_is_incomplete(tmp_path: Path) -> None:
    """No step comes after that, and what was on its way is no difference."""
    world = World(tmp_path)
    world.ask("a", ChoiceSpec(1, 0), ChoiceSpec(2, 1))
    world.tap.stepped("c", Step(slots=[1, 2], token_ids=[7, 7], deltas=["x"] * 2))
    ended = RequestEnded(
        "r", "acme/web", "m", "s", 1, FINISH_REASON_CANCELLED, 0, 3, 0, 2, 0.0, None, 1.0, client_id="c"
    )
    assert not world.tap.ended(ended)
    assert world.lines() == [WitnessLine("r", 2, False, "a", 3)]
    assert not world.tap._open
