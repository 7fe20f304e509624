"""`kvloom top` on one screen."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvloom.v1.overview_pb2 import FleetSample, GetOverviewResponse, RequestOverview, ShardOverview
from kvloom.v1.router_service_pb2 import RequestOutcome
from kvloom_common.overview.merge import merged
from tools.cli.top import shown, sparkline, state_of


def test_a_screen_has_shards_and_the_oldest_requests() -> None:
    """Brackets in ids of clients are text, not markup."""
    response = GetOverviewResponse(
        router_id="r0",
        num_live_requests=1,
        shards=[ShardOverview(shard_id="shard-0", health="healthy", num_blocks=100, num_available_blocks=40)],
        running=[RequestOverview(request_id="[red]x", state="queued", outcome=RequestOutcome(num_prompt_tokens=7))],
        samples=[FleetSample(at_seconds=1, output_tokens_per_second=1500)],
    )
    output = io.StringIO()
    Console(file=output, width=120, highlight=False).print(shown(merged([response])))
    text = output.getvalue()
    assert "1 shards, 1 routers, 1 requests, 0 queued" in text
    assert "1,500" in text
    assert "60" in text
    assert "[red]x" in text
    narrow = io.StringIO()
    running = RequestOverview(request_id="x" * 60, state="decoding", tenant="y" * 60)
    running.outcome.num_output_tokens = 12_345
    Console(file=narrow, width=90, highlight=False).print(shown(merged([GetOverviewResponse(running=[running])])))
    assert "12345" in narrow.getvalue(), "numbers are whole in a narrow terminal"
    assert "decoding" in narrow.getvalue()


@pytest.mark.parametrize(("values", "bars"), [([], ""), ([0, 0], "▁▁"), ([1, 8], "▂█"), ([5.0] * 3, "███")])
def test_the_tallest_bar_is_the_largest_value(values: list[float], bars: str) -> None:
    """Charts without a scale show the course, and the number beside them the value."""
    assert sparkline(values) == bars


def test_states_are_words() -> None:
    """The page has the same words."""
    assert state_of(ShardOverview(health="healthy", draining=True, num_running=1)) == "draining"
    assert state_of(ShardOverview(health="healthy", draining=True)) == "drained"
    assert state_of(ShardOverview(health="suspected")) == "suspected"
