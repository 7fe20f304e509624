"""Makes the engines that kvloom brings. Each is imported only when it is made, because the heavy ones take seconds."""

from __future__ import annotations

import functools

import structlog

from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import Engine
from shard_server.engines.create import EngineSetup

log = structlog.get_logger()


def torch_engine(setup: EngineSetup) -> Engine:
    import torch  # noqa: F401  (who lacks the extra misses torch: the packages that come with it say less)

    from shard_server.engines.torch_engine.engine import TorchEngine

    def on_load_progress(message: str) -> None:
        log.info("model_load_advanced", model=setup.model_name, stage=message)

    return TorchEngine(
        setup.model_dir,
        setup.model_name,
        setup.shard,
        max_loaded_adapters=setup.max_loaded_adapters,
        max_adapter_rank=setup.max_adapter_rank,
        on_load_progress=on_load_progress,
    )


def tensorrt_llm_engine(setup: EngineSetup) -> Engine:
    from shard_server.engines.tensorrt_llm.engine import TensorRtLlmEngine

    return TensorRtLlmEngine(
        setup.model_dir,
        setup.model_name,
        setup.shard,
        vocab_size=setup.vocab_size,
        eos_token_ids=setup.eos_token_ids,
        max_model_len=setup.max_model_len,
    )


def sim_engine(setup: EngineSetup) -> Engine:
    from shard_server.engines.sim_engine import SimEngine

    settings = setup.shard.sim
    return SimEngine(
        setup.model_name,
        setup.shard,
        setup.vocab_size,
        setup.eos_token_ids,
        setup.max_model_len,
        stamps=_stamps(setup.tokenizer) if settings.stamp_tokens else (),
        opening=setup.tokenizer.encode_now(settings.opening) if settings.opening else (),
        max_loaded_adapters=setup.max_loaded_adapters,
    )


@functools.lru_cache(maxsize=1)
def _stamps(tokenizer: ModelTokenizer) -> tuple[int, ...]:
    """Cached, because hundreds of engines may share a process and its tokenizer."""
    from shard_server.engines.sim_tokens import stamp_token_ids

    return stamp_token_ids(tokenizer.token_texts)
