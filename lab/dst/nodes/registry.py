"""The registry: shards announce themselves there, and routers read it. What a shard may write, how a value is read and
which links follow from it is the real code; only Redis is simulated."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvloom_common.discovery.records import RecordError, ShardRecord, may_replace, read_record
from kvloom_common.discovery.registry import HEARTBEAT_SECONDS, POLL_SECONDS, TTL_SECONDS
from kvloom_common.trust.seal import PLAIN
from lab.dst.environment import Environment
from lab.dst.views import RegistryReader, ShardView

OWNER: Final = "supervisor"


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    content: bytes
    expires_at: float
    is_true: bool
    """True when the shard that it names wrote it."""


class SimRegistry:
    """Its random numbers are its own: a seed without it has the history that it had before."""

    def __init__(self, env: Environment, shards: Sequence[ShardView]) -> None:
        self._env = env
        self.rng = random.Random(f"{env.scenario.seed} registry")
        self._shards = {shard.shard_id: shard for shard in shards}
        self.values: dict[str, Value] = {}
        self.readers: list[RegistryReader] = []
        """The routers that watch it."""
        self._is_reachable = True
        self.reachable_since = env.timeline.now
        """While it is."""
        self._announced: dict[str, str] = {}
        """The incarnation that each shard announced last."""

    def start(self) -> None:
        for shard in self._shards.values():
            self._heartbeat(shard)

    @property
    def is_reachable(self) -> bool:
        return self._is_reachable

    @is_reachable.setter
    def is_reachable(self, value: bool) -> None:
        if value and not self._is_reachable:
            self.reachable_since = self._env.timeline.now
        self._is_reachable = value

    # -- shards -------------------------------------------------------------------------------------------------------

    def add(self, shard: ShardView) -> None:
        self._shards[shard.shard_id] = shard
        self._heartbeat(shard)

    def withdraw(self, shard: ShardView) -> None:
        """The process ends: what Announcer.withdraw does. While Redis cannot be reached, the record stays."""
        value = self._value(shard.shard_id)
        holder = None if value is None else _read(shard.shard_id, value.content)
        is_another = holder is not None and holder.incarnation_id != self.record_of(shard).incarnation_id
        if self.is_reachable and not is_another:
            self.remove(shard.shard_id)
        del self._shards[shard.shard_id]

    def record_of(self, shard: ShardView, incarnation: int | None = None) -> ShardRecord:
        number = shard.incarnation if incarnation is None else incarnation
        return ShardRecord(shard.shard_id, shard.shard_id, shard.shape.model, f"{shard.shard_id}-{number}", OWNER)

    def announce(self, shard: ShardView) -> None:
        """Announces a shard as Registry.announce does."""
        if not (self.is_reachable and shard.is_up and not shard.is_hung):
            return
        record, before = self.record_of(shard), self._value(shard.shard_id)
        content = msgspec.json.encode(record)
        if before is not None and before.content != content and (holder := _read(shard.shard_id, before.content)):
            was_announced = self._announced.get(shard.shard_id) == record.incarnation_id
            if not may_replace(holder, record, was_announced=was_announced):
                return
        self._announced[shard.shard_id] = record.incarnation_id
        self.put(shard.shard_id, content, TTL_SECONDS, is_true=True)

    def _heartbeat(self, shard: ShardView) -> None:
        if self._shards.get(shard.shard_id) is shard:
            self.announce(shard)
            self._env.timeline.after(HEARTBEAT_SECONDS * (0.5 + self.rng.random()), self._heartbeat, shard)

    # -- values -------------------------------------------------------------------------------------------------------

    def put(self, key: str, content: bytes, seconds: float, *, is_true: bool = False) -> None:
        before = self._value(key)
        self.values[key] = Value(content, self._env.timeline.now + seconds, is_true)
        if before is None or before.content != content:
            self._publish()

    def remove(self, key: str) -> None:
        if self.values.pop(key, None) is not None:
            self._publish()

    def _publish(self) -> None:
        for reader in self.readers:
            seconds = self._env.scenario.latency_seconds * self.rng.random()
            self._env.timeline.after(seconds, reader.post, reader.read_registry)

    def _value(self, key: str) -> Value | None:
        value = self.values.get(key)
        return None if value is None or value.expires_at <= self._env.timeline.now else value

    # -- routers ------------------------------------------------------------------------------------------------------

    def watch(self, reader: RegistryReader) -> None:
        self.readers = [one for one in self.readers if one.is_alive] + [reader]
        self._poll(reader)

    def _poll(self, reader: RegistryReader) -> None:
        if reader.is_alive:
            reader.post(reader.read_registry)
            self._env.timeline.after(POLL_SECONDS, self._poll, reader)

    def list_shards(self) -> dict[str, ShardRecord] | None:
        """Returns what Registry.list_records does; None while it cannot be reached."""
        if not self.is_reachable:
            return None
        found = {key: _read(key, value.content) for key in sorted(self.values) if (value := self._value(key))}
        return {key: record for key, record in found.items() if record is not None}

    def is_announced(self, shard: ShardView) -> bool:
        """True when the record of the shard's present incarnation can be read."""
        value = self._value(shard.shard_id)
        return self.is_reachable and value is not None and value.is_true and value.content == self._content_of(shard)

    def _content_of(self, shard: ShardView) -> bytes:
        return msgspec.json.encode(self.record_of(shard))

    def process_at(self, address: str) -> Any:
        """The shard that listens at an address, or did when it still ran; None: nothing ever listened there."""
        return self._shards.get(address)


def _read(key: str, content: bytes) -> ShardRecord | None:
    try:
        return read_record(PLAIN, f"kvloom:shard:{key}", key, content, ShardRecord)
    except RecordError:
        return None
