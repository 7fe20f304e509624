"""Embeddings of decoders are the pooled hidden states that the reference implementation (transformers) computes."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from kvloom_common.config import ShardConfig, TorchConfig
from shard_server.engines.base import EngineRequest, Pooling, PoolingKind, Sampling
from shard_server.engines.torch_engine.engine import TorchEngine
from tests.conformance.engine_driver import EngineDriver
from tests.fakes.tiny_llama import write_tiny_llama
from tests.lazy_imports import imported_when_used

pytestmark = pytest.mark.xdist_group("transformers")  # which takes seconds to import
transformers = imported_when_used("transformers")


def reference(model_dir: Path, token_ids: list[int], kind: PoolingKind) -> torch.Tensor:
    model = transformers.AutoModel.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([token_ids])).last_hidden_state[0]
    return {PoolingKind.LAST: states[-1], PoolingKind.CLS: states[0]}.get(kind, states.mean(0))


async def embeddings(
    model_dir: Path, token_ids: list[int], kinds: list[PoolingKind], **torch_fields: Any
) -> list[torch.Tensor]:
    """What the engine gives, without normalisation; prompts are computed in chunks."""
    config = ShardConfig(
        torch=TorchConfig(num_threads=1, **torch_fields), num_blocks=64, max_batch=8, max_prefill_tokens_per_step=32
    )
    engine = TorchEngine(model_dir, "model", config)
    driver = EngineDriver(engine)
    try:
        await engine.start()
        for kind in kinds:
            pooling = Pooling(kind, normalize=False)
            engine.submit(EngineRequest(kind.value, token_ids, Sampling(), 0, pooling=pooling))
        await driver.step_until(lambda: len(driver.ends) == len(kinds))
    finally:
        await engine.close()
    vectors = [driver.embeddings[kind.value] for kind in kinds]
    return [torch.tensor(struct.unpack(f"<{len(vector) // 4}f", vector)) for vector in vectors]


@pytest.mark.parametrize(
    "torch_fields",
    [
        {"dtype": "float32"},
        {"dtype": "float32", "deterministic": False},
    ],
    ids=["float32", "not deterministic"],
)
async def test_float32_vectors_are_those_of_transformers(tmp_path: Path, torch_fields: dict[str, Any]) -> None:
    """In float32 a missing norm or a wrong row exceeds any rounding error."""
    model_dir = write_tiny_llama(tmp_path)
    token_ids = torch.randint(0, 320, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    kinds = list(PoolingKind)
    for kind, vector in zip(kinds, await embeddings(model_dir, token_ids, kinds, **torch_fields), strict=True):
        torch.testing.assert_close(vector, reference(model_dir, token_ids, kind), rtol=1e-4, atol=1e-4)


async def test_vectors_of_the_built_in_model_are_those_of_transformers(model_dir: Path) -> None:
    """With the kernels that are used by default, whose numbers between products are bf16."""
    text = "Looms weave cloth from threads. The shuttle carries the weft through the warp, again and again."
    token_ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text).ids
    kinds = [PoolingKind.MEAN, PoolingKind.LAST]
    for kind, vector in zip(kinds, await embeddings(model_dir, token_ids, kinds), strict=True):
        expected = await asyncio.to_thread(reference, model_dir, token_ids, kind)
        assert torch.cosine_similarity(vector, expected, dim=0) > 0.995
