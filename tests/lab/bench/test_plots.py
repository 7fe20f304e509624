"""What plots of benches show."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.bench.plots import RunTimeline, draw_goodput, draw_hit_rates, shares_over_time


def test_a_time_without_requests_is_no_bad_time() -> None:
    """A gap in the traffic must not look like an outage."""
    requests = [(0.5, True), (1.5, False), (0.9, False), (5.0, True)]
    assert shares_over_time(requests, 1.0) == [(0.5, 0.5), (1.5, 0.0), (5.5, 1.0)]


def test_plots_of_cache_hits_and_of_goodput_are_drawn(tmp_path: Path) -> None:
    """Files that other programs open, also of a run that never left step 0."""
    pytest.importorskip("matplotlib")
    draw_hit_rates(tmp_path / "hits.svg", {"alone": [0.0, 0.5], "flood": [0.0, 0.0]}, "hits")
    timelines = {"ladder": RunTimeline([(0.0, True), (9.0, False)], [(3.0, 1)]), "none": RunTimeline([(1.0, True)], [])}
    draw_goodput(tmp_path / "goodput.svg", timelines, (2.0, 6.0), "goodput")
    for name in ("hits", "goodput"):
        assert (tmp_path / f"{name}.svg").read_bytes().startswith(b"<?xml")
