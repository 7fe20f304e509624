"""Answers from the result cache."""

from __future__ import annotations

from typing import Final

from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from lab.dst.checker import Checker
from lab.dst.nodes.result_cache import content_of
from lab.dst.observed import ObservedRequest
from lab.dst.views import SimulatedRouterView
from router.core.actions import RequestEnded

_COMPLETE: Final = (FINISH_REASON_STOP, FINISH_REASON_LENGTH)


class CachedAnswersOwn(Checker):
    """A tenant gets a cached answer only to what it has asked for itself, under the same policy, and only if it got the
    whole answer then."""

    invariant = "cached_answers_own"

    def __init__(self) -> None:
        self._answered: set[tuple[object, ...]] = set()

    def on_ended(self, node: SimulatedRouterView, observed: ObservedRequest | None, end: RequestEnded) -> None:
        if observed is None or not observed.request.is_cacheable:
            if end.is_result_cache_hit:
                self.fail(f"{end.request_id} got a cached answer, which it may not have")
            return
        request = observed.request
        indexes = tuple(choice.spec.index for choice in observed.choices)
        asked = (node.name, request.tenant, observed.policy, indexes, *content_of(request))
        if end.is_result_cache_hit and asked not in self._answered:
            self.fail(f"{end.request_id} of {request.tenant} got an answer that was not given to it before")
        if end.reason in _COMPLETE:
            self._answered.add(asked)
