"""A ticket holds for one answer of one key, for a time and a few times, and nothing else passes for one."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from kvloom.v1 import router_service_pb2 as pb
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, FINISH_REASON_STOP, SamplingParams, StopConditions
from kvloom_common.models.served_model import ServedModel
from kvloom_common.trust.sealing import SecretSealer
from kvloom_common.trust.secret import FabricSecret
from router.caller_scope import CallerScope
from router.continuation_tickets import (
    LIFETIME_SECONDS,
    MAX_USES,
    MAX_USES_PER_TENANT,
    ContinuationTickets,
    digest_of,
)
from router.core.actions import RequestEnded
from router.core.events import Request
from router.request_validator import PreparedRequest, RequestValidator
from tests.fakes.tiny_tokenizer import model_tokenizer

TOKENIZER = model_tokenizer()
SECRET = FabricSecret.draw()
OUTSIDE = CallerScope("acme/search")


class Fabric:
    """Two routers of one secret; `now` is their clock's time."""

    def __init__(self) -> None:
        self.now = time.time()
        self.first, self.second = self.router(), self.router()

    @staticmethod
    def digest(answer: Request) -> str:
        return digest_of(answer, 2, "", "")

    def router(self, secret: FabricSecret = SECRET) -> RequestValidator:
        self.tickets = ContinuationTickets(SecretSealer(secret), lambda: self.now)
        models = {name: ServedModel(name, TOKENIZER, 0, "fp") for name in ("m", "other")}
        return RequestValidator(models, 1000, lambda: True, meters_usage=True, tickets=self.tickets)


def wanted(*claims: str, ticket: bytes = b"", **fields: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        **{
            "model": "m",
            "text": "the fox",
            "request_id": "r",
            "n": 2,
            "sampling": SamplingParams(temperature=0.5, seed=7),
            "stop": StopConditions(max_tokens=50),
            "continuation_ticket": ticket,
            **fields,
        }
    )
    for index, claim in enumerate(claims):
        request.partial_choices.add(
            index=index, token_ids=TOKENIZER.encode_now(claim), num_delivered_chars=len(claim), done=index > 0
        )
    return request


async def accept(
    router: RequestValidator, request: pb.GenerateRequest, scope: CallerScope = OUTSIDE, client: str = "c"
) -> PreparedRequest:
    return await router.accept_generate(request, client, scope=scope)


async def begun(fabric: Fabric, request: pb.GenerateRequest | None = None) -> tuple[Request, bytes]:
    """An answer of the first router, and its ticket: 1 token of the prompt was cached."""
    found = (await accept(fabric.first, request or wanted())).request
    assert found.issue_ticket is not None
    return found, found.issue_ticket(1)


async def believed(
    router: RequestValidator, request: pb.GenerateRequest, scope: CallerScope = OUTSIDE, client: str = "c"
) -> bool:
    """Whether the answer counts as begun in the fabric."""
    found = (await accept(router, request, scope, client)).request
    assert found.is_continued is (found.num_claimed_tokens == 0)
    return found.is_continued


async def test_another_router_continues_the_same_answer() -> None:
    """It is one answer for usage records, and its earlier output is output, though it is screened as a prompt."""
    fabric = Fabric()
    answer, ticket = await begun(fabric)
    continued = (await accept(fabric.second, wanted("jumps", "over the", ticket=ticket))).request
    assert continued.answer_id == answer.answer_id != ""
    assert (continued.is_continued, continued.num_claimed_tokens, continued.most_cached_tokens) == (True, 0, 1)
    assert continued.num_earlier_tokens == len(TOKENIZER.encode_now("jumps")) + len(TOKENIZER.encode_now("over the"))
    assert continued.prompt_text == "the fox\njumps"
    assert continued.issue_ticket is None


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "the dog"},
        {"request_id": "s"},
        {"n": 3},
        {"model": "other"},
        {"tier": pb.TIER_BATCH},
        {"priority_class": "batch"},
        {"sampling": SamplingParams(temperature=0.5, seed=8)},
        {"sampling": SamplingParams(temperature=0.6, seed=7)},
        {"sampling": SamplingParams(temperature=0.5, seed=7, logit_bias={3: 1.0})},
        {"stop": StopConditions(max_tokens=51)},
        {"stop": StopConditions(max_tokens=50, ignore_eos=True)},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_a_ticket_holds_for_no_other_request(fields: dict[str, Any]) -> None:
    """Otherwise one answer would pay for all of them, or at another price."""
    fabric = Fabric()
    _, ticket = await begun(fabric)
    assert not await believed(fabric.second, wanted("jumps", ticket=ticket, **fields))
    assert await believed(fabric.second, wanted("jumps", ticket=ticket))


@pytest.mark.parametrize("thief", ["acme/other", "globex/search", ""])
async def test_a_stolen_ticket_is_worth_nothing(thief: str) -> None:
    """Not even within the organisation."""
    fabric = Fabric()
    _, ticket = await begun(fabric)
    assert not await believed(fabric.second, wanted("jumps", ticket=ticket), CallerScope(thief))


async def test_forged_tickets_are_worth_nothing() -> None:
    """Neither damaged ones, nor those of another fabric, nor what is no ticket at all."""
    fabric = Fabric()
    _, ticket = await begun(fabric)
    elsewhere = Fabric()
    elsewhere.first = elsewhere.router(FabricSecret.draw())
    _, foreign = await begun(elsewhere)
    plain = msgspec.json.encode(["a" * 16, 0, fabric.now])
    altered = [ticket[:at] + bytes([ticket[at] ^ 1]) + ticket[at + 1 :] for at in range(len(ticket))]
    for forged in (b"", b"x", ticket[:-1], ticket + b"x", b"x" * 1000, foreign, plain, *altered):
        assert not await believed(fabric.second, wanted("jumps", ticket=forged))


async def test_a_ticket_expires() -> None:
    """An hour is longer than answers take."""
    fabric = Fabric()
    _, ticket = await begun(fabric)
    fabric.now += LIFETIME_SECONDS
    assert await believed(fabric.second, wanted("jumps", ticket=ticket))
    fabric.now += 1.0
    assert not await believed(fabric.second, wanted("jumps", ticket=ticket))


async def test_a_ticket_is_believed_a_few_times() -> None:
    """However long a router remembers; a refusal is no use, and ends once."""
    fabric = Fabric()
    _, ticket = await begun(fabric)
    outcomes = [await believed(fabric.second, wanted("jumps", ticket=ticket), client=f"c{n}") for n in range(5)]
    assert outcomes == [True] * MAX_USES + [False] * 2
    for _ in range(2):
        fabric.tickets.request_ended(ended("c1", 0))
    fabric.tickets.request_ended(ended("c2", 1))
    fabric.tickets.request_ended(ended("unknown", 0))
    outcomes = [await believed(fabric.second, wanted("jumps", ticket=ticket)) for _ in range(2)]
    assert outcomes == [True, False]
    fabric.now += LIFETIME_SECONDS
    assert not await believed(fabric.second, wanted("jumps", ticket=ticket))


def ended(client: str, num_attempts: int, error_reason: int = 0) -> RequestEnded:
    reason = FINISH_REASON_ERROR if error_reason else FINISH_REASON_STOP
    request_id, tenant = OUTSIDE.request_id("r"), "acme/search"
    return RequestEnded(
        request_id, tenant, "m", "", num_attempts, reason, error_reason, 3, 0, 0, 0.0, None, 1.0, client_id=client
    )


async def test_a_duplicate_on_a_shared_stream_gives_no_use_back() -> None:
    """A client that sent the same id twice over `Connect` had any number of uses."""
    fabric = Fabric()
    answer, ticket = await begun(fabric)
    duplicate = ended("c", 0, ErrorReason.ERROR_REASON_DUPLICATE_REQUEST_ID)
    held = []
    for _ in range(MAX_USES + 1):
        held.append(fabric.tickets.redeem(ticket, fabric.digest(answer), answer, is_alone=False) is not None)
        fabric.tickets.request_ended(duplicate)
    assert held == [True] * MAX_USES + [False]
    _, ticket = await begun(fabric, wanted(text="the dog"))
    again = wanted("jumps", ticket=ticket, text="the dog")
    for _ in range(MAX_USES + 1):  # a `Generate` has a stream of its own, and may have come too early
        assert await believed(fabric.second, again)
        fabric.tickets.request_ended(duplicate)


async def test_one_tenants_tickets_are_no_other_tenants_burden() -> None:
    """What a router remembers is bounded for each tenant, and a tenant that reaches the bound is not believed."""
    fabric = Fabric()
    fabric.tickets._tenant_uses["acme/search"] = MAX_USES_PER_TENANT
    _, ticket = await begun(fabric)
    assert not await believed(fabric.second, wanted("jumps", ticket=ticket))
    other = CallerScope("globex/web")
    found = (await accept(fabric.first, wanted(), other)).request
    assert found.issue_ticket is not None
    assert await believed(fabric.second, wanted("jumps", ticket=found.issue_ticket(0)), other)


async def test_only_answers_that_begin_get_tickets() -> None:
    """One that continues has that of its beginning, and what is only claimed to have begun gets none."""
    fabric = Fabric()
    assert (await accept(fabric.first, wanted("jumps"))).request.issue_ticket is None
    assert (await fabric.first.accept_generate(wanted(), "edge")).request.issue_ticket is None
