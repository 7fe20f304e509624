"""The requests that routers make for judges."""

from __future__ import annotations

from typing import Any

from kvloom.v1.safety_service_pb2 import JudgeMessage, JudgeQuestion
from router.core.events import RequestArrived, TierRank
from router.features.judges import JudgeDesk
from router.request_validator import RequestValidator
from tests.fakes.served_models import tiny_models
from tests.waiting import eventually

TENANT = "acme/search"


class Core:
    """Takes events as a core's driver does."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def add_client(self, client_id: str, sink: Any) -> None:
        self.client = client_id, sink

    def dispatch(self, event: Any) -> None:
        self.events.append(event)


class Asker:
    is_closed = False

    def answer_question(self, answer: Any) -> None:
        raise AssertionError(answer)


async def test_a_judge_s_own_request_has_no_guardrails() -> None:
    """Those of the tenant whose text it judges hold for texts. Where answers are not screened, a core refuses requests
    with guardrails, and so the judge would never be asked."""
    intake = RequestValidator(tiny_models(), 1000, lambda: True, guardrails_of={TENANT: ("codes",)}.__getitem__)
    core: Any = Core()
    asker: Any = Asker()
    message = JudgeMessage(role="user", content="the fox")
    JudgeDesk(core, intake, None).ask(
        JudgeQuestion(question_id=1, model="tiny", messages=[message], max_tokens=4, tenant=TENANT), asker
    )
    await eventually(lambda: core.events, "the request")
    [arrived] = core.events
    assert isinstance(arrived, RequestArrived)
    assert (arrived.request.tenant, arrived.request.tier) == (TENANT, TierRank.JUDGE)
    assert not arrived.request.guardrails
