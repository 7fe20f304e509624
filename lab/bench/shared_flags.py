"""The options that several benches share, and the configuration of the fabric or engine that they start."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from kvloom_common.config import KvloomConfig, ModelConfig
from lab.bench.experiment import DATA_DIR, choice, count, flag, show_progress
from router.core.placement import POLICIES
from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_MODEL_NAME
from tools.models.resolve import model_cache_dir, resolve_model
from tools.simulate.fleet.profile import PROFILES

Device = Literal["cpu", "cuda"]
_BLOCKS_ON_GPU: Final = 8192


MODEL: Final = flag("--model", str, BUILTIN_MODEL_NAME, "Name, directory or .gguf file.", metavar="NAME|PATH")
SHARD_FLAGS: Final = (MODEL, choice("--device", ["cpu", "cuda"], "cpu", "The device of the torch engine."), DATA_DIR)
PROFILE: Final = choice("--profile", sorted(PROFILES), "70b", "The modelled shard: a model and its hardware.")
POLICY: Final = choice("--policy", sorted(POLICIES), "ect", "Placement policy.")
SEED: Final = count("--seed", 1, least=0)


def bench_config(engine: str, model: str, device: Device, data_dir: Path | None) -> KvloomConfig:
    """Fetches the model if it is not there. Raises CommandError."""
    found = resolve_model(model, model_cache_dir(data_dir), show_progress)
    config = KvloomConfig(model=ModelConfig(name=found.name, path=str(found.path)))
    config.shard.engine, config.shard.torch.device = engine, device
    config.shard.num_shards = 1
    if device == "cuda":  # several shards share the GPU, and each would take most of the memory that is free
        config.shard.num_blocks = _BLOCKS_ON_GPU
    config.safety.answer_mode = "off"  # it holds the first words back, whose time counts
    return config
