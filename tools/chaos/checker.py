"""Compares what a client saw with what should have come. Pure: planted faults show that it catches them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from tools.chaos.clients.transcript import End, Expected, ExpectedChoice, SeenChoice, Transcript


class Verdict(enum.StrEnum):
    OK = "ok"
    LEFT = "left"
    """By its client; what had come was right."""
    REFUSED = "refused"
    """Clearly, and nothing was delivered."""
    FAILED = "failed"
    """With a clear error; what had come was right."""
    BROKEN = "broken"
    """The connection went; what had come was right."""
    WRONG = "wrong"
    LOST = "lost"
    """Tokens or events are missing, or the answer has no end."""
    DOUBLED = "doubled"
    MISCOUNTED = "miscounted"
    """Its text is right and its usage is not."""


NEVER_ALLOWED = frozenset({Verdict.WRONG, Verdict.LOST, Verdict.DOUBLED, Verdict.MISCOUNTED})


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    verdict: Verdict
    detail: str = ""


_OF_END = {
    End.LEFT: Verdict.LEFT,
    End.ERROR: Verdict.FAILED,
    End.REFUSED: Verdict.REFUSED,
    End.UNREACHABLE: Verdict.REFUSED,
    End.BROKEN: Verdict.BROKEN,
}
_MATCH_LENGTH = 3
"""So many words or tokens in a row tell where in the expected answer one is."""


def judge(expected: Expected, seen: Transcript) -> Finding:
    """The worst that there is to say of an answer."""
    if seen.event_fault:
        return Finding(Verdict.DOUBLED if "again" in seen.event_fault else Verdict.LOST, seen.event_fault)
    complete = seen.end is End.COMPLETE
    for index, (choice, saw) in enumerate(zip(expected.choices, seen.choices, strict=True)):
        finding = _judge_choice(choice, saw, complete)
        if finding is not None:
            return Finding(finding.verdict, f"choice {index}: {finding.detail}")
    if seen.end is End.SILENT:
        return Finding(Verdict.LOST, "no end, no error: the client waited in vain")
    if not complete:
        return Finding(_OF_END[seen.end], seen.code)
    told = (seen.num_prompt_tokens, seen.num_output_tokens)
    due = (expected.num_prompt_tokens, expected.num_output_tokens)
    if told != due:
        return Finding(Verdict.MISCOUNTED, f"usage says {told} prompt and output tokens, there were {due}")
    return Finding(Verdict.OK)


def _judge_choice(expected: ExpectedChoice, seen: SeenChoice, complete: bool) -> Finding | None:
    """None when all is right."""
    if seen.token_ids is not None:
        finding = _compare(expected.token_ids, seen.token_ids, complete, "token")
        if finding is not None:
            return finding
    if seen.text != expected.text and (complete or not expected.text.startswith(seen.text)):
        return _compare(expected.text.split(" "), seen.text.split(" "), complete, "word") or Finding(
            Verdict.WRONG, "its text differs within a word"
        )
    if complete and seen.finish_reason is None:
        return Finding(Verdict.LOST, "it has no finish_reason")
    if seen.finish_reason not in (None, expected.finish_reason):
        return Finding(Verdict.WRONG, f"finish_reason {seen.finish_reason}, not {expected.finish_reason}")
    return None


def _compare(expected: Sequence[Any], seen: Sequence[Any], complete: bool, unit: str) -> Finding | None:
    """Where they part, and whether what follows was there before (doubled) or should come later (lost)."""
    position = 0
    while position < min(len(expected), len(seen)) and expected[position] == seen[position]:
        position += 1
    if position == len(seen):
        if complete and position < len(expected):
            return Finding(Verdict.LOST, f"it ends after {position} of {len(expected)} {unit}s")
        return None
    what_follows = list(seen[position : position + _MATCH_LENGTH])
    for start in range(len(expected) - len(what_follows) + 1):
        if list(expected[start : start + len(what_follows)]) == what_follows:
            if start < position:
                return Finding(Verdict.DOUBLED, f"{unit} {position + 1} is {unit} {start + 1} again")
            return Finding(Verdict.LOST, f"after {position} {unit}s, {start - position} are missing")
    return Finding(Verdict.WRONG, f"{unit} {position + 1} is not the one that it should be")
