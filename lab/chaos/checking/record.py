"""A Record is what is kept of an answer. Records are small because a run has many of them."""

from __future__ import annotations

import dataclasses

from lab.chaos.checking.metering import Delivery
from lab.chaos.checking.verdicts import AnswerVerdict, Finding
from lab.chaos.clients.questions import UserCall
from lab.chaos.clients.transcript import Expected, Transcript


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    call: UserCall
    transcript: Transcript
    finding: Finding
    num_due_tokens: int
    num_received_tokens: int
    num_prompt_tokens: int = 0
    tenant: str = ""

    @classmethod
    def of(
        cls, call: UserCall, expected: Expected, transcript: Transcript, finding: Finding, tenant: str = ""
    ) -> Record:
        num_due, num_received = expected.num_output_tokens, transcript.num_received_tokens(expected)
        record = cls(call, transcript, finding, num_due, num_received, expected.num_prompt_tokens, tenant)
        for choice in transcript.choices:  # they have been judged, and the texts would fill the memory
            choice.text, choice.token_ids = "", None
        if not (
            transcript.num_breaks
            or transcript.num_takeovers
            or finding.verdict not in (AnswerVerdict.OK, AnswerVerdict.LEFT)
        ):
            transcript.connection_log.clear()
        return record

    @property
    def is_complete(self) -> bool:
        return self.transcript.num_output_tokens is not None

    def delivery(self, *, may_miss_usage_record: bool) -> Delivery:
        return Delivery(
            request_ids=tuple(self.transcript.request_ids),
            num_received_tokens=self.num_received_tokens,
            num_due_tokens=self.num_due_tokens,
            is_complete=self.is_complete,
            may_miss_usage_record=may_miss_usage_record,
        )
