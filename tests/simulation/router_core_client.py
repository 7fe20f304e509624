"""A client stream that checks everything it is told."""

from __future__ import annotations

import dataclasses

from kvloom.v1.generation_pb2 import FinishReason
from router.core.events import ChoiceSpec, Request
from router.core.frames import Step
from tests.simulation.router_core_script import answer_tokens, text_after


@dataclasses.dataclass
class Answer:
    request: Request
    spec: ChoiceSpec
    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    num_starts: int = 0
    num_logprobs: int = 0
    reason: int = 0


class SimClient:
    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self.open: dict[int, Answer] = {}
        self.answers: dict[str, list[Answer]] = {}
        self._next_slot = 0

    def take_slot(self) -> int:
        self._next_slot += 1
        return self._next_slot

    def submitted(self, request: Request) -> None:
        answers = [Answer(request, spec) for spec in request.choices]
        self.answers[request.request_id] = answers
        for answer in answers:
            assert answer.spec.slot not in self.open
            self.open[answer.spec.slot] = answer

    def receive(self, step: Step) -> None:
        """Every token is the next one of its answer, exactly; nothing comes behind a finish."""
        assert step, "an empty step was sent"
        assert len(set(step.slots)) == len(step.slots), "one entry per sequence"
        for start in step.starts:
            self.open[start.slot].num_starts += 1
            assert start.shard_id
        counts = step.num_tokens or [1] * len(step.slots)
        assert len(counts) == len(step.slots) == len(step.deltas)
        assert sum(counts) == len(step.token_ids)
        position = 0
        for slot, count, delta in zip(step.slots, counts, step.deltas, strict=True):
            answer = self.open[slot]
            assert answer.num_starts == 1, "tokens come behind their start, which comes once"
            answer.token_ids += step.token_ids[position : position + count]
            answer.text += delta
            position += count
        for slot, _ in step.logprobs:
            self.open[slot].num_logprobs += 1
        for finish in step.finishes:
            answer = self.open.pop(finish.slot)
            answer.reason = finish.reason
            assert finish.num_output_tokens == len(answer.token_ids)
            has_error = finish.reason in (
                FinishReason.FINISH_REASON_ERROR,
                FinishReason.FINISH_REASON_CONTENT_FILTER,
            )
            assert (finish.error is not None) == has_error
            if finish.reason in (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH):
                self._check_complete(answer)
        for slot in {*step.slots, *(finish.slot for finish in step.finishes)}:
            if slot in self.open:
                self._check_prefix(self.open[slot])

    def _check_prefix(self, answer: Answer) -> None:
        tokens = self._expected(answer)
        assert answer.token_ids == tokens[: len(answer.token_ids)], "a token was lost, doubled or changed"
        assert text_after(tokens, len(tokens), is_final=True).startswith(answer.text), "text was lost or changed"
        if answer.request.sampling == "logprobs":
            assert answer.num_logprobs == len(answer.token_ids)

    def _check_complete(self, answer: Answer) -> None:
        tokens = self._expected(answer)
        assert answer.token_ids == tokens
        assert answer.text == text_after(tokens, len(tokens), is_final=True)
        assert answer.num_starts == 1

    def _expected(self, answer: Answer) -> list[int]:
        request = answer.request
        window = 96 - len(request.prompt_token_ids)
        return answer_tokens(request.request_id, answer.spec.index, request.max_tokens or window)
