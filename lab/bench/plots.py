"""Plots of benches, beside the distributions of `tools/simulate/plot.py`. Requires matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tools.simulate.plot import figure_class, save

_NUM_BINS: Final = 40
"""A timeline has so many bins."""


class RunTimeline(msgspec.Struct, frozen=True):
    """A run over time, in seconds from its beginning."""

    requests: Sequence[tuple[float, bool]]
    """(when it was sent, whether it was good) of each request."""
    steps: Sequence[tuple[float, int]]
    """(time, step) of each change of the brownout step; before the first it is 0."""


def draw_hit_rates(path: Path, rates: Mapping[str, Sequence[float]], title: str) -> None:
    """Draw the share of cached prompt tokens in each turn, a line for each case. Raises CommandError."""
    figure = figure_class()(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(title)
    for (case, values), marker in zip(rates.items(), itertools.cycle("osx"), strict=False):
        axes.plot(range(1, len(values) + 1), values, marker=marker, label=case)
    axes.set_xlabel("turn of the conversations")
    axes.set_ylabel("share of prompt tokens cached")
    axes.set_ylim(0, 1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best")
    save(figure, path)


def draw_goodput(path: Path, timelines: Mapping[str, RunTimeline], overload: tuple[float, float], title: str) -> None:
    """Draw the share of good requests over time, a line for each run, and below it the brownout step of each.
    `overload` is when it begins and ends. Raises CommandError."""
    figure = figure_class()(figsize=(11, 6), layout="constrained")
    figure.suptitle(title)
    shares, steps = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    end = max(at for timeline in timelines.values() for at, _ in timeline.requests)
    for run, timeline in timelines.items():
        points = shares_over_time(timeline.requests, end / _NUM_BINS)
        (line,) = shares.plot([at for at, _ in points], [share for _, share in points], label=run)
        if timeline.steps:
            changes = [(0.0, 0), *timeline.steps, (end, timeline.steps[-1][1])]
            steps.step([at for at, _ in changes], [step for _, step in changes], where="post", color=line.get_color())
    for axes in (shares, steps):
        axes.axvspan(*overload, color="grey", alpha=0.15)
        axes.grid(visible=True, alpha=0.3)
    shares.set_ylabel("share of good requests")
    shares.set_ylim(-0.02, 1.02)
    shares.legend(loc="best")
    steps.set_ylabel("step")
    steps.yaxis.get_major_locator().set_params(integer=True)
    steps.set_xlabel("seconds; the overload is grey")
    save(figure, path)


def shares_over_time(requests: Sequence[tuple[float, bool]], bin_seconds: float) -> list[tuple[float, float]]:
    """(middle, share of good requests) of each time in which there were any."""
    bins: dict[int, list[bool]] = {}
    for at, is_good in requests:
        bins.setdefault(int(at / bin_seconds), []).append(is_good)
    return [((number + 0.5) * bin_seconds, sum(good) / len(good)) for number, good in sorted(bins.items())]
