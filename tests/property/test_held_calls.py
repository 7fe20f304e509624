"""No tool call of a gated answer begins for its client before all of it is clear, in any form, however it is cut."""

from __future__ import annotations

import functools
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.v1.generation_pb2 import FinishReason
from kvloom_common.conversation.model_output import output_form
from kvloom_common.parsers.events import Event, ToolCallEnd, ToolCallStart
from kvloom_common.parsers.output_parser import ParserSpec, make_parser
from kvloom_common.text.tokenizer import ModelTokenizer
from router.core.actions import Action, ScreenAnswers, SendStep, SubmitAttempt
from router.core.events import AnswerHalt, AnswersScreened, ChoiceSpec
from router.core.frames import Start
from router.core.held_calls import MAX_CALL_SHARE
from router.incidents.plain_events import WitnessedCalls
from router.parsed_output import ParsedCalls, call_reader
from tests.examples import num_examples
from tests.fakes.core_rig import CoreRig, only
from tests.fakes.tiny_tokenizer import byte_level_tokenizer
from tests.property.test_parsers_split import SPECS, cuts_of, output_of
from tests.unit.kvloom_common.parsers.corpus import TOOLS

WITH_CALLS = [spec for spec in SPECS if spec.tools]
HERMES = ParserSpec(tools="hermes")
LIST = '[{"name": "get_time", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "%s"}}]'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'


class GatedAnswer:
    """A core with one answer, and a service that forbids the text from one position on (None: none of it) and holds
    back the last characters."""

    def __init__(self, spec: ParserSpec, forbidden_at: int | None, num_held: int = 0, max_tokens: int = 10_000) -> None:
        self.rig = CoreRig(safety=(False, True), max_uncleared_tokens=max_tokens)
        self.rig.add_shard(max_model_len=20_000, num_blocks=20_000)
        reader = functools.partial(_reader, spec)
        (choice,) = only(self.rig.submit(max_tokens=15_000, call_reader=reader), SubmitAttempt).choices
        self._slot = choice.slot
        self._forbidden_at = forbidden_at
        self._num_held = num_held
        self._num_screened = 0
        self._has_begun = False
        self._parser = make_parser(spec, TOOLS)
        self.shown = ""
        self.num_ids = 0
        self.events: list[Event] = []
        self.ended_with: list[int] = []

    def write(self, deltas: list[str]) -> None:
        """The shard writes these, a token each."""
        for delta in deltas:
            if self.ended_with:
                return
            starts = [] if self._has_begun else [Start(self._slot, 4, 0.5)]
            self._has_begun = True
            self._take(self.rig.step("s0", (self._slot, [9], delta), starts=starts))

    def finish(self) -> None:
        if not self.ended_with:
            self._take(self.rig.finish("s0", self._slot))

    def num_begun(self) -> int:
        """How many calls have begun for the client; those that have, have ended."""
        kinds = [type(event) for event in self.events]
        assert kinds.count(ToolCallStart) == kinds.count(ToolCallEnd)
        return kinds.count(ToolCallStart)

    def _take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, SendStep):
                text = "".join(action.step.deltas)
                self.shown += text
                self.num_ids += len(action.step.token_ids)
                self.events += self._parser.feed(text)
                self.ended_with += [finish.reason for finish in action.step.finishes]
                if not self.ended_with:
                    self.num_begun()
            elif isinstance(action, ScreenAnswers):
                self._take(self.rig.handle(self._judged(action)))

    def _judged(self, asked: ScreenAnswers) -> AnswersScreened:
        self._num_screened += sum(map(len, asked.deltas))
        [slot] = {*asked.slots, *asked.close_slots}
        at = self._forbidden_at
        if at is not None and self._num_screened > at and not (asked.close_slots and not asked.deltas):
            return AnswersScreened([], [], [AnswerHalt(slot, at, "No.")], asked.close_slots)
        clear = max(0, self._num_screened - self._num_held)
        return AnswersScreened(asked.slots, [clear] * len(asked.slots), [], asked.close_slots)


def _reader(spec: ParserSpec, choice: ChoiceSpec) -> ParsedCalls:
    form = output_form(spec, TOOLS)
    assert form is not None
    return call_reader(form, None, (), choice)


@pytest.mark.parametrize("spec", WITH_CALLS, ids=lambda spec: f"{spec.tools}+{spec.reasoning}")
@settings(max_examples=num_examples(10), deadline=None)
@given(st.binary(max_size=15), st.binary(max_size=24), st.integers(0, 255), st.integers(0, 9))
def test_no_call_is_sent_in_part(spec: ParserSpec, program: bytes, cuts: bytes, place: int, num_held: int) -> None:
    """Whatever the model writes and wherever it is forbidden, a call that has begun for the client is over. Without a
    forbidden passage the client gets all of the output."""
    text = output_of(spec, program)
    deltas = [piece for piece in cuts_of(text, cuts) if piece]
    for forbidden_at in (None, len(text) * place // 256):
        answer = GatedAnswer(spec, forbidden_at, num_held)
        answer.write(deltas)
        if forbidden_at is None or not deltas:
            answer.finish()
            assert answer.shown == text
        else:
            answer.num_begun()
            assert text[:forbidden_at].startswith(answer.shown)
            assert answer.ended_with == [FinishReason.FINISH_REASON_CONTENT_FILTER]


def test_a_condemned_call_leaves_nothing_at_any_split() -> None:
    """Neither its name nor a token of it leaves; the call before it, and the text, do."""
    first, condemned = CALL % "Rome", CALL % "launch code"
    text = "Sure. " + first + condemned + " And"
    at = text.index("launch")
    for length in (1, 2, 3, 7, 20, len(text)):
        deltas = [text[start : start + length] for start in range(0, len(text), length)]
        answer = GatedAnswer(HERMES, at, 3)
        answer.write(deltas)
        begin = len("Sure. " + first)
        assert (text[:begin]).startswith(answer.shown)
        assert answer.num_begun() <= 1
        if length == 1:
            assert answer.shown == text[:begin]
            assert answer.num_ids == begin


@pytest.mark.parametrize(
    ("family", "written"),
    [
        ("granite", "<tool_call>" + LIST),
        ("mistral", "[TOOL_CALLS]" + LIST),
        ("json", LIST),
        ("pythonic", "[get_time(), get_weather(city='%s')]"),
        ("hermes", CALL.replace("get_weather", "get_time") % "x" + CALL),
    ],
)
def test_a_condemned_call_behind_another_one_is_not_begun(family: str, written: str) -> None:
    """The calls of a list have no marker of their own; the first one is sent."""
    text = written % "launch code"
    answer = GatedAnswer(ParserSpec(tools=family), text.index("launch"))
    answer.write([*text])
    assert answer.num_begun() == 1
    assert "get_weather" not in answer.shown


def test_a_call_that_is_allowed_is_sent_when_it_ends() -> None:
    """It does not wait for what follows it."""
    answer = GatedAnswer(HERMES, None)
    answer.write([*"Sure. ", *(CALL % "Rome")])
    assert answer.num_begun() == 1
    answer.write([" And"])
    answer.finish()
    assert answer.shown == "Sure. " + CALL % "Rome" + " And"


@pytest.mark.parametrize("is_too_long", [False, True])
def test_a_call_has_room_to_be_long(is_too_long: bool) -> None:
    """A call may hold more tokens than a slow service may; beyond its bound it is not sent."""
    num_others = len(CALL % "")
    answer = GatedAnswer(HERMES, None, max_tokens=100)
    answer.write([*(CALL % ("x" * (MAX_CALL_SHARE * 100 - num_others + 20 * is_too_long)))])
    if is_too_long:
        assert answer.ended_with == [FinishReason.FINISH_REASON_CONTENT_FILTER]
        assert (answer.shown, answer.num_ids) == ("", 0)
    else:
        assert answer.num_begun() == 1
        answer.finish()
        assert answer.ended_with == [FinishReason.FINISH_REASON_STOP]


def test_a_router_that_continues_an_answer_knows_where_it_stands() -> None:
    """What was delivered is read first: here a list of calls has begun, which no marker says any more."""
    form, tokenizer = output_form(ParserSpec(tools="pythonic"), TOOLS), ModelTokenizer(byte_level_tokenizer())
    assert form is not None
    delivered = "[get_time(), "
    choice = ChoiceSpec(1, 0, tokenizer.encode_now(delivered), len(delivered))
    assert call_reader(form, tokenizer, (), choice).read("get_weather(") == (True, True)
    assert call_reader(form, tokenizer, (), ChoiceSpec(1, 0)).read("get_weather(") == (False, False)


def test_a_recorded_run_can_be_repeated() -> None:
    """Incident logs have what was found in an answer, and not its text."""
    verdicts: deque[bool] = deque()
    reader = WitnessedCalls(ParsedCalls(make_parser(HERMES), "<"), verdicts)
    found = [reader.read(piece) for piece in ("Sure.", *(CALL % "Rome"), " And")]
    assert (True, True) in found
    repeated = WitnessedCalls(None, verdicts)
    assert [repeated.read("x") for _ in found] == found


def test_calls_are_found_behind_a_parser_that_says_nothing() -> None:
    """A plugin's parser may lack `holds_back`: then a call waits for the end of the answer."""

    class Silent:
        num_tool_calls = 0

        def feed(self, text: str) -> list[Event]:
            return []

        def finish(self) -> list[Event]:
            return []

    assert ParsedCalls(Silent()).read("text") == (True, False)
