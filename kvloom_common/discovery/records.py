"""The records of processes in the registry, and which of two processes of one name may have it."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvloom_common.trust.seal import Sealer, SealError


class ShardRecord(msgspec.Struct, frozen=True):
    """A shard's announcement."""

    shard_id: str
    address: str
    """gRPC target."""
    model: str
    incarnation_id: str
    """Drawn when the process starts. A process with another one at this address is a different process."""
    owner: str = ""
    """Who gave the shard its id: a supervisor's data directory, or a machine. Only a process of the same owner takes
    over an id before its announcement has expired. "": the shard, of an earlier version, does not say."""

    @property
    def key(self) -> str:
        return self.shard_id

    @property
    def name(self) -> str:
        return self.shard_id

    @property
    def key_owner(self) -> str:
        """The owner whose processes may take over the key."""
        return self.owner


class RouterRecord(msgspec.Struct, frozen=True):
    """A router's announcement."""

    address: str
    """gRPC target for the processes of the fabric. It also identifies the router: two processes never share one."""
    router_id: str
    """A name for people."""
    incarnation_id: str = ""
    """Drawn when the process starts, as for a shard. "": the router, of an earlier version, does not announce one."""
    client_address: str = ""
    """gRPC target for clients; "": the same as for the processes of the fabric."""
    owner: str = ""
    """Who gave the process its name: a supervisor's data directory, or a machine. "": it does not say."""

    @property
    def key(self) -> str:
        return self.address

    @property
    def name(self) -> str:
        return self.router_id

    @property
    def key_owner(self) -> str:
        """Any process may take over an address: it could not listen there if the former one still did."""
        return ""


class MetricsTarget(msgspec.Struct, frozen=True):
    """A process that serves /metrics."""

    address: str
    """host:port for scrapers on any machine. It also identifies the target: a successor may have the same."""
    role: str
    """edge, router, shard, safety, control or orchestrator."""
    name: str
    """The name of the process."""
    model: str
    scheme: str = "http"
    """https if scrapers need TLS."""
    incarnation_id: str = ""
    """It is empty for a target, because a successor's record is the same."""
    owner: str = ""
    """Who started the process: a supervisor's data directory, or a machine. "": it does not say."""

    @property
    def key(self) -> str:
        return self.address

    @property
    def key_owner(self) -> str:
        """Any process may take over an address, as with a router."""
        return ""


ProcessRole = Literal["edge", "safety", "control", "orchestrator", "supervisor"]


class ProcessRecord(msgspec.Struct, frozen=True):
    """The announcement of an edge, a safety or control service, an orchestrator, or the supervisor of a machine
    (`kvloom up`)."""

    name: str
    address: str
    """Where the process serves the processes of its fabric."""
    incarnation_id: str
    """Drawn when the process starts, as for a shard."""
    owner: str = ""
    """Who gave the process its name: a supervisor's data directory, or a machine. "": it does not say."""
    url: str = ""
    """Where an edge serves clients."""

    @property
    def key(self) -> str:
        return self.name

    @property
    def key_owner(self) -> str:
        return self.owner


ModelName = Annotated[str, Meta(min_length=1, max_length=128)]


class RolloutRecord(msgspec.Struct, frozen=True):
    """How the requests for a model are shared between the version that serves it and a new one. It is announced as long
    as the supervisor that rolls the new version out watches it."""

    name: ModelName
    """By which clients request the model."""
    names: Annotated[tuple[ModelName, ...], Meta(min_length=1, max_length=64)]
    """All names that stand for the old version now, and for the new one when the old one has gone."""
    old: ModelName
    new: ModelName
    share: Annotated[float, Meta(ge=0, le=1)]
    """The new version's share of all sessions."""
    address: str
    """The supervisor's name."""
    incarnation_id: str
    """Drawn for each rollout."""
    owner: str = ""
    """Who runs the rollout: a supervisor's data directory, or a machine."""
    scored_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """The share of the old version's answers that the new one scores (docs/how-to/shadow-traffic.md)."""

    @property
    def key(self) -> str:
        return self.name

    @property
    def key_owner(self) -> str:
        return self.owner


AnyRecord = ShardRecord | RouterRecord | ProcessRecord | MetricsTarget | RolloutRecord
Record = TypeVar("Record", ShardRecord, RouterRecord, ProcessRecord, MetricsTarget, RolloutRecord)


class NameTakenError(Exception):
    """Another process has the same name, and is alive."""

    def __init__(self, name: str, holder: AnyRecord, *, is_successor: bool = False) -> None:
        super().__init__(
            f"{name} is the name of another process of this fleet, at {holder.address}: names must be unique, for "
            "example by `kvloom up --name-prefix`, or by --name for a process that is started by itself"
        )
        self.holder = holder
        self.is_successor = is_successor
        """True when the other process was started to replace this one."""


def may_replace(holder: AnyRecord, own: AnyRecord, *, was_announced: bool) -> bool:
    """True when a process may announce itself in place of `holder`, which has not expired. `was_announced`: `own` has
    been, so that `holder` came later."""
    if holder.incarnation_id == own.incarnation_id:
        return True
    return have_one_owner(holder, own) and not was_announced


def have_one_owner(one: AnyRecord, other: AnyRecord) -> bool:
    """True when two processes of one key belong to the same supervisor or machine, as far as they say."""
    return not one.key_owner or not other.key_owner or one.key_owner == other.key_owner


class RecordError(Exception):
    """A value in the registry is no record that can be used; the message says why."""


def read_record(sealer: Sealer, name: str, key: str, value: bytes, record_type: type[Record]) -> Record:
    """The record of `key`, stored under `name`. Raises RecordError."""
    try:
        record = msgspec.json.decode(sealer.verified(name, value), type=record_type)
    except (SealError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(str(error)) from error
    if record.key != key:  # it would take the place of the process that it names
        raise RecordError(f"it is a record of {record.key[:100]!r}")
    return record
