"""A request to a router, and the progress of its answer."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

from kvloom.v1.router_service_pb2 import GenerateRequest, Submit


class ChoiceProgress:
    """Records what the sink has received of one choice. Another router continues after it."""

    __slots__ = ("index", "is_done", "num_cached_tokens", "num_chars", "token_ids")

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: array[int] = array("I")
        """Four bytes per token, because thousands of long answers are kept."""
        self.num_chars = 0
        """How many Unicode code points of their text were delivered."""
        self.num_cached_tokens: int | None = None
        """The number of cached tokens reported when the choice first started; None: it has not started."""
        self.is_done = False


@dataclasses.dataclass(slots=True)
class LinkRequest:
    """A request on its way to a router: the one message in which all that it wants stands, and what changes on the
    way."""

    submit: Submit
    """The message without the prompt's tokens and without choices, which the link adds for its router."""
    prompt_token_ids: Sequence[int]
    partial_choices: Sequence[ChoiceProgress] = ()
    """The output that other routers have delivered of the choices that are still wanted; `n` is not used then. Empty:
    generate all n choices from their beginning."""
    is_new: bool = False
    """True when another model has generated the `partial_choices`, and no router has lost this request. So it is sent
    at once, and a rejection is final, as for any other new request."""

    @property
    def wanted(self) -> GenerateRequest:
        """The part of the message that says what the caller wants."""
        return self.submit.request

    @property
    def n(self) -> int:
        """The number of choices of the whole answer."""
        return self.submit.request.n or 1

    def later(self, partial_choices: Sequence[ChoiceProgress]) -> LinkRequest:
        """A copy to be changed for another router, which continues these choices."""
        submit = Submit()
        submit.CopyFrom(self.submit)
        return LinkRequest(submit, self.prompt_token_ids, partial_choices)
