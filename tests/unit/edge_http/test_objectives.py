"""What the headers of a request say of its deadline and objectives."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from edge_http.endpoints.objectives import objectives_of
from kvloom.errors import KvloomError
from kvloom.v1.router_service_pb2 import Objectives


def test_every_header_sets_its_objective() -> None:
    """Clients of llm-d name two of them in their own way."""
    headers = CIMultiDict(
        {"x-kvloom-deadline-ms": "9000", "X-Kvloom-SLO-TTFT-ms": "250.5", "x-llm-d-slo-tpot-ms": "40"}
    )
    assert objectives_of(headers, 0.25) == Objectives(deadline_ms=9000, ttft_ms=250.5, tpot_ms=40, elapsed_ms=250)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "", "1_000", "86400001", "9" * 500, "٣"])
@pytest.mark.parametrize("name", ["x-kvloom-deadline-ms", "x-kvloom-slo-ttft-ms", "x-llm-d-slo-tpot-ms"])
def test_other_values_are_errors_that_name_the_header(name: str, value: str) -> None:
    """A value that was silently ignored would leave a client waiting for longer than it wants."""
    with pytest.raises(KvloomError) as caught:
        objectives_of(CIMultiDict({name: value}), 0.0)
    assert caught.value.field == name


def test_two_names_of_an_objective_must_agree() -> None:
    """It is not known which of the two the client means."""
    both = CIMultiDict({"x-kvloom-slo-ttft-ms": "100", "x-llm-d-slo-ttft-ms": "100.0"})
    assert objectives_of(both, 0.0).ttft_ms == 100
    both["x-llm-d-slo-ttft-ms"] = "200"
    with pytest.raises(KvloomError) as caught:
        objectives_of(both, 0.0)
    assert caught.value.field == "x-llm-d-slo-ttft-ms"
