"""Counts what clients outside the fabric are sent, for `kvloom usage reconcile`: by the prompts that come and the steps
that leave the router, not by what the core counts."""

from __future__ import annotations

import msgspec

from kvloom.v1.generation_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_LENGTH, FINISH_REASON_STOP
from kvloom_common.delivery_log import DeliveryLog, WitnessLine
from kvloom_common.tenancy.usage_record import UsageRecord
from router.core.actions import RequestEnded
from router.core.events import Request, RequestArrived
from router.core.frames import Step


class _Delivery(msgspec.Struct):
    """One request."""

    line: WitnessLine
    num_open: int
    """Choices whose end its client has not been sent."""
    num_tokens: int = 0
    is_complete: bool = True


def note_settled(witness: DeliveryLog, record: bytes) -> None:
    """A usage record (JSON) has been corrected: what the router sent is not what arrived. The counts of edges are those
    of what arrived."""
    found = msgspec.json.decode(record, type=UsageRecord)
    if found.answer_id:
        witness.note(
            WitnessLine(
                found.request_id,
                found.num_output_tokens,
                False,
                found.answer_id,
                found.num_prompt_tokens,
                found.num_resumed_tokens,
                is_settled=True,
            )
        )


class DeliveryWitness:
    """A tap of the core driver."""

    def __init__(self, witness: DeliveryLog) -> None:
        self._witness = witness
        self._open: dict[str, dict[int, _Delivery]] = {}
        """By client and its slot."""

    def arrived(self, event: RequestArrived) -> Request:
        request = event.request
        if request.answer_id:
            num_prompt, num_given = len(request.prompt_token_ids), 0
            for choice in request.choices:
                num_given += len(choice.output_token_ids)
            if request.is_continued:
                num_given += request.num_ended_tokens
            else:
                num_prompt, num_given = num_prompt + num_given, 0
            line = WitnessLine(
                request.request_id,
                0,
                answer_id=request.answer_id,
                num_prompt_tokens=num_prompt,
                num_resumed_tokens=num_given,
            )
            delivery = _Delivery(line, len(request.choices), num_given)
            slots = self._open.setdefault(request.client_id, {})
            slots.update((choice.slot, delivery) for choice in request.choices)
        return request

    def stepped(self, client_id: str, step: Step) -> None:
        slots = self._open.get(client_id)
        if slots is None:
            return
        counts = step.num_tokens or [1] * len(step.slots)
        for slot, count in zip(step.slots, counts, strict=True):
            if slot in slots:
                slots[slot].num_tokens += count
        for finish in step.finishes:
            if finish.slot in slots:
                self._close(client_id, finish.slot, finish.reason in (FINISH_REASON_STOP, FINISH_REASON_LENGTH))

    def ended(self, ended: RequestEnded) -> bool:
        """No request is its own. Of one that was cancelled, no step comes if its client is gone."""
        if ended.reason == FINISH_REASON_CANCELLED:
            for slot, delivery in list(self._open.get(ended.client_id, {}).items()):
                if delivery.line.request_id == ended.request_id:
                    self._close(ended.client_id, slot, False)
        return False

    def is_own(self, request: Request) -> bool:  # noqa: ARG002
        return False

    def _close(self, client_id: str, slot: int, is_complete: bool) -> None:
        """A choice has ended; with its last one, the request is written down."""
        slots = self._open[client_id]
        delivery = slots.pop(slot)
        if not slots:
            del self._open[client_id]
        delivery.num_open -= 1
        delivery.is_complete &= is_complete
        if not delivery.num_open:
            line, count = delivery.line, delivery.num_tokens
            if line.num_resumed_tokens and count == line.num_resumed_tokens:
                # Nothing was computed for it: what its client had before may count, or not (UsageRecord.counting).
                count, delivery.is_complete = 0, False
                line = msgspec.structs.replace(line, num_resumed_tokens=0)
            self._witness.note(msgspec.structs.replace(line, num_output_tokens=count, is_complete=delivery.is_complete))
