"""`kvloom-lab bench encoder-peers`: the quality that it prints is what its name says, and a failure is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from lab.bench.encoder_peers.command import encoder_table, ndcg
from lab.bench.encoder_peers.kvloom_worker import KvloomEncoder
from lab.bench.engine_peers.contenders import ContenderError, ContenderProcess
from tests.fakes.tiny_bert import write_tiny_bert

pytestmark = pytest.mark.xdist_group("transformers")


def test_gain_falls_with_the_rank_of_the_right_answer() -> None:
    """A first place counts 1, the second 1 / log2(3), and what is not among the first ten nothing."""
    scores = np.zeros((2, 12))
    scores[0, 0] = 1
    scores[1, 0] = 1
    assert ndcg(np.eye(3)) == 1
    scores[1, 1] = 0.5
    assert ndcg(scores[:, :2]) == pytest.approx((1 + 1 / np.log2(3)) / 2)
    assert ndcg(np.array([[-1.0, *range(11)]])) == 0


def test_our_engine_embeds_what_it_is_given_in_order(tmp_path: Path) -> None:
    """Texts end in the order of their length or batch; vectors must be those of their own texts."""
    encoder = KvloomEncoder(str(write_tiny_bert(tmp_path)), 1, json.dumps({"kernels": "torch"}))
    texts = [list(range(5, 5 + size)) for size in (90, 3, 40)]
    together = np.array(encoder.run(texts))
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    for text, vector in zip(texts, together, strict=True):
        assert np.allclose(encoder.run([text])[0], vector, atol=1e-5)


def test_an_engine_that_fails_is_named_by_its_last_words() -> None:
    """Without them nobody knows what to install or to report."""
    with pytest.raises(ContenderError, match="no such graph"):
        ContenderProcess((sys.executable, "-c", "raise SystemExit('Error: no such graph')"), 30.0)


def test_the_table_compares_with_the_first_engine() -> None:
    """Ratios of one run are what counts on a machine that does other work."""
    fields = {"version": "1", "least_cosine": 0.99995, "ndcg_at_10": 0.5}
    engines = [
        {"engine": "onnxruntime", "texts_per_second": 10.0, "seconds_of_one": 0.02, **fields},
        {"engine": "kvloom", "texts_per_second": 25.0, "seconds_of_one": 0.01, **fields},
    ]
    table = encoder_table({"num_texts": 256, "num_rounds": 3, "engines": engines})
    assert "| kvloom (1) | 25.0 | 2.50 | 10.0 | 2.00 | 0.99995 | 0.5000 |" in table
