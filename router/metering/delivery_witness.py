"""Counts what clients outside the fabric are sent, for `kvloom usage reconcile`: by the prompts that come and the steps
that leave the router, not by what the core counts."""

from __future__ import annotations

import msgspec

from kvloom.v1.generation_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_LENGTH, FINISH_REASON_STOP
from kvloom_common.usage_witness import UsageWitness, WitnessLine
from router.core.actions import RequestEnded
from router.core.events import Request
from router.core.frames import Step


class _Delivery(msgspec.Struct):
    """One request."""

    line: WitnessLine
    num_open: int
    """Choices whose end its client has not been sent."""
    num_tokens: int = 0
    is_complete: bool = True


class DeliveryWitness:
    """A tap of the core driver."""

    def __init__(self, witness: UsageWitness) -> None:
        self._witness = witness
        self._open: dict[str, dict[int, _Delivery]] = {}
        """By client and its slot."""

    def arrived(self, request: Request) -> Request:
        if request.answer_id:
            num_given = sum(len(choice.output_token_ids) for choice in request.choices)
            num_prompt = len(request.prompt_token_ids) + num_given
            line = WitnessLine(request.request_id, 0, answer_id=request.answer_id, num_prompt_tokens=num_prompt)
            delivery = _Delivery(line, len(request.choices))
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
            delivery = slots.pop(finish.slot, None)
            if delivery is None:
                continue
            delivery.num_open -= 1
            delivery.is_complete &= finish.reason in (FINISH_REASON_STOP, FINISH_REASON_LENGTH)
            if not delivery.num_open:
                self._note(delivery)
        self._forget_if_idle(client_id)

    def ended(self, ended: RequestEnded) -> bool:
        """No request is its own. Of one that was cancelled, no step comes if its client is gone."""
        slots = self._open.get(ended.client_id)
        if slots is not None and ended.reason == FINISH_REASON_CANCELLED:
            left = {slot: one for slot, one in slots.items() if one.line.request_id == ended.request_id}
            for slot, delivery in left.items():
                del slots[slot]
                delivery.is_complete = False
            for delivery in {id(one): one for one in left.values()}.values():
                self._note(delivery)
            self._forget_if_idle(ended.client_id)
        return False

    def is_own(self, request: Request) -> bool:  # noqa: ARG002
        return False

    def _forget_if_idle(self, client_id: str) -> None:
        if not self._open[client_id]:
            del self._open[client_id]

    def _note(self, delivery: _Delivery) -> None:
        line = delivery.line
        self._witness.note(
            msgspec.structs.replace(line, num_output_tokens=delivery.num_tokens, is_complete=delivery.is_complete)
        )
