"""`kvloom logs`: shows the logs of the processes, of all machines, merged by time."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import re
import sys
import time
from collections.abc import Sequence
from typing import Final

import click

from tools.failures import EXIT_INCOMPLETE, CommandError
from tools.fleet.logs import FleetLogs, local_logs, remote_logs
from tools.fleet.members import FleetAccess
from tools.options import FabricFlags, fabric_options, local_option, option
from tools.supervisor.logs.entries import LEVELS, LogEntry
from tools.supervisor.logs.files import LogQuery, log_paths

DEFAULT_LINES: Final = 50
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@click.command()
@click.argument("name", required=False)
@option("--process", scope="logs", metavar="NAME", multiple=True, help="Only this process. May be repeated.")
@option("--request-id", scope="logs", metavar="ID", help="Only lines of this request: its id, or its x-request-id.")
@option(
    "--level", scope="logs", type=click.Choice(LEVELS), help="Only lines of this level and above.", show_default=False
)
@option("--since", scope="logs", metavar="TIME", help="Only later lines: a duration (30s, 10m, 2h, 1d) or an ISO time.")
@option("--follow", scope="logs", is_flag=True, help="Continue with new lines until Ctrl-C.")
@option(
    "--lines",
    scope="logs",
    type=click.IntRange(min=0),
    help=f"The number of last lines to show.  [default: {DEFAULT_LINES}; all with --request-id or --since]",
)
@local_option
@fabric_options
def logs(
    name: str | None,
    process: Sequence[str],
    request_id: str | None,
    level: str | None,
    since: str | None,
    follow: bool,
    lines: int | None,
    local: bool,
    fabric: FabricFlags,
) -> None:
    """Show the logs of all processes in the order of time, or only that of the process NAME (edge, router, shard-0,
    safety, redis, or kvloom for the supervisor). In a fleet these are the processes of all machines."""
    is_limited = lines is None and request_id is None and since is None
    query = LogQuery(
        processes=frozenset({*process, *([name] if name is not None else [])}),
        request_ids=(request_id,) if request_id is not None else (),
        level=level or "",
        since=parse_since(since, time.time()) if since is not None else 0.0,
        max_lines=DEFAULT_LINES if is_limited else lines,
    )
    with contextlib.suppress(KeyboardInterrupt):
        complete = asyncio.run(_show(FleetAccess.open(fabric, local_only=local), query, follow=follow))
        if not complete:
            raise SystemExit(EXIT_INCOMPLETE)


async def _show(fleet: FleetAccess, query: LogQuery, *, follow: bool) -> bool:
    """Returns whether all machines could be asked."""
    problems: list[str] = []

    def on_problem(text: str) -> None:
        if text not in problems:
            print(f"warning: {text}", file=sys.stderr)
        problems.append(text)

    names = set(log_paths(fleet.folder.log_dir, fleet.config.fabric.name_prefix))
    sources = [functools.partial(local_logs, fleet)] if names else []
    unsupervised: list[str] = []
    with contextlib.suppress(CommandError):  # nothing runs: the files are still there
        view = await fleet.view()
        unsupervised = [process.name for process in view.bare]
        for problem in (*view.problems, *(machine.problem for machine in view.unreachable)):
            on_problem(problem)
        for machine in view.machines:
            if machine.address and machine.state is not None:
                sources.append(remote_logs(fleet, machine))
                names |= {process.name for process in machine.state.processes} | {machine.name}
    if not names:
        raise CommandError(f"there are no logs in {fleet.folder.log_dir}")
    _check_names(query.processes, names, unsupervised)
    width = max(map(len, names)) if len(query.processes or names) > 1 else 0
    logs = FleetLogs(sources, on_problem)
    show = functools.partial(_print, width=width)
    if follow:
        await logs.follow(query, show)
    else:
        show(await logs.last(query))
    return not problems


def _check_names(wanted: frozenset[str], names: set[str], unsupervised: Sequence[str]) -> None:
    for name in sorted(wanted - names):
        if name in unsupervised:
            raise CommandError(
                f"{name} was not started by `kvloom up`: its log is where it was started, for example in `journalctl`"
            )
        raise CommandError(f"there is no log of {name}; there are {', '.join(sorted(names))}")


def parse_since(given: str, now: float) -> float:
    """Returns Unix seconds. Raises CommandError."""
    match = _DURATION.fullmatch(given)
    if match is not None:
        return now - float(match[1]) * _UNIT_SECONDS[match[2]]
    try:
        return datetime.datetime.fromisoformat(given).astimezone().timestamp()
    except (ValueError, OverflowError) as error:
        raise CommandError(f"--since {given} is neither a duration such as 10m nor an ISO time") from error


def _print(entries: Sequence[LogEntry], width: int) -> None:
    for entry in entries:
        prefix = f"{entry.process:{width}} | " if width else ""
        print("\n".join(f"{prefix}{line}" for line in entry.lines), flush=True)
