"""The state of a machine's processes as a message of SupervisorService, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvloom.v1.supervisor_service_pb2 import GetStateResponse, SupervisedProcess
from kvloom.v1.supervisor_service_pb2 import RolloutState as RolloutMessage
from tools.supervisor.rollout.state import RolloutState
from tools.supervisor.state import FabricState
from tools.supervisor.supervised_process import ProcessStatus


def state_to_proto(state: FabricState) -> GetStateResponse:
    return GetStateResponse(
        name=state.name,
        owner=state.owner,
        pid=state.supervisor_pid,
        started=state.supervisor_started,
        phase=state.phase,
        http_url=state.http_url,
        router_address=state.router_address,
        model=state.model,
        processes=[SupervisedProcess(**dataclasses.asdict(process)) for process in state.processes],
        not_ready=state.not_ready,
        brownouts=state.brownouts,
        alarms=state.alarms,
        warnings=state.warnings,
        rollouts=[RolloutMessage(**dataclasses.asdict(rollout)) for rollout in state.rollouts],
    )


def state_from_proto(message: GetStateResponse) -> FabricState:
    return FabricState(
        name=message.name,
        owner=message.owner,
        supervisor_pid=message.pid,
        supervisor_started=message.started,
        phase=message.phase,
        http_url=message.http_url,
        router_address=message.router_address,
        model=message.model,
        processes=[_process_from_proto(process) for process in message.processes],
        not_ready=list(message.not_ready),
        brownouts=list(message.brownouts),
        alarms=list(message.alarms),
        warnings=list(message.warnings),
        rollouts=[RolloutState(**_values(rollout, RolloutState)) for rollout in message.rollouts],
    )


def _process_from_proto(message: SupervisedProcess) -> ProcessStatus:
    values = _values(message, ProcessStatus)
    if not message.HasField("pid"):
        values["pid"] = None
    return ProcessStatus(**values)


def _values(message: Any, of: type[Any]) -> dict[str, Any]:
    """Those of the fields that a dataclass has."""
    return {field.name: getattr(message, field.name) for field in dataclasses.fields(of)}
