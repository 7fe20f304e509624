"""`kvloom-lab chaos --stored` must not pass a response that is gone, half there or another one: planted ones."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from lab.chaos.checking.explanations import FleetSize, is_explained
from lab.chaos.checking.metering import Delivery, LoggedUsage, compare_metering
from lab.chaos.checking.stored import StoredResponse, judge_stored
from lab.chaos.checking.verdicts import AnswerVerdict, Finding, judge
from lab.chaos.clients.oracle import cut_at_stop, prompt_ids_of
from lab.chaos.clients.questions import RESPONSE_SEED, Behaviour, Endpoint, Question, UserCall, draw_response
from lab.chaos.clients.sse_reading import EventReader
from lab.chaos.clients.transcript import AnswerEnd, Expected, Transcript
from lab.chaos.fabric.faults import Disturbance, FaultKind
from tests.fakes.tiny_tokenizer import model_tokenizer

WORDS = [" the", " river", " runs", " past"]
EXPECTED = Expected((cut_at_stop(range(4), WORDS, ()),), num_prompt_tokens=5)
QUESTION = Question("Tell me about tea.", True, 10, 1.0, seed=1)


def response(text: str = "".join(WORDS), status: str = "incomplete", **more: Any) -> dict[str, Any]:
    output = [{"type": "message", "content": [{"type": "output_text", "text": text}]}]
    return {"status": status, "output": output, "usage": {"input_tokens": 5, "output_tokens": 4}, **more}


def verdict(status: int, body: dict[str, Any], end: AnswerEnd = AnswerEnd.COMPLETE, *, background: bool = False) -> str:
    return judge_stored(StoredResponse("resp_1", "u1", EXPECTED, end, background), status, body).verdict


def test_a_promised_response_must_be_there() -> None:
    """Promised is what has ended for its client, and in the background what has an id."""
    assert verdict(200, response()) == AnswerVerdict.OK
    assert verdict(404, {}) == AnswerVerdict.LOST
    assert verdict(404, {}, AnswerEnd.BROKEN) == AnswerVerdict.LEFT
    assert verdict(404, {}, AnswerEnd.BROKEN, background=True) == AnswerVerdict.LOST


@pytest.mark.parametrize("end", [AnswerEnd.COMPLETE, AnswerEnd.BROKEN])
def test_what_is_there_is_whole(end: AnswerEnd) -> None:
    """Also where its client was not told that it is stored."""
    assert verdict(200, response(" the river"), end) == AnswerVerdict.LOST
    assert verdict(200, response(" the river river past"), end) != AnswerVerdict.OK
    usage = {"input_tokens": 5, "output_tokens": 8}
    assert verdict(200, response(usage=usage), end) == AnswerVerdict.MISCOUNTED
    assert verdict(200, response(status="in_progress"), end) == AnswerVerdict.LOST


def test_a_failure_is_one_that_its_client_was_told() -> None:
    """What is generated in the background may not fail behind the back of a client that has read something else."""
    failed = response("", "failed", error={"code": "server_error", "message": "It has failed."})
    assert verdict(200, failed, AnswerEnd.ERROR, background=True) == AnswerVerdict.FAILED
    assert verdict(200, failed, AnswerEnd.COMPLETE, background=True) == AnswerVerdict.LOST
    assert verdict(200, failed, AnswerEnd.ERROR) == AnswerVerdict.LOST, "it should not be stored"


def read(*events: dict[str, Any], comment: bytes = b"") -> Transcript:
    transcript = Transcript.begin(1, 0.0)
    reader = EventReader(transcript)
    for number, event in enumerate(events, 1):
        head = b"id: %d\nevent: %b\n" % (number, event["type"].encode())
        reader.feed(comment + head + b"data: " + json.dumps(event).encode() + b"\n\n", 1.0)
    return transcript


def delta(number: int, text: str) -> dict[str, Any]:
    return {"type": "response.output_text.delta", "sequence_number": number, "delta": text}


def last(number: int, text: str = "".join(WORDS)) -> dict[str, Any]:
    return {"type": "response.incomplete", "sequence_number": number, "response": response(text)}


def test_the_events_of_a_response_are_one_after_the_other() -> None:
    """Each has its number, and together they are what the last one says. Comments keep a stream alive."""
    deltas = [delta(number, word) for number, word in enumerate(WORDS)]
    assert judge(EXPECTED, read(*deltas, last(4), comment=b": keep-alive\n")).verdict is AnswerVerdict.OK
    assert judge(EXPECTED, read(*deltas[:2], *deltas[1:], last(4))).verdict is AnswerVerdict.DOUBLED
    assert judge(EXPECTED, read(*deltas, last(5))).verdict is AnswerVerdict.LOST
    renumbered = [delta(number, word) for number, word in enumerate(WORDS[1:])]
    assert judge(EXPECTED, read(*renumbered, last(3))).verdict is AnswerVerdict.LOST
    assert judge(EXPECTED, read(*deltas[:3])).verdict is AnswerVerdict.LOST


def test_a_background_response_is_metered_by_the_name_that_its_client_has() -> None:
    """What is generated for it has ids of its own, and a credit has only these."""
    known = {"client_request_id": "resp_1"}
    records = [
        LoggedUsage("a", num_output_tokens=3, **known),
        LoggedUsage("a", num_credited_tokens=1),
        LoggedUsage("b", num_output_tokens=2, **known),
    ]
    delivery = Delivery(("resp_1",), 4, num_due_tokens=4, is_complete=True, may_miss_usage_record=False)
    assert compare_metering([delivery], records).num_exact == 1
    assert compare_metering([delivery], [*records, LoggedUsage("b", num_output_tokens=2)]).over


def test_a_question_that_follows_has_the_turns_before_it() -> None:
    """The answer depends on all of them: one that was stored otherwise gives another answer."""
    rng = random.Random(1)
    turns = (("Tell me about tea.", " the river"),)
    before = Question("", True, 10, 1.0, 1, previous_response_id="resp_1", earlier=turns)
    drawn = [draw_response(rng, QUESTION, before) for _ in range(200)]
    following = [call for call in drawn if call.question.earlier == turns]
    assert all(call.question.previous_response_id == "resp_1" for call in following)
    assert 0 < len(following) < len(drawn)
    assert {(call.endpoint, call.question.seed) for call in drawn} == {(Endpoint.RESPONSE, RESPONSE_SEED)}


async def test_the_prompt_of_a_question_that_follows() -> None:
    """As the edge renders it: the turns before it, each with its answer."""
    tokenizer = model_tokenizer()
    question = Question("And milk?", True, 10, 1.0, 1, earlier=(("Tell me about tea.", " the river"),))
    text = tokenizer.decode(await prompt_ids_of(question, tokenizer), skip_special_tokens=False)
    places = [text.index(part) for part in ("user\nTell me", "assistant\n the river", "user\nAnd milk?")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("kind", "code", "is_excused"),
    [
        (FaultKind.KILL_ORCHESTRATOR, "orchestrator_unavailable", True),
        (FaultKind.DISK_FULL, "orchestrator_unavailable", True),
        (FaultKind.KILL_SHARD, "orchestrator_unavailable", False),
        (FaultKind.KILL_EDGE, "not_found", False),
        (FaultKind.REDIS_TAKEOVER, "not_found", False),
        (FaultKind.KILL_ORCHESTRATOR, "server_error", False),
    ],
)
def test_what_excuses_that_a_response_was_not_stored(kind: FaultKind, code: str, is_excused: bool) -> None:
    """Nothing excuses that one is not found, or fails in the background."""
    transcript = Transcript.begin(1, now=100.0)
    transcript.end, transcript.code, transcript.ended_at = AnswerEnd.ERROR, code, 105.0
    call = UserCall(QUESTION, Endpoint.RESPONSE, Behaviour.RESUMABLE)
    struck = [Disturbance(kind, "x", 101.0, 102.0)]
    fleet = FleetSize(num_edges=2, num_routers=2, num_shards=2, max_attempts=3)
    assert is_explained(call, transcript, Finding(AnswerVerdict.FAILED), struck, fleet) is is_excused
