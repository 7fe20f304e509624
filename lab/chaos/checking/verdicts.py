"""Compares a received answer with the expected one. Pure functions; tests show that they catch planted errors."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from lab.chaos.clients.transcript import AnswerEnd, Expected, ExpectedChoice, ReceivedChoice, Transcript


class AnswerVerdict(enum.StrEnum):
    """How an answer turned out."""

    OK = "ok"
    LEFT = "left"
    """The client disconnected on purpose. What it had received was right."""
    REFUSED = "refused"
    """Rejected with a clear error before anything was delivered."""
    FAILED = "failed"
    """Ended with a clear error. What was received was right."""
    BROKEN = "broken"
    """The connection broke. What was received was right."""
    WRONG = "wrong"
    LOST = "lost"
    """Tokens or events are missing, or the answer has no end."""
    DOUBLED = "doubled"
    MISCOUNTED = "miscounted"
    """The text is right but the usage is not."""


NEVER_ALLOWED = frozenset({AnswerVerdict.WRONG, AnswerVerdict.LOST, AnswerVerdict.DOUBLED, AnswerVerdict.MISCOUNTED})


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    verdict: AnswerVerdict
    detail: str = ""


_OF_END = {
    AnswerEnd.LEFT: AnswerVerdict.LEFT,
    AnswerEnd.ERROR: AnswerVerdict.FAILED,
    AnswerEnd.REFUSED: AnswerVerdict.REFUSED,
    AnswerEnd.UNREACHABLE: AnswerVerdict.REFUSED,
    AnswerEnd.BROKEN: AnswerVerdict.BROKEN,
}
_MATCH_LENGTH = 3
"""How many words or tokens in a row identify a position in the expected answer."""


def judge(expected: Expected, transcript: Transcript) -> Finding:
    """Returns the worst finding about an answer."""
    if transcript.event_fault:
        return Finding(
            AnswerVerdict.DOUBLED if "again" in transcript.event_fault else AnswerVerdict.LOST, transcript.event_fault
        )
    complete = transcript.end is AnswerEnd.COMPLETE
    for index, (choice, received) in enumerate(zip(expected.choices, transcript.choices, strict=True)):
        finding = _judge_choice(choice, received, complete)
        if finding is not None:
            return Finding(finding.verdict, f"choice {index}: {finding.detail}")
    if transcript.end is AnswerEnd.SILENT:
        return Finding(AnswerVerdict.LOST, "there was neither an end nor an error")
    if not complete:
        return Finding(_OF_END[transcript.end], transcript.code)
    reported = (transcript.num_prompt_tokens, transcript.num_output_tokens)
    due = (expected.num_prompt_tokens, expected.num_output_tokens)
    if reported != due:
        return Finding(AnswerVerdict.MISCOUNTED, f"usage reports {reported} prompt and output tokens, there were {due}")
    return Finding(AnswerVerdict.OK)


def _judge_choice(expected: ExpectedChoice, received: ReceivedChoice, complete: bool) -> Finding | None:
    """None if everything is right."""
    if received.token_ids is not None:
        finding = _compare(expected.token_ids, received.token_ids, complete, "token")
        if finding is not None:
            return finding
    if received.text != expected.text and (complete or not expected.text.startswith(received.text)):
        return _compare(expected.text.split(" "), received.text.split(" "), complete, "word") or Finding(
            AnswerVerdict.WRONG, "its text differs within a word"
        )
    if complete and received.finish_reason is None:
        return Finding(AnswerVerdict.LOST, "it has no finish_reason")
    if received.finish_reason not in (None, expected.finish_reason):
        return Finding(AnswerVerdict.WRONG, f"finish_reason {received.finish_reason}, not {expected.finish_reason}")
    return None


def _compare(expected: Sequence[Any], received: Sequence[Any], complete: bool, unit: str) -> Finding | None:
    """Finds the first difference, and whether what follows it has occurred before (doubled) or should follow later
    (lost)."""
    position = 0
    while position < min(len(expected), len(received)) and expected[position] == received[position]:
        position += 1
    if position == len(received):
        if complete and position < len(expected):
            return Finding(AnswerVerdict.LOST, f"it ends after {position} of {len(expected)} {unit}s")
        return None
    what_follows = list(received[position : position + _MATCH_LENGTH])
    for start in range(len(expected) - len(what_follows) + 1):
        if list(expected[start : start + len(what_follows)]) == what_follows:
            if start < position:
                return Finding(AnswerVerdict.DOUBLED, f"{unit} {position + 1} is {unit} {start + 1} again")
            return Finding(AnswerVerdict.LOST, f"after {position} {unit}s, {start - position} are missing")
    return Finding(AnswerVerdict.WRONG, f"{unit} {position + 1} is wrong")
