"""Decides which shards a router keeps links to, and which process may answer at the other end, without I/O, so that
`kvloom-lab dst` can run it under faults of the registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from kvloom_common.discovery.records import ShardRecord

MAX_SHARDS: Final = 4096


class LinkTarget:
    """The shard that a link is for, as the registry last named it."""

    def __init__(self, record: ShardRecord) -> None:
        self.record = record
        self.registered = True
        """True when the link reconnects once its connection has broken."""
        self.expected_incarnation_id = record.incarnation_id
        """The incarnation that must answer at the shard's address. It is "" while the registry cannot be read, because
        a process with the shard's id may then be its new incarnation."""
        self.accepted_incarnation_id = record.incarnation_id
        """The one that answered last, perhaps while the registry could not be read."""

    def follow(self, record: ShardRecord | None) -> None:
        """The registry has been read. None: it does not name this shard."""
        self.registered = record is not None
        if record is not None and record.incarnation_id == self.accepted_incarnation_id:
            self.record = record
        self.expected_incarnation_id = self.record.incarnation_id

    def accept(self, incarnation_id: str) -> None:
        """This process is connected."""
        self.accepted_incarnation_id = incarnation_id

    def refusal(self, shard_id: str, incarnation_id: str) -> str:
        """Why the process that answers is not the one that was meant; "" if it is."""
        address = self.record.address
        if shard_id != self.record.shard_id:
            return f"{address} is shard {shard_id}, not {self.record.shard_id}"
        if self.expected_incarnation_id not in ("", incarnation_id):
            # Every fabric has a shard-0, and the port of a dead shard may since belong to one of another fabric.
            return f"{address} is another incarnation of {shard_id} than the registered one"
        return ""


class LinkState(Protocol):
    """A link as the decision sees it."""

    @property
    def target(self) -> LinkTarget: ...

    @property
    def connected(self) -> bool: ...

    @property
    def is_over(self) -> bool:
        """True when it has given up, so that it will not reconnect."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class LinkChanges:
    ended: list[str]
    """Shards whose link ends."""
    started: list[ShardRecord]


def follow_registry(records: Mapping[str, ShardRecord], links: Mapping[str, LinkState]) -> LinkChanges:
    """The changes after the registry was read. A connected shard stays although its record is gone: the connection is
    the truth. One that is replaced by another incarnation does not."""
    ended: list[str] = []
    for shard_id, link in links.items():
        record = records.get(shard_id)
        link.target.follow(record)
        is_replaced = record is not None and record.incarnation_id != link.target.record.incarnation_id
        if link.is_over or is_replaced or (record is None and not link.connected):
            ended.append(shard_id)
    num_free = MAX_SHARDS - len(links) + len(ended)
    new = [record for shard_id, record in records.items() if shard_id not in links or shard_id in ended]
    return LinkChanges(ended, new[:num_free])


def lose_registry(targets: Iterable[LinkTarget]) -> None:
    """The registry cannot be read: links stay, and accept any incarnation of their shard."""
    for target in targets:
        target.expected_incarnation_id = ""
