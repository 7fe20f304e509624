"""Which class a request gets from its message and the configuration."""

from __future__ import annotations

import msgspec
import pytest

from kvloom.errors import KvloomError
from kvloom.v1.generation_pb2 import Choice
from kvloom.v1.router_service_pb2 import TIER_BATCH
from kvloom_common.config import PriorityClassConfig, RouterConfig
from router.core.events import Request
from router.core_settings import declared_classes
from router.request_validator import RequestValidator
from tests.fakes.link_requests import make_submit
from tests.fakes.served_models import tiny_models

GOLD = PriorityClassConfig(name="gold", rank=0, weight=2.0)


def request_of(*configs: PriorityClassConfig, **fields: object) -> Request:
    intake = RequestValidator(tiny_models(), 50, lambda: False, classes=declared_classes(configs))
    fields = {"choices": [Choice(slot=1)], **fields}
    submit = make_submit(model="tiny", prompt_token_ids=[1], **fields)
    return intake.request_from_submit(submit, "c")


def test_without_declared_classes_the_tier_decides() -> None:
    """A fabric without classes must pay nothing for them."""
    assert request_of().priority_class is None


def test_a_declared_class_is_found_by_name() -> None:
    """Its rank and weight come from the configuration, never from the client."""
    found = request_of(GOLD, priority_class="gold").priority_class
    assert found is not None
    assert (found.name, found.rank, found.weight) == ("gold", 0, 2.0)


def test_built_in_classes_age_beside_declared_ones() -> None:
    """Otherwise a declared class could keep batch requests waiting for ever."""
    found = request_of(GOLD, tier=TIER_BATCH).priority_class
    assert found is not None
    assert (found.name, found.aging_seconds) == ("batch", 30.0)


JUDGE = PriorityClassConfig(name="judge", rank=0, reserved_share=0.1)


@pytest.mark.parametrize("name", ["platinum", "shadow", "judge"])
def test_an_unknown_class_is_refused(name: str) -> None:
    """The error names the field; the classes of shadow traffic and of judges are the router's own, declared or not."""
    with pytest.raises(KvloomError) as caught:
        request_of(GOLD, JUDGE, priority_class=name)
    assert caught.value.field == "priority_class"


def test_an_answer_that_has_begun_continues_where_its_class_is_not_declared() -> None:
    """Routers are restarted one after another with a new configuration, and no stream may break because of that."""
    choices = [Choice(slot=1, output_token_ids=[7])]
    found = request_of(GOLD, priority_class="platinum", choices=choices, tier=TIER_BATCH).priority_class
    assert found is not None
    assert found.name == "batch"


@pytest.mark.parametrize(
    "classes",
    [
        [{"name": "a", "rank": 1}, {"name": "a", "rank": 2}],
        [{"name": "a", "rank": 1, "reserved_share": 0.6}, {"name": "b", "rank": 1, "reserved_share": 0.4}],
        [{"name": "A b", "rank": 1}],
        [{"name": "a", "rank": 16}],
        [{"name": f"c{i}", "rank": 1} for i in range(17)],
    ],
)
def test_classes_are_checked(classes: list[dict[str, object]]) -> None:
    """A floor of everything would leave nothing to others, and a name in two places would mean two things."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"classes": classes}, RouterConfig)
