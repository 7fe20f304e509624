"""How an HTTP request names its class."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from multidict import CIMultiDict

from edge_http.endpoints.priority_class import fairness_id_of, priority_class_of
from edge_http.wire.headers import OBJECTIVE, PRIORITY_CLASS
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import TIER_BATCH, TIER_INTERACTIVE
from kvloom_common.tenancy.principal import Principal
from kvloom_common.tenancy.scopes import ClassRights

DECLARED = frozenset({"interactive", "batch", "gold", "flex"})


def asking(**headers: str) -> Any:
    return SimpleNamespace(headers=CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()}))


@pytest.mark.parametrize(
    ("headers", "tier", "service_tier", "expected"),
    [
        ({"X_Kvloom_Priority_Class": "gold", "x_llm_d_inference_objective": "batch"}, TIER_BATCH, "flex", "gold"),
        ({"x_llm_d_inference_objective": "gold"}, TIER_INTERACTIVE, "", "gold"),
        ({}, TIER_BATCH, "flex", "flex"),
        ({}, TIER_INTERACTIVE, "priority", "interactive"),
        ({}, TIER_BATCH, "", "batch"),
        ({}, TIER_INTERACTIVE, "default", "interactive"),
    ],
)
def test_headers_come_before_the_service_tier(
    headers: dict[str, str], tier: Any, service_tier: str, expected: str
) -> None:
    """The same class is named by clients of OpenAI, of llm-d and of kvloom."""
    assert priority_class_of(asking(**headers), tier, service_tier, DECLARED) == expected


@pytest.mark.parametrize("header", ["x-kvloom-priority-class", "x-llm-d-inference-objective"])
def test_an_unknown_class_is_named(header: str) -> None:
    """A misspelt class must not be served as another one."""
    with pytest.raises(KvloomError) as caught:
        priority_class_of(asking(**{header: "platinum"}), TIER_INTERACTIVE, "", frozenset())
    assert (caught.value.reason, caught.value.field) == (ErrorReason.ERROR_REASON_INVALID_ARGUMENT, header)


def test_a_fairness_id_is_bounded() -> None:
    """It is kept while requests wait."""
    assert fairness_id_of(asking(x_llm_d_inference_fairness_id="a")) == "a"
    with pytest.raises(KvloomError, match="at most 256"):
        fairness_id_of(asking(x_llm_d_inference_fairness_id="a" * 257))


@pytest.mark.parametrize(
    ("headers", "tier", "rights", "expected"),
    [
        ({}, TIER_INTERACTIVE, [ClassRights(("gold",), "gold")], "gold"),
        ({}, TIER_INTERACTIVE, [ClassRights(default="flex"), ClassRights(default="gold")], "flex"),
        ({}, TIER_BATCH, [ClassRights(default="gold")], "batch"),
        ({PRIORITY_CLASS: "gold"}, TIER_INTERACTIVE, [ClassRights(("gold",)), ClassRights(("flex", "gold"))], "gold"),
        ({PRIORITY_CLASS: "gold"}, TIER_INTERACTIVE, [ClassRights(("gold",)), ClassRights(("flex",))], None),
        ({OBJECTIVE: "gold"}, TIER_INTERACTIVE, [ClassRights(("batch",))], None),
        ({}, TIER_INTERACTIVE, [ClassRights(("batch",))], None),
        ({}, TIER_BATCH, [ClassRights(("gold",), "gold")], None),
        ({}, TIER_INTERACTIVE, [ClassRights(("gold",), "gold"), ClassRights(("flex",))], None),
    ],
)
def test_a_key_names_only_what_it_may_and_has_its_default_otherwise(
    headers: dict[str, str], tier: Any, rights: list[ClassRights], expected: str | None
) -> None:
    """Leaving the header out must be no way around the restriction."""
    principal = Principal("acme/search", "k", classes=tuple(rights))
    if expected is not None:
        assert priority_class_of(asking(**headers), tier, "", DECLARED, principal) == expected
        return
    with pytest.raises(KvloomError) as caught:
        priority_class_of(asking(**headers), tier, "", DECLARED, principal)
    assert caught.value.reason == ErrorReason.ERROR_REASON_PERMISSION_DENIED
    assert caught.value.field == next(iter(headers), "service_tier" if tier == TIER_BATCH else PRIORITY_CLASS)
