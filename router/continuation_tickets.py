"""Tickets by which clients outside the fabric prove to another router that one of this fabric has begun their answer.

What such a client says of its answer is not believed: its earlier output would count, and be limited, as a prompt
(router/request_validator.py). A ticket is sealed with the fabric's secret and goes out with an answer's first token, so
it costs nothing per token. It is bound to the tenant, the key, the request id and everything that determines the
answer: with it, only the same answer can be computed again, and never another one.

How much of the answer was received, a ticket doesn't say. So a claim above it is charged as output, limits of tokens
per minute count everything that is computed again, and the ledger tells continuations from repetitions
(kvloom_common/tenancy/usage_record.py).
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from kvloom.sampling import is_greedy
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from kvloom_common.trust.seal import Sealer, SealError
from router.core.actions import RequestEnded
from router.core.events import Request

LIFETIME_SECONDS: Final = 3600.0
MAX_USES: Final = 3
"""How often a router believes one ticket. An SDK client asks each router about once."""
MAX_USES_PER_TENANT: Final = 4096
"""How many uses of one tenant are remembered within a lifetime. Further tickets are not believed: nothing else could
tell a new one from one that was used up."""
MAX_TICKET_BYTES: Final = 512


class ContinuationTicket(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a ticket."""

    answer_id: str
    num_cached_tokens: int
    """How much of the prompt was cached when the answer began: for the router which continues it, the rest is cached as
    well, and was computed all the same."""
    issued_at: float
    """Seconds since 1970."""


class ContinuationTickets:
    """Issues tickets, and counts the uses of those of others. One for each router."""

    def __init__(self, sealer: Sealer, clock: Callable[[], float] = time.time) -> None:
        """`sealer` must have a secret."""
        self._sealer = sealer
        self._clock = clock
        self._uses: Counter[str] = Counter()
        """By answer, since `_began_at`."""
        self._earlier_uses: Counter[str] = Counter()
        """In the period before that."""
        self._tenant_uses: Counter[str] = Counter()
        self._open: dict[tuple[str, str], tuple[str, bool]] = {}
        """Client and request id of a request whose ticket was believed -> the answer, and whether its client has no
        other requests."""
        self._began_at = clock()

    def issue(self, digest: str, answer_id: str, num_cached_tokens: int) -> bytes:
        """The ticket of an answer that has begun. `digest`: see `digest_of`."""
        ticket = ContinuationTicket(answer_id, num_cached_tokens, self._clock())
        return self._sealer.encrypt(digest, msgspec.json.encode(ticket))

    def redeem(self, sealed: bytes, digest: str, request: Request, *, is_alone: bool) -> ContinuationTicket | None:
        """Returns what the ticket says, if it holds for the request with this digest; this counts as a use. None: it is
        forged, damaged, expired, used up, or belongs to another request. `is_alone`: the client stream has no other
        requests."""
        if not sealed or len(sealed) > MAX_TICKET_BYTES:
            return None
        try:
            ticket = msgspec.json.decode(self._sealer.decrypted(digest, sealed), type=ContinuationTicket)
        except (SealError, msgspec.DecodeError):
            return None
        now = self._clock()
        if now - ticket.issued_at > LIFETIME_SECONDS:
            return None
        self._forget_old(now)
        name = f"{digest} {ticket.answer_id}"
        if self._uses[name] + self._earlier_uses[name] >= MAX_USES:
            return None
        if self._tenant_uses[request.tenant] >= MAX_USES_PER_TENANT:
            return None
        self._uses[name] += 1
        self._tenant_uses[request.tenant] += 1
        self._open[request.client_id, request.request_id] = name, is_alone
        return ticket

    def request_ended(self, ended: RequestEnded) -> None:
        """A refusal is no use: the client may ask again."""
        key, tenant = (ended.client_id, ended.request_id), ended.tenant
        name, is_alone = self._open.get(key, ("", False))
        if not name or (ended.error_reason == ErrorReason.ERROR_REASON_DUPLICATE_REQUEST_ID and not is_alone):
            return  # on a stream of many requests, the one with the ticket may run under this name
        del self._open[key]
        if ended.num_attempts:
            return
        for uses, key in ((self._uses, name), (self._tenant_uses, tenant)):
            if uses[key] > 0:
                uses[key] -= 1

    def _forget_old(self, now: float) -> None:
        """A use is remembered for at least a ticket's lifetime."""
        if now - self._began_at >= LIFETIME_SECONDS:
            self._earlier_uses, self._uses, self._began_at = self._uses, Counter(), now
            self._tenant_uses.clear()
            self._open.clear()


def digest_of(request: Request, num_choices: int, priority_class: str, adapter_checksum: str) -> str:
    """Names everything that determines the answer to a request, what it costs and to whom; what was received of it is
    no part. `num_choices`: those that the whole answer has."""
    digest = hashlib.blake2b(digest_size=24)
    for part in (
        request.tenant,
        request.key_id,
        request.request_id,
        request.full_name,
        adapter_checksum,
        f"{num_choices} {request.max_tokens} {request.tier} {priority_class}",
    ):
        _add(digest, part.encode("utf-8", "surrogateescape"))
    sampling, stop = request.sampling, request.stop
    assert isinstance(sampling, SamplingParams)
    assert isinstance(stop, StopConditions)
    if is_greedy(sampling):  # each router draws another seed, which determines nothing
        greedy = SamplingParams()
        greedy.CopyFrom(sampling)
        greedy.ClearField("seed")
        sampling = greedy
    _add(digest, sampling.SerializeToString(deterministic=True))
    _add(digest, stop.SerializeToString(deterministic=True))
    _add(digest, array("I", request.prompt_token_ids).tobytes())
    return "continuation " + digest.hexdigest()


def _add(digest: hashlib.blake2b, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
