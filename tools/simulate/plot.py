"""Plots of simulations: the distribution of TTFT, and the load of each shard over time. Requires matplotlib."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kvloom_common.process.extras import MissingPackageError, naming_extras
from tools.failures import CommandError
from tools.simulate.runs import Curves
from tools.simulate.workload import ShardSample

SUFFIXES: Final = (".svg", ".png")
_MAX_STEPS: Final = 250
"""A distribution is drawn with at most so many steps: a figure shows no more apart."""

_PANELS: Final[tuple[tuple[str, Callable[[ShardSample], float]], ...]] = (
    ("in flight", lambda sample: sample.num_running + sample.num_waiting),
    ("queued prefill, tokens", lambda sample: sample.num_queued_prefill_tokens),
    ("KV blocks used", lambda sample: sample.num_used_blocks),
)


def check_plot_file(path: Path) -> None:
    """Check before hours of simulation that the plot can be written. Raises CommandError."""
    if path.suffix.lower() not in SUFFIXES:
        raise CommandError(f"--plot {path}: the name must end in {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise CommandError(f"--plot {path}: no such directory")
    figure_class()


def draw(path: Path, curves: Mapping[str, Curves], title: str) -> None:
    """Draw the TTFT CDFs of all policies on top, and below them a row of timelines for each policy that has samples.
    Raises CommandError."""
    with_timelines = [policy for policy in curves if curves[policy].samples]
    figure = figure_class()(figsize=(15, 5 + 2.6 * len(with_timelines)), layout="constrained")
    grid = figure.add_gridspec(1 + len(with_timelines), len(_PANELS), height_ratios=[2] + [1] * len(with_timelines))
    figure.suptitle(title)
    _draw_distributions(figure.add_subplot(grid[0, :]), curves)
    for row, policy in enumerate(with_timelines, 1):
        for column, (name, value_of) in enumerate(_PANELS):
            axes = figure.add_subplot(grid[row, column])
            _draw_timelines(axes, curves[policy].samples, value_of)
            axes.set_title(f"{policy}: {name}, a line for each shard", fontsize="small")
            if row == len(with_timelines):
                axes.set_xlabel("virtual seconds")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Equal data give equal bytes: an .svg gets no date, and its identifiers do not change from run to run. Its letters
    are text, which is smaller than their outlines and can be searched."""
    from matplotlib import rc_context

    is_svg = path.suffix.lower() == ".svg"
    try:
        with rc_context({"svg.hashsalt": "kvloom", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=110, metadata={"Date": None} if is_svg else None)
    except OSError as error:
        raise CommandError(f"--plot {path}: {error.strerror or error}") from error


def _draw_distributions(axes: Any, curves: Mapping[str, Curves]) -> None:
    for policy, curve in curves.items():
        count = len(curve.ttfts)
        if count:
            places = shown_places(count)
            axes.step([curve.ttfts[p] for p in places], [(p + 1) / count for p in places], where="post", label=policy)
    axes.set_xscale("log")
    axes.set_xlabel("TTFT, seconds")
    axes.set_ylabel("share of requests")
    axes.set_ylim(0, 1)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best")


def shown_places(count: int) -> list[int]:
    """Returns which of `count` ordered values are drawn: at most 250 at equal distances, and the last one always."""
    num_steps = min(count, _MAX_STEPS)
    return [(step * count - 1) // num_steps for step in range(1, num_steps + 1)]


def _draw_timelines(axes: Any, samples: list[ShardSample], value_of: Callable[[ShardSample], float]) -> None:
    lines: defaultdict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for sample in samples:
        times, values = lines[sample.shard_index]
        times.append(sample.at)
        values.append(value_of(sample))
    for times, values in lines.values():
        axes.plot(times, values, linewidth=0.6, alpha=0.8)
    axes.grid(visible=True, alpha=0.3)
    axes.set_ylim(bottom=0)


def figure_class() -> Any:
    try:
        with naming_extras():
            from matplotlib.figure import Figure
    except MissingPackageError as error:
        raise CommandError(f"--plot: {error}") from error
    return Figure
