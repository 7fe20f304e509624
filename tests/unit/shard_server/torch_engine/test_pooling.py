"""The embedding of a prompt is the same however the prompt is computed, and costs other sequences nothing."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_server.engines.base import EngineError, EngineRequest, Pooling, PoolingKind, SequenceFinishReason
from shard_server.engines.torch_engine.checkpoint.sentence_config import SentenceConfig, load_sentence_config
from shard_server.engines.torch_engine.pooling import PooledPrompt
from tests.fakes.fake_model_runner import HIDDEN_SIZE, logits_of
from tests.step_bench import same
from tests.unit.shard_server.torch_engine.test_scheduler_steps import make_request, various_requests
from tests.unit.shard_server.torch_engine.test_speculation import Bench


def embedding_of(request: EngineRequest, kind: PoolingKind | None = None, *, normalize: bool = True) -> EngineRequest:
    return dataclasses.replace(request, max_tokens=0, pooling=Pooling(kind, normalize))


def expected_of(request: EngineRequest) -> list[float]:
    """From the fake model's hidden states after every prefix, in double precision."""
    prompt, pooling = list(request.prompt_token_ids), request.pooling
    assert pooling is not None
    rows = torch.stack([logits_of(prompt[: end + 1])[1 : 1 + HIDDEN_SIZE] for end in range(len(prompt))]).double()
    row = {PoolingKind.LAST: rows[-1], PoolingKind.CLS: rows[0]}.get(pooling.kind or PoolingKind.MEAN, rows.mean(0))
    return (row / row.norm() if pooling.normalize else row).tolist()


def floats(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


@pytest.mark.parametrize(
    ("num_blocks", "budget"),
    [
        pytest.param(512, 512, id="batched"),
        pytest.param(512, 5, id="chunked"),
        pytest.param(18, 4, id="preempted"),
    ],
)
def test_it_is_that_of_the_model(num_blocks: int, budget: int) -> None:
    """Beside answers that stay as they are, in chunks, and when a prompt is computed twice: the same bits."""
    requests = various_requests(18)
    kinds = [None, *PoolingKind]
    mixed = [
        embedding_of(request, kinds[index % 4], normalize=index % 5 > 0) if index % 3 else request
        for index, request in enumerate(requests)
    ]
    plain = Bench(None, num_context_tokens=None).run(*requests)
    bench = Bench(None, num_blocks=num_blocks, budget=budget, num_context_tokens=None)
    answers = bench.run(*mixed)
    for request in mixed:
        answer = answers[request.request_id]
        if request.pooling is None:
            assert same(answer, plain[request.request_id])
            continue
        alone = Bench(None, num_context_tokens=None).run(request)[request.request_id]
        assert answer.embedding == alone.embedding
        assert floats(answer.embedding) == pytest.approx(expected_of(request), abs=1e-6)
        assert (answer.token_ids, answer.reason) == ([], SequenceFinishReason.STOP)
        assert answer.start is not None
        assert answer.start.num_cached_tokens == 0
    assert num_blocks > 18 or bench.scheduler.num_preemptions


def test_prefix_cache_is_neither_read_nor_filled() -> None:
    """Hidden states are not kept with the KV, and texts that are embedded hardly ever come again as prompts."""
    request = make_request("a", list(range(1, 31)), 4)
    bench = Bench(None, num_context_tokens=None)
    bench.run(embedding_of(request))
    assert not bench.replayed
    bench.run(dataclasses.replace(request, request_id="b"))
    again = bench.run(embedding_of(dataclasses.replace(request, request_id="c")))
    assert again["c"].embedding == again["a"].embedding


def test_hidden_states_that_are_not_finite_are_an_error() -> None:
    """JSON has no NaN, and a vector of them would poison an index."""
    request = embedding_of(make_request("a", [1, 2, 3]))
    for bad in (float("nan"), float("inf"), 1e30):
        pooled = PooledPrompt(request, PoolingKind.MEAN)
        pooled.add(torch.tensor([[1.0, bad], [1.0, 1.0], [1.0, 1.0]]), 0)
        assert pooled.vector() is None
    last = PooledPrompt(request, PoolingKind.LAST)
    last.add(torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, float("nan")]]), 0)
    assert last.vector() is None


def write_modules(folder: Path, pooling: dict[str, Any] | None, *, module: str = "Pooling", path: str = "1_Pooling"):
    folder.mkdir(exist_ok=True)
    prefix = "sentence_transformers.models."
    modules = [{"type": f"{prefix}Transformer", "path": ""}, {"type": f"{prefix}{module}", "path": path}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 256, "do_lower_case": false}')
    if pooling is not None:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_a_model_says_how_it_was_trained(tmp_path: Path) -> None:
    """A vector that is pooled in another way is worse, and no error."""
    assert load_sentence_config(tmp_path) == SentenceConfig()
    for name, kind in {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}.items():
        write_modules(
            tmp_path, {"word_embedding_dimension": 8, f"pooling_mode_{name}": True, "pooling_mode_max": False}
        )
        assert load_sentence_config(tmp_path) == SentenceConfig(PoolingKind(kind), 256, is_sentence_model=True)


@pytest.mark.parametrize(
    ("pooling", "changes", "message"),
    [
        ({"pooling_mode_max_tokens": True}, {}, "not over pooling_mode_max_tokens"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, {}, "not over pooling_mode_cls_token, "),
        ({}, {}, "not over none"),
        (None, {}, "No such file"),
        (None, {"module": "Dense"}, "module 'Dense' is not supported"),
        (None, {"path": "../elsewhere"}, "not the name of a folder"),
    ],
)
def test_what_would_be_ignored_is_an_error(
    pooling: dict[str, Any] | None, changes: dict[str, str], message: str, tmp_path: Path
) -> None:
    """Otherwise the vectors would be others than those that the model was trained for."""
    write_modules(tmp_path, pooling, **changes)
    with pytest.raises(EngineError, match=message):
        load_sentence_config(tmp_path)
