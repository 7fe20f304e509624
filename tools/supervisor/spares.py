"""A spare for a shard that is restarted and that no other one stands in for: it serves the model meanwhile.

It is the same process under another name, so that its successor may have the old one. It needs the memory of one more
shard; where that is not there, or the engine computes on a GPU whose memory the shard has, requests are refused until
the shard is back, and the command says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import psutil

from kvloom_common.config import KvloomConfig
from kvloom_common.models.configured import config_of_model
from shard_server.engines.engine_kinds import engine_kind
from tools.supervisor.child import ChildFailedError, ChildSpec
from tools.supervisor.supervised_process import ProcessState, ProcessStatus
from tools.supervisor.supervisor import Supervisor

SUFFIX: Final = "-spare"
_MARGIN: Final = 1.2
"""How much more memory than the running shard has must be available."""


def has_stand_in(status: ProcessStatus, statuses: Sequence[ProcessStatus]) -> bool:
    """True when another running shard of this machine takes the requests of a shard's model."""
    return any(
        other.role == "shard"
        and other.name != status.name
        and other.model == status.model
        and other.state == ProcessState.READY
        for other in statuses
    )


def spare_of(spec: ChildSpec) -> ChildSpec | None:
    """None for a process that has no name of its own to give up, such as one of several simulated shards."""
    if "shard_server" not in spec.argv or "--name" not in spec.argv:
        return None
    at = spec.argv.index("--name") + 1
    name = f"{spec.name}{SUFFIX}"
    return dataclasses.replace(spec, name=name, argv=(*spec.argv[:at], name, *spec.argv[at + 1 :]))


def no_room(config: KvloomConfig, status: ProcessStatus) -> str:
    """Why no spare can run beside the shard; "" if one can."""
    settings = config_of_model(config, status.model).shard
    if not engine_kind(settings.engine).is_on_cpu(settings):
        return "the engine's device has room for one"
    try:
        needed = _MARGIN * psutil.Process(status.pid).memory_info().rss
    except psutil.Error:
        return "the shard does not run"
    return "" if psutil.virtual_memory().available > needed else "there is too little memory for two"


@contextlib.asynccontextmanager
async def standing_in(
    supervisor: Supervisor, spec: ChildSpec | None, reason_against: str, name: str, report: Callable[[str], None]
) -> AsyncIterator[bool]:
    """Run the spare as long as the context lasts. Yields whether it runs; why not is reported."""
    if spec is None or reason_against:
        reason = reason_against or "it has several shards"
        report(f"warning: {name} is the only shard of its model, and has no spare ({reason}): requests are refused")
        yield False
        return
    report(f"{name} is the only shard of its model: {spec.name} serves meanwhile")
    try:
        await supervisor.add([spec])
    except ChildFailedError as error:
        report(f"warning: {spec.name} did not start, requests are refused meanwhile: {error}")
        yield False
        return
    try:
        yield True
    finally:
        await supervisor.remove([spec.name])
