"""Adapters of the simulated engine: names without weights, each of which gives other text."""

from __future__ import annotations

import hashlib
import time

from shard_server.engines.base import AdapterInfo


def sim_adapter_checksum(name: str, path: str) -> str:
    """The checksum of a simulated adapter, which is the same on all shards."""
    return hashlib.sha256(f"{name}\0{path}".encode()).hexdigest()


class SimAdapterReader:
    """Nothing is read: an adapter's path may be any."""

    def __init__(self, load_seconds: float) -> None:
        self._load_seconds = load_seconds

    def read(self, name: str, path: str) -> AdapterInfo:
        return AdapterInfo(name, path, sim_adapter_checksum(name, path))

    def load(self, adapter: AdapterInfo) -> str:
        """The checksum, which stands for the weights."""
        time.sleep(self._load_seconds)
        return adapter.checksum
