"""`kvloom status`: shows the processes of the fabric, of all its machines, their addresses and their states."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import click
import msgspec
from rich.console import Console

from tools.failures import EXIT_INCOMPLETE, EXIT_NOT_RUNNING, CommandError
from tools.fleet.members import FleetAccess
from tools.fleet.view import FleetView, Machine
from tools.options import FabricFlags, fabric_options, local_option, option
from tools.supervisor.supervised_process import ProcessStatus

_PIPED_WIDTH: Final = 1000
_COLUMNS: Final = ("name", "role", "pid", "state", "restarts", "address", "metrics")
_NUM_SHORT: Final = 5
"""The columns before the addresses."""
_STOPPED: Final[Mapping[str, Any]] = {"phase": "stopped", "http_url": None, "router_address": None, "processes": []}


@click.command()
@option("--json", "as_json", scope="status", is_flag=True, help="Print one JSON object.")
@local_option
@fabric_options
def status(as_json: bool, local: bool, fabric: FabricFlags) -> None:
    """Show the fabric that runs with this data directory, and all machines of its fleet.

    The exit status is 0 if all of it serves, 3 if nothing runs, and 4 if requests are not served, a machine cannot be
    reached, or a process does not follow the table of tenants.
    """
    fleet = FleetAccess.open(fabric, local_only=local)
    try:
        view = asyncio.run(fleet.view(with_shards=True))
    except CommandError as error:
        if as_json and error.exit_code == EXIT_NOT_RUNNING:
            print(msgspec.json.encode(_STOPPED).decode())
        if as_json:
            raise SystemExit(error.exit_code) from error
        raise
    if as_json:
        print(msgspec.json.encode(_as_json(view)).decode())
    else:
        _print_tables(view)
    alarms = [alarm for machine in view.machines if machine.state for alarm in machine.state.alarms]
    if view.problems or alarms or any(machine.phase in ("not_ready", "unreachable") for machine in view.machines):
        raise SystemExit(EXIT_INCOMPLETE)


def _as_json(view: FleetView) -> dict[str, Any]:
    """That of this data directory's fabric, and below it everything else."""
    local = view.local
    others = [machine for machine in view.machines if machine is not local]
    model = ", ".join(_models(view.processes))
    return {
        **(_STOPPED if local is None else _machine_as_json(local, model)),
        "machines": [_machine_as_json(machine, model) | {"address": machine.address} for machine in others],
        "unsupervised": view.bare,
        "problems": view.problems,
    }


def _models(processes: Iterable[ProcessStatus]) -> list[str]:
    return sorted({process.model for process in processes if process.model})


def _machine_as_json(machine: Machine, fleet_model: str) -> dict[str, Any]:
    """A machine without shards serves the models of the fleet."""
    found: dict[str, Any] = {"name": machine.name, "phase": machine.phase, "problem": machine.problem}
    state = machine.state
    if state is None:
        return found | {"http_url": None, "router_address": None, "processes": []}
    return found | {
        "not_ready": state.not_ready,
        "http_url": state.http_url,
        "router_address": state.router_address,
        "model": state.model or fleet_model,
        "supervisor_pid": state.supervisor_pid,
        "processes": state.processes,
        "rollouts": state.rollouts,
        "brownouts": state.brownouts,
        "alarms": state.alarms,
        "warnings": state.warnings,
    }


def _print_tables(view: FleetView) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:  # scripts and logs need whole names
        console.width = _PIPED_WIDTH
    is_fleet = len(view.machines) > 1 or view.local is None
    for machine in view.machines:
        for line in _headline(machine, is_fleet=is_fleet):
            console.print(line, markup=False)
    for problem in view.problems:
        console.print(f"warning: {problem}", markup=False)
    supervised = [process for machine in view.machines if machine.state for process in machine.state.processes]
    print_table(console, supervised, "name")
    if view.bare:
        print_table(console, view.bare, "not started by kvloom up")
    processes = view.processes
    models = _models(processes)
    for process in processes:
        if process.engine:
            model = f"{process.model}, " if len(models) > 1 else ""
            role = f", role {process.shard_role}" if process.shard_role else ""
            console.print(f"{process.name}: {model}{process.engine}{role}", markup=False)
    for model in models:
        variants = sorted({process.variant for process in processes if process.variant and process.model == model})
        if len(variants) > 1:
            console.print(
                f"warning: shards of {model} compute in different ways ({', '.join(variants)}): an answer that fails "
                "over from one to another may continue with other tokens; shard.torch.kernels can hold them to one",
                markup=False,
            )


def _headline(machine: Machine, *, is_fleet: bool) -> list[str]:
    where = f"{machine.name}{f' at {machine.address}' if machine.address else ''}: " if is_fleet else ""
    state = machine.state
    if state is None:
        return [f"{where}UNREACHABLE ({machine.problem})"]
    url = f"{state.http_url} " if state.http_url else ""
    phase = machine.phase.replace("_", " ")
    details = ", ".join(
        filter(
            None,
            (f"router {state.router_address}" * bool(state.router_address), f"model {state.model}" * bool(state.model)),
        )
    )
    lines = [f"{where}{phase}: {url}{f'({details})' * bool(details)}".rstrip()]
    lines += [f"  {reason}" for reason in [*state.not_ready, *state.brownouts]]
    lines += [f"  ALARM: {alarm}" for alarm in state.alarms]
    lines += [f"  warning: {warning}" for warning in state.warnings]
    for rollout in state.rollouts:
        step = f", step {rollout.step} of {rollout.num_steps}" if rollout.step else ""
        lines.append(f"  rollout of {rollout.new} over {rollout.old}: {rollout.phase}, {rollout.share:g}%{step}")
    return lines + [f"  {machine.problem}"] * bool(machine.problem)


def print_table(console: Console, processes: Sequence[ProcessStatus], title: str) -> None:
    """One row a process. Where a row does not fit the console, the addresses stand on a line of their own below it:
    they are what operators copy."""
    rows = [
        (
            one.name,
            one.role,
            "-" if one.pid is None else str(one.pid),
            one.state,
            str(one.restarts),
            one.address,
            one.metrics_address,
        )
        for one in processes
    ]
    heads = (title, *_COLUMNS[1:])
    widths = [max(len(row[number]) for row in (heads, *rows)) for number in range(len(heads))]
    fits = sum(widths) + 2 * (len(widths) - 1) <= console.width
    for row in (heads, *rows):
        shown = row if fits else row[:_NUM_SHORT]
        line = "  ".join(text.ljust(width) for text, width in zip(shown, widths, strict=False)).rstrip()
        console.print(line, markup=False, style="bold" if row is heads else None)
        if not fits and row is not heads:
            named = zip(_COLUMNS[_NUM_SHORT:], row[_NUM_SHORT:], strict=True)
            details = ", ".join(f"{name} {address}" for name, address in named if address)
            if details:
                console.print(f"  {details}", markup=False)
