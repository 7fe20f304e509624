"""The file that describes a pool of engines (docs/how-to/gateway.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvloom_common.config import ConfigError
from kvloom_common.config.section import Address, PositiveInt

MAX_ENDPOINTS: Final = 1024


class PoolEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine."""

    address: Address
    """IP address and port, as Envoy reaches it."""
    metrics: str = ""
    """The URL of its Prometheus metrics; "": /metrics at its address."""
    kv_events: str = ""
    """Where it publishes KV events, e.g. tcp://10.0.0.1:5557; "": its cache is inferred from what was sent there."""
    kv_replay: str = ""
    """Where it replays them; "": after a gap its cache counts as empty."""

    @property
    def metrics_url(self) -> str:
        return self.metrics or f"http://{self.address}/metrics"


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Engines that serve one model, and its adapters."""

    endpoints: Annotated[list[PoolEndpoint], Meta(max_length=MAX_ENDPOINTS)] = []
    """Empty only where those of an InferencePool come later."""
    adapters: Sequence[str] = ()
    """The names of LoRA adapters. All other names stand for the model itself."""
    objectives: Mapping[str, int] = msgspec.field(default_factory=dict[str, int])
    """The priority of each InferenceObjective by name. Below 0: refused while all engines are saturated."""
    block_size: PositiveInt = 16
    """Tokens of a KV block, for engines whose metrics do not say it."""
    num_blocks: PositiveInt = 16_384
    """The number of an engine's KV blocks, where its metrics do not say it."""
    max_requests: PositiveInt = 512
    """How many requests of this picker an engine has at a time at most."""
    saturated_waiting: PositiveInt = 5
    """An engine is saturated when so many requests wait there, as it says."""
    saturated_kv_usage: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """It is saturated, too, when sequences hold this share of its KV blocks."""


def pool_of(addresses: Sequence[str]) -> Pool:
    """A pool of engines at these addresses. Raises ConfigError."""
    try:
        return msgspec.convert({"endpoints": [{"address": address} for address in addresses]}, Pool)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error


def read_pool(path: Path, *, has_endpoints: bool = True) -> Pool:
    """`has_endpoints`: whether the file must have them, or must not. Raises ConfigError."""
    try:
        pool = msgspec.toml.decode(path.read_bytes(), type=Pool)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if bool(pool.endpoints) != has_endpoints:
        raise ConfigError(f"{path}: endpoints are {'missing' if has_endpoints else 'those of the InferencePool'}")
    if any(endpoint.kv_events for endpoint in pool.endpoints) and find_spec("zmq") is None:
        raise ConfigError(f'{path}: kv_events need pyzmq, which comes with pip install "kvloom-fabric[gateway]"')
    addresses = [one.address for one in pool.endpoints]
    for address in addresses:
        if addresses.count(address) > 1:
            raise ConfigError(f"{path}: endpoints: {address} is there twice")
    return pool
