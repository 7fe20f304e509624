"""`kvloom bench engine` measures the real engine: its figures must hang together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from shard_server.engines.base import EngineError
from tests.fakes.tiny_llama import write_tiny_llama
from tools.bench.engine.command import bench_engine, run_bench
from tools.bench.engine.device import device_table


def test_the_report_counts_what_the_engine_did(tmp_path: Path):
    """Throughput is batch over step time, for every batch that was asked for, and nothing is zero."""
    report = run_bench(write_tiny_llama(tmp_path), batches=(1, 3), num_threads=1)
    assert report["batch_invariant"]
    assert report["prefill"]["tokens_per_second"] > 0
    assert report["load_seconds"] > 0
    assert [row["batch"] for row in report["decode"]] == [1, 3]
    for row in report["decode"]:
        assert len(row["prompt_tokens"]) == row["batch"]
        assert row["tokens_per_second"] > 0


def test_the_command_prints_json_and_can_do_without_invariance(tmp_path: Path):
    """Scripts read it; and the cost of invariance must be measurable."""
    (write_tiny_llama(tmp_path) / "tokenizer.json").write_text("{}")
    arguments = ["--model", str(tmp_path), "--json", "--threads", "1", "--no-deterministic"]
    result = CliRunner().invoke(bench_engine, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert not report["batch_invariant"]
    assert [row["batch"] for row in report["decode"]] == [1, 8, 32]


def test_the_sketch_is_measured_beside_the_engine(tmp_path: Path):
    """What paging and determinism cost can only be told on one machine in one run."""
    report = run_bench(write_tiny_llama(tmp_path), (1, 3), num_threads=1, with_reference=True)
    assert all(row["reference_tokens_per_second"] > 0 for row in report["decode"])


def test_a_broken_model_is_an_engine_error(tmp_path: Path):
    """The command turns it into one line."""
    with pytest.raises(EngineError):
        run_bench(tmp_path, num_threads=1)


def test_a_shape_is_measured_against_the_device_and_transformers():
    """The one command that a GPU box needs, on the CPU: every figure is there, and the model is the right one."""
    result = CliRunner().invoke(bench_engine, ["--shape", "tiny", "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["parity"]["largest_logit_difference"] < 1e-4
    assert report["limits"]["measured_bandwidth"] > 0
    for mode in ("fast", "deterministic"):
        assert [row["batch"] for row in report[mode]["decode"]] == [1, 3]
        assert report[mode]["prefill"]["of_measured_matrix_rate"] > 0
    assert not report["fast"]["batch_invariant"]
    assert "| decode, batch 3 |" in device_table(report)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so():
    """One line that says what is missing."""
    result = CliRunner().invoke(bench_engine, ["--device", "cuda", "--shape", "llama-3-8b"])
    assert result.exit_code == 1
    assert "device = 'cuda', but" in result.output
