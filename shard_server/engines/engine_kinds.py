"""Lists the engines that kvloom brings, and says of each what others have to know before they import it.

A plugin's engine (docs/how-to/plugins.md) has the defaults of `EngineKind`. Nothing else asks for an engine by
its name.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvloom_common.config import ShardConfig
from kvloom_common.plugins import PluginGroup


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """Describes an engine by what it needs and can share."""

    factory: str = ""
    """The callable that makes the engine from an `EngineSetup`, as "module:name"; it is imported when the engine is
    made. Empty: the entry point of a plugin."""
    reads_weights: bool = True
    """False for an engine that reads a model's tokenizer and configuration only."""
    is_on_cpu: Callable[[ShardConfig], bool] = lambda _: False
    """Returns True when the engine computes in host memory, so that another one fits where the machine has memory."""
    shards_per_process: Callable[[ShardConfig], int] | None = None
    """Returns how many shards share one process. None: each has its own."""
    needs_nvidia_gpu: bool = False
    needs_model_dir: bool = False
    """True for an engine that takes a model only as a directory, not by the name of a registered one."""
    packages: tuple[str, ...] = ()
    """The distributions that compute, whose versions a report names."""
    library_rows: str = ""
    """The callable that compares the installed library with what its adapter uses, as "module:name"."""
    shorten_steps: Callable[[ShardConfig], None] | None = None
    """Makes the steps of an engine short whose pace is configured, so that checks take little time."""


def _is_torch_on_cpu(shard: ShardConfig) -> bool:
    return shard.torch.device == "cpu"


def _shorten_sim_steps(shard: ShardConfig) -> None:
    shard.sim.step_ms = min(shard.sim.step_ms, 2.0)


BUILT_IN: Final[Mapping[str, EngineKind]] = {
    "torch": EngineKind(
        factory="shard_server.engines.built_in:torch_engine", is_on_cpu=_is_torch_on_cpu, packages=("torch",)
    ),
    "sim": EngineKind(
        factory="shard_server.engines.built_in:sim_engine",
        reads_weights=False,
        is_on_cpu=lambda _: True,
        shards_per_process=lambda shard: shard.sim.shards_per_process,
        shorten_steps=_shorten_sim_steps,
    ),
    "tensorrt_llm": EngineKind(
        factory="shard_server.engines.built_in:tensorrt_llm_engine",
        needs_nvidia_gpu=True,
        needs_model_dir=True,
        packages=("tensorrt_llm", "tensorrt"),
        library_rows="shard_server.engines.tensorrt_llm.library_rows:library_rows",
    ),
}
ENGINES: Final = PluginGroup("kvloom.engines", "engine", BUILT_IN)
_OF_PLUGINS: Final = EngineKind()


def engine_kind(name: str) -> EngineKind:
    """Returns the description of an engine; that of a plugin's is the same for all."""
    return BUILT_IN.get(name, _OF_PLUGINS)


def shards_per_process(shard: ShardConfig) -> int:
    """Returns how many shards of this configuration share one process, at least 1."""
    count = engine_kind(shard.engine).shards_per_process
    return count(shard) if count else 1


def imported(reference: str) -> Any:
    """Returns the object that "module:name" refers to."""
    return pkgutil.resolve_name(reference)
