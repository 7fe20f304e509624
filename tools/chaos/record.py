"""What is kept of every answer: small, since a run has many."""

from __future__ import annotations

import dataclasses

from tools.chaos.checker import Finding, Verdict
from tools.chaos.clients.questions import Errand
from tools.chaos.clients.transcript import Expected, Transcript
from tools.chaos.ledger import Delivery


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    errand: Errand
    seen: Transcript
    finding: Finding
    num_due_tokens: int
    num_seen_tokens: int

    @classmethod
    def of(cls, errand: Errand, expected: Expected, seen: Transcript, finding: Finding) -> Record:
        record = cls(errand, seen, finding, expected.num_output_tokens, seen.num_seen_tokens(expected))
        for choice in seen.choices:  # judged; the text is what would fill the memory
            choice.text, choice.token_ids = "", None
        if not (seen.num_breaks or seen.num_takeovers or finding.verdict not in (Verdict.OK, Verdict.LEFT)):
            seen.story.clear()
        return record

    @property
    def is_complete(self) -> bool:
        return self.seen.num_output_tokens is not None

    def delivery(self, *, may_miss_usage_record: bool) -> Delivery:
        return Delivery(
            request_ids=tuple(self.seen.request_ids),
            num_seen_tokens=self.num_seen_tokens,
            num_due_tokens=self.num_due_tokens,
            is_complete=self.is_complete,
            may_miss_usage_record=may_miss_usage_record,
        )
