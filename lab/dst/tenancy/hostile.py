"""Clients outside the fabric that claim what suits them: that an answer was begun, how much of it they have, tickets of
other answers, again and again. A router makes of that what its validator makes of it (router/request_validator.py).

In a part of the seeds with limits, one of the tenants consists of such clients.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvloom_common.trust.sealing import SecretSealer
from kvloom_common.trust.secret import FabricSecret
from lab.dst import script
from lab.dst.script import ScriptedSampling
from router.continuation_tickets import ContinuationTickets
from router.core.actions import RequestEnded
from router.core.events import ChoiceSpec, Request

HOSTILE_SHARE: Final = 0.6
"""The share of hostile seeds among those with limits."""
_REPEATED_SHARE: Final = 0.65
_SEALER: Final = SecretSealer(FabricSecret(b"i" * 32, (b"s" * 32,)))


class SimulatedHostileTenant:
    """`clock` gives virtual time. Draws from a generator of its own."""

    def __init__(self, seed: int, tenants: Sequence[str], clock: Any) -> None:
        self.rng = random.Random(f"{seed} hostile")
        self.tenant = self.rng.choice(list(tenants)) if self.rng.random() < HOSTILE_SHARE else None
        """None: there is none."""
        self._clock = clock
        self._tickets: dict[str, ContinuationTickets] = {}
        """By router."""
        self._answers: deque[tuple[Request, bytes]] = deque(maxlen=16)
        """Requests of which it has a ticket."""
        self._num_answers = 0

    def claims(self, router: str, request: Request, take_slot: Any) -> Request:
        """The request as its client makes it and the router believes it; that of another tenant is not changed."""
        if request.tenant != self.tenant:
            return request
        if self._answers and self.rng.random() < _REPEATED_SHARE:
            return self._repeated(router, request, take_slot)
        self._num_answers += 1
        num_claimed = sum(len(spec.output_token_ids) for spec in request.choices)
        outside = msgspec.structs.replace(
            request,
            answer_id=f"answer-{self._num_answers}",
            num_claimed_tokens=num_claimed,
            most_cached_tokens=None,  # it may continue one that had a ticket
        )
        if num_claimed:
            return outside
        ticket = self._of(router).issue(_digest(outside), outside.answer_id, 0)
        self._answers.append((outside, ticket))
        return outside

    def _repeated(self, router: str, request: Request, take_slot: Any) -> Request:
        """An earlier request once more, with any ticket, and any beginning of its answer that it says to have."""
        earlier, ticket = self.rng.choice(self._answers)
        if self.rng.random() < 0.2:
            _, ticket = self.rng.choice(self._answers)
        specs = [self._spec(earlier, spec.index, take_slot()) for spec in earlier.choices]
        again = msgspec.structs.replace(
            earlier,
            request_id=request.request_id,
            client_id=request.client_id,
            choices=specs,
            answer_id="",
            is_cacheable=False,  # as the intake decides
        )
        found = self._of(router).redeem(ticket, _digest(earlier), again, is_alone=False)
        if found is not None:
            cached = found.num_cached_tokens
            return msgspec.structs.replace(again, answer_id=found.answer_id, most_cached_tokens=cached)
        self._num_answers += 1
        num_claimed = sum(len(spec.output_token_ids) for spec in specs)
        return msgspec.structs.replace(again, answer_id=f"answer-{self._num_answers}", num_claimed_tokens=num_claimed)

    def _spec(self, request: Request, index: int, slot: int) -> ChoiceSpec:
        assert isinstance(request.sampling, ScriptedSampling)
        tokens = script.answer(request.sampling.script_key, index)
        most = min(len(tokens), request.max_tokens or len(tokens))
        count = self.rng.choice((0, 1, 1, self.rng.randint(0, most), most)) if most else 0
        return ChoiceSpec(slot, index, tokens[:count], len(script.text_shown(tokens, count, is_final=False)))

    def note_end(self, router: str, ended: RequestEnded) -> None:
        """A router reports a request's end."""
        if ended.tenant == self.tenant:
            self._of(router).request_ended(ended)

    def _of(self, router: str) -> ContinuationTickets:
        found = self._tickets.get(router)
        if found is None:
            found = self._tickets[router] = ContinuationTickets(_SEALER, self._clock)
        return found


def _digest(request: Request) -> str:
    """Returns a digest of what determines the answer; see digest_of in router/continuation_tickets.py."""
    assert isinstance(request.sampling, ScriptedSampling)
    return f"{request.tenant} {request.key_id} {request.sampling.script_key}"
