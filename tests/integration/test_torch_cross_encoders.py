"""Cross-encoders compute what the reference implementation (transformers) computes on the same weights, and rank
texts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from kvloom_common.config import ShardConfig, TorchConfig
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import Capability, EngineError
from shard_server.engines.torch_engine.encoder.runner import EncoderRunner
from shard_server.engines.torch_engine.engine import TorchEngine
from tests.fakes.embedding_world import embedding_world
from tests.fakes.kernel_threads import family_params
from tests.lazy_imports import imported_when_used

pytestmark = pytest.mark.xdist_group("transformers")  # which takes seconds to import
pytest_plugins = ("tests.fakes.router_fixtures",)
transformers = imported_when_used("transformers")

WORDS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "who", "reads", "cards", "the", "loom", "mill", "grinds", "wheat")
CLS, SEP = 1, 2
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 100,
    "num_labels": 1,
}


def reference(folder: Path, kind: str, **changes: Any) -> Any:
    """A random model of transformers, which is saved there."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    with torch.no_grad():  # else all weights of a new model are so small that every pair is alike
        for name, weight in model.named_parameters():
            weight.add_(torch.randn_like(weight) * (0.2 if "LayerNorm" not in name else 0.05))
    model.save_pretrained(folder)
    return model


def pair(first: list[int], second: list[int]) -> list[int]:
    return [CLS, *first, SEP, *second, SEP]


PAIRS = [([4, 5, 6], [7, 8, 9, 10]), ([11], [4]), ([5] * 20, [6] * 30)]


def scores(runner: EncoderRunner) -> list[float]:
    assert runner.score_head is not None
    return [float(runner.score_head.score(states)) for states in runner.run([pair(*one) for one in PAIRS])]


def expected(model: Any, *, has_types: bool) -> list[float]:
    found: list[float] = []
    for first, second in PAIRS:
        types = [0] * (len(first) + 2) + [int(has_types)] * (len(second) + 1)
        with torch.inference_mode():
            ids, kinds = torch.tensor([pair(first, second)]), torch.tensor([types])
            found.append(float(model(input_ids=ids, token_type_ids=kinds).logits))
    return found


def runner_of(folder: Path, **torch_fields: Any) -> EncoderRunner:
    config = TorchConfig(**torch_fields)
    return EncoderRunner(folder, config, max_model_len=0, num_threads=1, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "changes", "has_types"),
    [
        ("Bert", {}, True),
        ("Roberta", {"pad_token_id": 0, "type_vocab_size": 1}, False),
        ("Roberta", {"pad_token_id": 0, "type_vocab_size": 2}, False),
        ("XLMRoberta", {"pad_token_id": 0, "type_vocab_size": 1}, False),
    ],
)
def test_pairs_are_judged_as_transformers_judges_them(
    tmp_path: Path, kind: str, changes: dict[str, Any], has_types: bool
) -> None:
    """The second text has a type of its own with BERT alone, and pairs of one batch do not mix."""
    model = reference(tmp_path, kind, **changes)
    assert scores(runner_of(tmp_path, dtype="float32")) == pytest.approx(expected(model, has_types=has_types), abs=1e-4)


def test_a_pooler_that_nothing_uses_is_left_out(tmp_path: Path) -> None:
    """Older files of RoBERTa's cross-encoders have one beside the head that judges."""
    reference(tmp_path, "Roberta", pad_token_id=0, type_vocab_size=1)
    without = scores(runner_of(tmp_path, dtype="float32"))
    path = tmp_path / "model.safetensors"
    hidden = SIZES["hidden_size"]
    pooler = {
        "roberta.pooler.dense.weight": torch.ones(hidden, hidden),
        "roberta.pooler.dense.bias": torch.ones(hidden),
    }
    save_file({**load_file(path), **pooler}, path)
    assert scores(runner_of(tmp_path, dtype="float32")) == without


@pytest.mark.parametrize("kernels", family_params())
def test_compiled_kernels_judge_them_alike(tmp_path: Path, kernels: str) -> None:
    """Rounding to bf16 moves scores a little, and does not change their order."""
    model = reference(tmp_path, "Bert")
    found, exact = scores(runner_of(tmp_path, kernels=kernels, weights="dtype")), expected(model, has_types=True)
    assert found == pytest.approx(exact, abs=0.1 * max(map(abs, exact)))
    assert sorted(range(3), key=found.__getitem__) == sorted(range(3), key=exact.__getitem__)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    """Its numbers mean something else."""
    reference(tmp_path, "Bert", num_labels=3)
    with pytest.raises(EngineError, match="one label"):
        runner_of(tmp_path, dtype="float32")


def pair_tokenizer() -> ModelTokenizer:
    """Knows a few words, and writes pairs as BERT does."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return ModelTokenizer(tokenizer)


async def test_the_fabric_ranks_by_it(tmp_path: Path, router_redis_url: str) -> None:
    """/v1/rerank and /v1/score give its probabilities; it gives no embeddings, and says so."""
    model = reference(tmp_path, "Bert")
    config = ShardConfig(torch=TorchConfig(num_threads=1, dtype="float32"), num_blocks=64)
    engine = TorchEngine(tmp_path, "model", config)
    query, documents = "who reads cards", ["the loom reads cards", "the mill grinds wheat"]

    def likely(first: str, second: str) -> float:
        ids = pair_tokenizer().encode_now
        types = [0] * (len(ids(first)) + 2) + [1] * (len(ids(second)) + 1)
        with torch.inference_mode():
            given = torch.tensor([pair(ids(first), ids(second))])
            logit = float(model(input_ids=given, token_type_ids=torch.tensor([types])).logits)
        return 1.0 / (1.0 + math.exp(-logit))

    async with embedding_world(router_redis_url, pair_tokenizer(), (engine, config)) as world:
        assert Capability.CROSS_ENCODE in engine.info.capabilities
        status, ranked = await world.post("/v1/rerank", query=query, documents=documents)
        assert status == 200, ranked
        wanted = {number: likely(query, text) for number, text in enumerate(documents)}
        found = {one["index"]: one["relevance_score"] for one in ranked["results"]}
        assert found == pytest.approx(wanted, abs=1e-4)
        assert [one["index"] for one in ranked["results"]] == sorted(wanted, key=lambda number: -wanted[number])
        num_words = len(query.split()) * 2 + sum(len(text.split()) for text in documents)
        assert ranked["usage"]["prompt_tokens"] == num_words + 2 * 3
        status, scored = await world.post("/v1/score", text_1=documents, text_2=query)
        assert [one["score"] for one in scored["data"]] == pytest.approx(
            [likely(text, query) for text in documents], abs=1e-4
        )
        status, refused = await world.post("/v1/embeddings", input="cards")
        assert (status, refused["error"]["param"]) == (400, "model")
        status, refused = await world.post("/v1/rerank", query=query, documents=["cards", "loom " * 200])
        assert (status, refused["error"]["param"]) == (400, "documents[1]")
