"""Compares what was metered of each answer with what witnesses counted as delivered. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from kvloom.v1.usage_service_pb2 import MeteredAnswer
from kvloom_common.delivery_log import WitnessLine
from kvloom_common.tenancy.usage_record import OWN_TIERS, AnswerRun, last_runs

MAX_NAMED: Final = 20
"""How many answers a report names."""
_Name = tuple[str, str]
"""The request's id and the answer's."""


@dataclasses.dataclass(slots=True)
class Reconciliation:
    num_metered: int = 0
    num_witnessed: int = 0
    num_metered_tokens: int = 0
    """The tokens metered for the answers that have a witness."""
    num_witnessed_tokens: int = 0
    num_exact: int = 0
    num_in_flight_tokens: int = 0
    """Metered tokens of answers that were broken off, which their witness had not received: they were on their way."""
    num_without_witness: int = 0
    """Metered answers whose witness was killed, or that went to a process of the fabric which writes none."""
    num_over: int = 0
    num_under: int = 0
    differences: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        """True when the difference is 0."""
        return not (self.num_over or self.num_under)


def reconcile(metered: Iterable[MeteredAnswer], witnessed: Iterable[WitnessLine]) -> Reconciliation:
    """An answer that is complete must be metered with exactly the tokens that were delivered, and one that was broken
    off with at least these."""
    found = Reconciliation()
    by_name: dict[_Name, list[WitnessLine]] = {}
    for line in witnessed:
        by_name.setdefault((line.request_id, line.answer_id), []).append(line)
    lines = {name: _whole(found) for name, found in by_name.items()}
    tokens: dict[_Name, int] = {}
    prompts: dict[_Name, int] = {}
    for answer in metered:
        if answer.tenant.partition(":")[0] in OWN_TIERS:
            continue  # a router's own, which is delivered to nobody
        found.num_metered += 1
        name = answer.request_id, answer.answer_id
        if name not in lines:
            name = answer.request_id.rpartition(".")[0], ""  # one of the requests of an answer to several prompts
        if name in lines:
            tokens[name] = tokens.get(name, 0) + answer.num_output_tokens
            prompts[name] = prompts.get(name, 0) + answer.num_prompt_tokens
        else:
            found.num_without_witness += 1
    for name, line in lines.items():
        _compare(found, name[0], line, tokens.get(name), prompts.get(name, 0))
    return found


def _whole(lines: Sequence[WitnessLine]) -> WitnessLine:
    """Returns the one line that stands for all lines of an answer."""
    settled = {line.num_resumed_tokens for line in lines if line.is_settled}
    lines = [line for line in lines if line.is_settled or line.num_resumed_tokens not in settled]
    last = max(lines, key=lambda line: (line.is_complete, line.num_output_tokens))
    if len(lines) == 1 or not last.answer_id:
        return last  # an answer that moved to another edge has a line of each; the later one has more of it
    runs = (AnswerRun(line.num_resumed_tokens, line.num_output_tokens, ("", at)) for at, line in enumerate(lines))
    counting = [lines[run.name[1]] for run in last_runs(runs)]
    return msgspec.structs.replace(
        last,
        num_output_tokens=sum(line.num_output_tokens for line in counting),
        num_prompt_tokens=sum(line.num_prompt_tokens for line in counting),
        is_complete=all(line.is_complete for line in counting),
    )


def _compare(found: Reconciliation, name: str, line: WitnessLine, num_metered: int | None, num_prompt: int) -> None:
    if num_metered is None and not line.num_output_tokens:
        return  # refused, or broken off before anything happened
    found.num_witnessed += 1
    found.num_witnessed_tokens += line.num_output_tokens
    found.num_metered_tokens += num_metered or 0
    difference = (num_metered or 0) - line.num_output_tokens
    if line.num_output_tokens and line.num_prompt_tokens and num_prompt != line.num_prompt_tokens:
        found.num_over += num_prompt > line.num_prompt_tokens
        found.num_under += num_prompt < line.num_prompt_tokens
        _name(found, f"{name}: metered a prompt of {num_prompt}, computed {line.num_prompt_tokens}")
    elif difference > 0 and not line.is_complete:
        found.num_in_flight_tokens += difference
    elif difference:
        found.num_over += difference > 0
        found.num_under += difference < 0
        shown = "nothing" if num_metered is None else f"{num_metered} tokens"
        _name(found, f"{name}: metered {shown}, delivered {line.num_output_tokens}")
    else:
        found.num_exact += 1


def _name(found: Reconciliation, difference: str) -> None:
    if len(found.differences) < MAX_NAMED:
        found.differences.append(difference)
