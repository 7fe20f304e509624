"""Encoders compute what the reference implementation (transformers) computes on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from kvloom_common.config import ShardConfig, TorchConfig
from shard_server.engines.base import Capability, EngineError
from shard_server.engines.torch_engine.encoder.runner import EncoderRunner
from shard_server.engines.torch_engine.engine import TorchEngine
from tests.fakes.kernel_threads import family_params
from tests.fakes.tiny_bert import write_tiny_bert
from tests.lazy_imports import imported_when_used

pytestmark = pytest.mark.xdist_group("transformers")  # which takes seconds to import
transformers = imported_when_used("transformers")

CPU = torch.device("cpu")


def runner_of(model_dir: Path, max_model_len: int = 0, **torch_fields: Any) -> EncoderRunner:
    config = TorchConfig(**torch_fields)
    return EncoderRunner(model_dir, config, max_model_len=max_model_len, num_threads=1, device=CPU)


def texts_of(vocab_size: int, *sizes: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, vocab_size, (size,), generator=generator).tolist() for size in sizes]


@pytest.mark.parametrize(
    ("changes", "prefix"),
    [
        ({}, ""),
        ({"num_attention_heads": 4, "layer_norm_eps": 1e-5}, "bert."),
        ({"model_type": "roberta", "architectures": ["RobertaModel"], "pad_token_id": 1, "type_vocab_size": 1}, ""),
        (
            {
                "model_type": "xlm-roberta",
                "architectures": ["XLMRobertaModel"],
                "pad_token_id": 1,
                "type_vocab_size": 1,
            },
            "roberta.",
        ),
    ],
    ids=["bert", "bert with a prefix", "roberta", "xlm-roberta"],
)
def test_every_family_computes_what_transformers_computes(tmp_path: Path, changes: dict[str, Any], prefix: str) -> None:
    """In float32 a missing norm or a shifted position exceeds any rounding error; texts of one batch do not mix."""
    model_dir = write_tiny_bert(tmp_path, prefix=prefix, **changes)
    texts = texts_of(320, 70, 1, 33, 200)
    reference = transformers.AutoModel.from_pretrained(model_dir, dtype=torch.float32, add_pooling_layer=False).eval()
    for text, states in zip(texts, runner_of(model_dir, dtype="float32").run(texts), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([text])).last_hidden_state[0]
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", ["dtype", "int8"])
@pytest.mark.parametrize("kernels", family_params())
def test_compiled_kernels_compute_what_transformers_computes(tmp_path: Path, kernels: str, weights: str) -> None:
    """A token must see all of its text, behind it as well, and nothing of its neighbours, whatever fills the batch;
    texts are shorter and longer than what attention takes at a time, and than the memory of the step before."""
    model_dir = write_tiny_bert(tmp_path)
    runner = runner_of(model_dir, kernels=kernels, weights=weights)
    exact = runner_of(model_dir, dtype="float32")
    for texts in (texts_of(320, 3), texts_of(320, 70, 1, 33, 200, 16, 129, 300)):
        for text, states in zip(exact.run(texts), runner.run(texts), strict=True):
            similarities = torch.nn.functional.cosine_similarity(text, states, dim=1)
            assert similarities.min() > 0.999
    assert runner.batch_invariant
    assert weights.replace("dtype", "bfloat16") in runner.variant


def test_vectors_of_real_texts_are_those_of_float32(encoder_dir: Path) -> None:
    """What users compare: the built-in encoder's vectors, with 8-bit weights, the coarsest that the default takes."""
    tokenizer = Tokenizer.from_file(str(encoder_dir / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts = [
        tokenizer.encode(text).ids[:256] for text in (json.__doc__, pytest.__doc__, torch.nn.Linear.__doc__) if text
    ]
    exact = runner_of(encoder_dir, dtype="float32").run(texts)
    for weights in ("dtype", "int8"):
        for of_text, states in zip(exact, runner_of(encoder_dir, weights=weights).run(texts), strict=True):
            assert torch.nn.functional.cosine_similarity(of_text.mean(0), states.mean(0), dim=0) > 0.999


@pytest.mark.parametrize("fields", [{"kernels": "torch"}, {"weights": "dtype"}, {"weights": "int8"}])
def test_bits_do_not_depend_on_the_batch(tmp_path: Path, fields: dict[str, Any]) -> None:
    """The same text must have the same vector tomorrow, whatever else is embedded then."""
    runner = runner_of(write_tiny_bert(tmp_path), **fields)
    if not runner.batch_invariant:
        pytest.skip("this machine's products depend on the number of rows")
    texts = texts_of(320, 5, 90, 31, 2, 250, 64)
    together = runner.run(texts)
    for text, states in zip(texts, together, strict=True):
        assert torch.equal(runner.run([text])[0], states)


async def test_what_an_engine_says_of_itself(tmp_path: Path) -> None:
    """Clients choose by it: a sentence model can be compared, another encoder cannot, and neither writes."""
    for pooling, window in (("mean_tokens", 256), ("", 300)):
        model_dir = write_tiny_bert(tmp_path / (pooling or "plain"), pooling=pooling)
        engine = TorchEngine(model_dir, "model", ShardConfig(torch=TorchConfig(num_threads=1)))
        try:
            await engine.start()
            info = engine.info
        finally:
            await engine.close()
        expected = {Capability.EMBED} | ({Capability.RERANK, Capability.SCORE} if pooling else set())
        assert info.capabilities - {Capability.BATCH_INVARIANT} == expected
        assert (info.max_model_len, info.embedding_size, info.vocab_size) == (window, 64, 320)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"position_embedding_type": "relative_key"}, "positions 'relative_key'"),
        ({"is_decoder": True}, "as an encoder only"),
        ({"num_attention_heads": 7}, "multiple of num_attention_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size must be a positive integer"),
        ({"num_hidden_layers": 3}, "'encoder.layer.2.attention.output.LayerNorm.bias' and 15 more missing"),
        ({"num_hidden_layers": 1}, "unexpected tensor 'encoder.layer.1"),
        ({"hidden_size": 128}, "config.json implies"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """In words that name the file and what is wrong with it."""
    model_dir = write_tiny_bert(tmp_path)
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(EngineError, match=message):
        runner_of(model_dir)


def test_options_that_do_not_apply_are_refused(tmp_path: Path) -> None:
    """They would be without effect."""
    model_dir = write_tiny_bert(tmp_path)
    for weights in ("packed", "int4"):
        with pytest.raises(EngineError, match="not supported for encoders"):
            runner_of(model_dir, weights=weights)
    with pytest.raises(EngineError, match="int8 weights need compiled kernels"):
        runner_of(model_dir, weights="int8", kernels="torch")
    with pytest.raises(EngineError, match="'generic' cannot run here"):
        runner_of(model_dir, kernels="generic", dtype="float32")
    with pytest.raises(EngineError, match="max_model_len is 301"):
        runner_of(model_dir, max_model_len=301)
