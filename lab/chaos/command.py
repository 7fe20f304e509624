"""`kvloom-lab chaos`: checks every answer of a live fabric under faults and load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any, Final

import click

from kvloom_common.config import ModelConfig
from lab.chaos.attackers.mix import ATTACK_NAMES
from lab.chaos.checking.report_text import attack_page, chaos_page, soak_page, summary
from lab.chaos.fabric.faults import LONG_HANG_SHARE, FaultKind
from lab.chaos.fabric.surroundings import unavailable
from lab.chaos.region_loss import lose_region
from lab.chaos.run import ChaosPlan, Progress, run_chaos
from lab.flags import DATA_DIR, JSON, choice, count, flag, flags, number, plain, switch
from lab.pages import PAGE, check_page, write_table
from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_MODEL_NAME
from tools.failures import CommandError
from tools.models.resolve import model_cache_dir, resolve_model
from tools.options import option

_QUIET_SECONDS: Final = 10.0
"""The time between progress lines if the output is not a terminal."""
_NUM_USERS: Final = 12
_NUM_SOAK_USERS: Final = 4
"""A steady load that leaves most of a small machine idle. Leaks grow with requests and with time, not with load."""
_NAMES: Final = ", ".join(FaultKind)
_OPTIONAL_PARTS: Final = frozenset({"model", "control", "orchestrator"})
"""Parts that only some fabrics have."""


def _parse_kinds(_context: click.Context, _parameter: click.Parameter, value: str) -> list[FaultKind]:
    if value == "all":
        return _available()
    try:
        kinds = [FaultKind(name.strip()) for name in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{error}; there are {_NAMES}") from error
    for kind in kinds:
        if reason := unavailable(kind):
            raise click.BadParameter(f"{kind} is not available here: {reason}")
    return kinds


def _for_tenants(kinds: list[FaultKind], num_tenants: int, engine: str) -> list[FaultKind]:
    """The faults that there are with so many tenants. Raises UsageError."""
    if num_tenants:
        if engine != "sim":
            raise click.UsageError("--tenants: answers that a budget cuts short are only known with --engine sim")
        # A budget is one of a month: a process whose clock jumps to the next has another one.
        return [kind for kind in kinds if kind is not FaultKind.CLOCK_JUMP]
    return _without(kinds, "control", "--tenants 1 or more")


def _for_models(kinds: list[FaultKind], num_models: int, engine: str) -> list[FaultKind]:
    """The faults that there are with so many models. Raises UsageError."""
    if num_models > 1:
        if engine != "sim":
            raise click.UsageError("--models: several models have answers of their own only with --engine sim")
        return kinds
    return _without(kinds, "model", "--models 2 or more")


def _for_stored(kinds: list[FaultKind], sizes: dict[str, Any]) -> list[FaultKind]:
    """The faults that there are with or without stored responses. Raises UsageError."""
    if not sizes["stored"]:
        return _without(kinds, "orchestrator", "--stored")
    if sizes["engine"] != "sim" or sizes["num_models"] > 1 or sizes["num_tenants"]:
        raise click.UsageError("--stored: what is stored is only known with one model, --engine sim and no tenants")
    return kinds


def _without(kinds: list[FaultKind], part: str, need: str) -> list[FaultKind]:
    """Raises UsageError if faults of that part were named."""
    others = [kind for kind in kinds if kind.part != part]
    if len(others) < len(kinds) and {kind for kind in _available() if kind.part not in _OPTIONAL_PARTS} - {*kinds}:
        raise click.UsageError(f"--faults: {', '.join(sorted({*kinds} - {*others}))} needs {need}")
    return others


def _available() -> list[FaultKind]:
    return [kind for kind in FaultKind if not unavailable(kind)]


def _parse_attacks(_context: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
    names = [] if value == "all" else [name.strip() for name in value.split(",")]
    for name in names:
        if name not in ATTACK_NAMES:
            raise click.BadParameter(f"there is no attack {name!r}; there are {', '.join(ATTACK_NAMES)}")
    return names


def _list_faults(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    for kind in FaultKind:
        reason = unavailable(kind)
        click.echo(f"{kind:<18} {kind.story}{f'  [not available here: {reason}]' if reason else ''}")
    context.exit()


@click.command("chaos")
@flags(
    "chaos",
    number("--minutes", 2.0, "The duration.", least=0.1, most=24 * 60),
    count("--seed", 0, "The seed of the faults and the users.", least=0),
    choice("--engine", ["sim", "torch"], "sim", "The engine of the shards."),
    count("--shards", 3, "The number of shards of each model.", most=64, to="num_shards"),
    count(
        "--models",
        1,
        "The number of models (sim engine). Users ask for one at random, and models are unloaded and put to sleep.",
        most=8,
        to="num_models",
    ),
    count(
        "--tenants",
        0,
        "The number of tenants (sim engine). Users have keys, limits and budgets, which change during the run.",
        least=0,
        most=16,
        to="num_tenants",
    ),
    switch(
        "--stored",
        "Start an orchestrator (sim engine). Users also ask for stored responses, some in the background, and all that "
        "were promised must be found at the end.",
    ),
    count("--edges", 2, "The number of edges.", most=16, to="num_edges"),
    count("--routers", 2, "The number of routers.", most=16, to="num_routers"),
    count(
        "--users",
        None,
        f"The number of concurrent users.  [default: {_NUM_USERS}; for a soak {_NUM_SOAK_USERS}]",
        most=1000,
        to="num_users",
    ),
    flag(
        "--faults",
        str,
        "all",
        f"The kinds of faults, separated by commas: {_NAMES}.",
        to="kinds",
        callback=_parse_kinds,
    ),
    plain(
        click.option(
            "--list-faults",
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=_list_faults,
            help="List the kinds of faults, what each does and whether it is available on this machine, and exit.",
        )
    ),
    number(
        "--attack-seconds",
        None,
        "Instead of faults: attackers use every port for so long. The report compares the users before, during and "
        "after.",
        least=1.0,
        most=24 * 3600,
    ),
    flag(
        "--attacks",
        str,
        "all",
        f"What a hostile neighbour does, separated by commas: {', '.join(ATTACK_NAMES)}.",
        callback=_parse_attacks,
    ),
    number(
        "--long-hangs",
        LONG_HANG_SHARE,
        "The share of hangs of shards, routers and links that outlast the patience of the other processes.",
        most=1.0,
        to="long_hang_share",
    ),
    switch("--soak", "Inject no faults: apply a steady load and record the memory of each process over time."),
    switch(
        "--region-loss",
        "Instead of faults: two cells (docs/operate/regions.md) with streams of two tenants, one of which is resident "
        "in the cell that is lost, by its network and then with its processes. It takes a minute.",
    ),
    flag("--page", PAGE, None, "Write the report between the markers of this page."),
    plain(
        option(
            "--model",
            default=BUILTIN_MODEL_NAME,
            show_default=True,
            help="The name of a model, its directory or a .gguf file.",
        )
    ),
    DATA_DIR,
    JSON,
)
def chaos(
    kinds: list[FaultKind],
    num_users: int | None,
    soak: bool,
    attack_seconds: float | None,
    region_loss: bool,
    page: Path | None,
    model: str,
    data_dir: Path | None,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Kill, hang and cut off the parts of a live fabric of real processes while simulated users check every word and
    every usage record.

    The exit status is 1 if an answer was wrong, lost, doubled or metered twice, or failed without a fault that explains
    it. For a soak it is also 1 if the memory of a process grew or a process was replaced.
    """
    if soak and attack_seconds:
        raise click.UsageError("--soak is without faults: leave --attack-seconds out")
    kinds = _for_models(kinds, sizes["num_models"], sizes["engine"])
    kinds = _for_stored(_for_tenants(kinds, sizes["num_tenants"], sizes["engine"]), sizes)
    table = "soak" if soak else "attack" if attack_seconds else "chaos"
    if page is not None:
        check_page(page, [table])
    show = _ProgressLine()
    cache_dir = model_cache_dir(data_dir)
    found = resolve_model(model, cache_dir, show.say)
    config = ModelConfig(name=found.name, path=str(found.path))
    if region_loss:
        lost = asyncio.run(lose_region(config, sizes["seed"], num_users or _NUM_USERS, show.say))
        print(json.dumps(lost, indent=2))
        sys.exit(1 if lost["problems"] else 0)
    plan = ChaosPlan(
        model=config,
        kinds=[] if soak or attack_seconds else kinds,
        attack_seconds=attack_seconds or 0.0,
        num_users=num_users or (_NUM_SOAK_USERS if soak else _NUM_USERS),
        **sizes,
    )
    of_models = f" of each of {plan.num_models} models" if plan.num_models > 1 else ""
    show.say(
        f"starting {plan.num_edges} edges, {plan.num_routers} routers and {plan.num_shards} {plan.engine} shards"
        f"{of_models}"
    )
    try:
        report = asyncio.run(run_chaos(plan, show.update))
    except asyncio.CancelledError as error:
        raise CommandError("stopped by a signal") from error
    show.end()
    if page is not None:
        write_table(page, table, {"soak": soak_page, "attack": attack_page, "chaos": chaos_page}[table](report))
    print(json.dumps(report, indent=2) if as_json else summary(report))
    if report["problems"]:
        again = shlex.join(("kvloom-lab", *sys.argv[1:]))
        show.say("\n".join(("", *report["problems"], f"logs: {report['logs']}", f"again: {again}")))
        sys.exit(1)


class _ProgressLine:
    """Progress on stderr: one line that is rewritten on a terminal, otherwise a line now and then."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._next_at = 0.0

    def update(self, progress: Progress) -> None:
        text = (
            f"{progress.seconds:6.0f} s  {progress.num_requests:,} requests, {progress.num_faults} faults, "
            f"{progress.num_bad} wrong, lost or doubled  {progress.last_fault}"
        )
        if self._is_terminal:
            sys.stderr.write(f"\r{text[:118]:<118}")
            sys.stderr.flush()
        elif progress.seconds >= self._next_at:
            self._next_at = progress.seconds + _QUIET_SECONDS
            self.say(text)

    def end(self) -> None:
        if self._is_terminal:
            sys.stderr.write("\n")

    def say(self, message: str) -> None:
        with contextlib.suppress(OSError):  # during the fault disk-full, if stderr is a file
            click.echo(message, err=True)
