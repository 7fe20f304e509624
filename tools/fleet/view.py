"""FleetView is what is known of a fleet, merged from its supervisors' answers and the registry. Pure."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from kvloom.v1.shard_service_pb2 import GetInfoResponse
from tools.failures import CommandError
from tools.supervisor.fleet_records import FleetRecords
from tools.supervisor.process_specs import RESTART_ORDER, plan_restart
from tools.supervisor.state import FabricState
from tools.supervisor.supervised_process import ProcessState, ProcessStatus

DRAINING = "draining"
DRAINED = "drained"
ASLEEP = "asleep"
SILENT = "silent"
"""The state of a registered shard that does not answer."""
REGISTERED = "registered"
"""The state of a process about which only the registry says something."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """One `kvloom up`."""

    name: str
    """That of its supervisor."""
    address: str = ""
    """Where its supervisor serves the fleet; "" for the one of this data directory."""
    state: FabricState | None = None
    """None if it cannot be reached."""
    problem: str = ""
    """Why its state is unknown or may be out of date."""

    @property
    def phase(self) -> str:
        """ "not_ready" if the machine runs and requests that reach it are not served."""
        if self.state is None:
            return "unreachable"
        return "not_ready" if self.state.not_ready and self.state.phase == "ready" else self.state.phase


@dataclasses.dataclass(frozen=True)
class FleetView:
    """All that a command found out."""

    machines: Sequence[Machine] = ()
    """That of this data directory first, if it runs."""
    bare: Sequence[ProcessStatus] = ()
    """Processes that no `kvloom up` started, without pid."""
    problems: Sequence[str] = ()
    """Names what could not be asked, besides machines, and what does not fit together."""

    @property
    def local(self) -> Machine | None:
        return next((machine for machine in self.machines if not machine.address), None)

    @property
    def processes(self) -> list[ProcessStatus]:
        """The processes of all machines that can be reached, and the bare ones."""
        supervised = [process for machine in self.machines if machine.state for process in machine.state.processes]
        return [*supervised, *self.bare]

    @property
    def unreachable(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.state is None]


def merged(
    local: FabricState | None,
    others: Mapping[str, FabricState | CommandError],
    records: FleetRecords,
    problems: Iterable[str] = (),
    local_problem: str = "",
) -> FleetView:
    """`others`: the answers of the supervisors in `records`, by name."""
    machines = [Machine(local.name, "", local, local_problem)] if local is not None else []
    for name, record in sorted(records.supervisors.items()):
        if local is not None and record.owner == local.owner:
            continue
        answer = others.get(name)
        if isinstance(answer, FabricState):
            machines.append(Machine(name, record.address, answer))
        else:
            machines.append(Machine(name, record.address, None, "" if answer is None else answer.message))
    return FleetView(machines, _bare(machines, records), list(problems))


def _bare(machines: Iterable[Machine], records: FleetRecords) -> list[ProcessStatus]:
    states = {machine.state.owner: machine.state for machine in machines if machine.state is not None}
    lost = {records.supervisors[machine.name].owner for machine in machines if machine.state is None}
    found: list[ProcessStatus] = []
    kinds = {
        "edge": records.edges,
        "router": records.routers,
        "shard": records.shards,
        "safety": records.safety,
        "control": records.control,
        "orchestrator": records.orchestrators,
    }
    for role, of_role in kinds.items():
        for record in of_role.values():
            state = states.get(record.owner)
            if record.owner not in lost and not (state is not None and _supervises(state, role, record.name)):
                router_address = record.address if role == "router" else ""
                found.append(
                    ProcessStatus(
                        role, record.name, None, REGISTERED, address=record.address, router_address=router_address
                    )
                )
    return found


def _supervises(state: FabricState, role: str, name: str) -> bool:
    """Several simulated shards may be one process of another name, and a router may be inside an edge."""
    own = {process.name for process in state.processes}
    has_many = role == "shard" and any(
        process.role == "shard" and process.name.rpartition("-")[0].endswith("shards") for process in state.processes
    )
    return name in own or has_many


def with_loads(view: FleetView, infos: Mapping[str, GetInfoResponse | None]) -> FleetView:
    """The states of shards as they themselves see them. None: the shard does not answer."""

    def seen(process: ProcessStatus) -> ProcessStatus:
        if (
            process.role != "shard"
            or process.name not in infos
            or process.state not in (ProcessState.READY, REGISTERED)
        ):
            return process
        info = infos[process.name]
        if info is None:
            return dataclasses.replace(process, state=SILENT)
        state = ProcessState.READY.value
        if info.load.draining:
            state = DRAINING if info.load.num_running or info.load.num_waiting else DRAINED
            if info.load.asleep:
                state = ASLEEP
        return dataclasses.replace(
            process,
            state=state,
            engine=process.engine or info.info.description,
            variant=process.variant or info.info.variant,
            shard_role=info.info.role,
            model=process.model or info.info.model,
        )

    machines: list[Machine] = []
    for machine in view.machines:
        state = machine.state
        if state is not None:
            state = msgspec.structs.replace(state, processes=[seen(process) for process in state.processes])
        machines.append(dataclasses.replace(machine, state=state))
    return dataclasses.replace(
        view,
        machines=machines,
        bare=[seen(process) for process in view.bare],
        problems=[*view.problems, *_tokenizer_problems(infos)],
    )


def _tokenizer_problems(infos: Mapping[str, GetInfoResponse | None]) -> Iterator[str]:
    """A line for each model whose shards have different tokenizers, of which a router uses only one."""
    by_model: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, found in sorted(infos.items()):
        if found is not None and found.info.tokenizer_checksum:
            by_model[found.info.model][found.info.tokenizer_checksum].append(name)
    for model, shards in by_model.items():
        if len(shards) > 1:
            groups = " against ".join(", ".join(names) for names in shards.values())
            yield (
                f"shards of the model {model} have different tokenizers ({groups}): routers use only those with the "
                "tokenizer that they found first; give the others another model name"
            )


def plan_fleet_restart(view: FleetView, wanted: Sequence[str]) -> list[tuple[Machine, list[str]]]:
    """Returns which names to restart on which machine, machine by machine. `wanted` has names and roles; if it is
    empty, all but Redis are restarted. Raises CommandError for names that no reachable machine has, and for processes
    that no `kvloom up` started: only who started them can start them again."""
    known = {word for process in view.processes for word in (process.name, process.role)}
    unknown = [word for word in wanted if word not in known]
    if unknown:
        there_are = ", ".join(dict.fromkeys(process.name for process in view.processes))
        lost = "".join(f"; {machine.name} cannot be reached" for machine in view.unreachable)
        raise CommandError(f"there is no process called {', '.join(unknown)}; there are {there_are}{lost}")
    for process in view.bare:
        if process.name in wanted:
            raise CommandError(
                f"{process.name} at {process.address} was not started by `kvloom up`: restart it where it was started, "
                f"for example with systemctl{'; `kvloom drain` empties it first' if process.role == 'shard' else ''}"
            )
    plan: list[tuple[Machine, list[str]]] = []
    for machine in view.machines:
        if machine.state is None:
            continue
        processes = machine.state.processes
        here = [word for word in wanted if any(word in (process.name, process.role) for process in processes)]
        if here or not wanted:
            plan.append((machine, plan_restart(processes, here)))
    return [(machine, names) for machine, names in plan if names]


def skipped_by_restart(view: FleetView, wanted: Sequence[str]) -> list[ProcessStatus]:
    """Returns what a restart of a role, or of everything, leaves alone because no `kvloom up` started it."""
    return sorted(
        (process for process in view.bare if not wanted or process.role in wanted),
        key=lambda process: RESTART_ORDER.index(process.role),
    )
