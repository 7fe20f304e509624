"""`kvloom bench engine` measures the real engine: its figures must hang together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvloom_common.config import TorchConfig
from shard_server.engines.base import EngineError
from tests.fakes.tiny_llama import write_tiny_llama
from tests.fakes.virtual_time_engine import VirtualTimeEngine
from tools.bench.engine import report as report_module
from tools.bench.engine import roofline
from tools.bench.engine.command import bench_engine
from tools.bench.engine.device import device_table
from tools.bench.engine.report import report_text, run_bench

ONE_THREAD = TorchConfig(num_threads=1)


@pytest.fixture(autouse=True)
def _small_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "array_bytes", lambda cache_bytes, free_bytes: 2**22)


def test_the_report_counts_what_the_engine_did(tmp_path: Path):
    """Throughput is batch over step time, for every batch that was asked for, and nothing is zero."""
    report = run_bench(write_tiny_llama(tmp_path), batches=(1, 3), torch=ONE_THREAD)
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
    assert report["roofline"]["num_threads"] == 1
    assert report["prefill"]["of_float32_peak"] > 0
    assert all(row["of_bandwidth"] > 0 for row in report["decode"])


@pytest.mark.long
def test_the_text_shows_figures_and_their_shares(tmp_path: Path):
    """Who reads it wants to know how much is left to gain."""
    (write_tiny_llama(tmp_path) / "tokenizer.json").write_text("{}")
    arguments = ["--model", str(tmp_path), "--roofline", "--threads", "1", "--weights", "dtype", "--dtype", "float32"]
    result = CliRunner().invoke(bench_engine, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert ", batch-invariant: torch's operators" in result.stdout
    assert result.stdout.count("of the memory bandwidth") == 3
    assert result.stdout.count("of the float32 peak") == 4
    assert "limits of 1 threads: memory is read at" in result.stdout


def test_what_cannot_be_measured_is_named_and_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An engine that hangs, so that no step ends, still gets a report."""

    def hung(*_args: object, **_options: object) -> VirtualTimeEngine:
        engine = VirtualTimeEngine(1000.0, 0.001)
        engine.submit = lambda request: None
        return engine

    monkeypatch.setattr(report_module, "TorchEngine", hung)
    (write_tiny_llama(tmp_path) / "tokenizer.json").write_text("{}")
    arguments = ["--model", str(tmp_path), "--seconds", "0.01", "--threads", "1"]
    result = CliRunner().invoke(bench_engine, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    for row in (report["prefill"], *report["decode"]):
        assert row["tokens_per_second"] is None
        assert "within 0.01 s" in row["note"]
    text = CliRunner().invoke(bench_engine, arguments, catch_exceptions=False).stdout
    assert text.count("no sample") == 4
    assert "decode   no sample (batch 32): the engine did not end" in text


@pytest.mark.parametrize(("at", "num_figures"), [("decode, batch 3", 1), ("roofline", 2)])
def test_ctrl_c_keeps_the_figures_so_far(tmp_path: Path, at: str, num_figures: int):
    """They may have taken minutes."""

    def interrupt(message: str) -> None:
        if message == at:
            raise KeyboardInterrupt

    model = write_tiny_llama(tmp_path)
    report = run_bench(model, (1, 3), torch=ONE_THREAD, with_roofline=True, on_progress=interrupt)
    assert report["prefill"]["tokens_per_second"] > 0
    assert len(report["decode"]) == num_figures
    assert report_text(report).endswith("interrupted: these are the figures so far")


def test_ctrl_c_before_the_first_figure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """There is nothing to show, and a stack trace would explain nothing."""

    def interrupt(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report_module, "TorchEngine", interrupt)
    (write_tiny_llama(tmp_path) / "tokenizer.json").write_text("{}")
    result = CliRunner().invoke(bench_engine, ["--model", str(tmp_path)])
    assert result.exit_code == 130
    assert "error: interrupted before anything was measured" in result.stderr


def test_a_broken_model_is_an_engine_error(tmp_path: Path):
    """The command turns it into one line."""
    with pytest.raises(EngineError):
        run_bench(tmp_path, torch=ONE_THREAD)


@pytest.mark.long
def test_a_shape_is_measured_against_the_device_and_transformers():
    """The one command that a GPU box needs, on the CPU: every figure is there, and the model is the right one."""
    result = CliRunner().invoke(bench_engine, ["--shape", "tiny", "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["parity"]["largest_logit_difference"] < 1e-4
    assert report["limits"]["measured_bandwidth"] > 0
    for mode in ("fast", "deterministic"):
        assert [row["batch"] for row in report[mode]["decode"]] == [1, 3]
        assert [row["prompts"] for row in report[mode]["prefill"]] == [1, 5]
        assert all(row["of_measured_matrix_rate"] > 0 for row in report[mode]["prefill"])
        assert [row["streams"] for row in report[mode]["served"]] == [1, 3]
        assert all(row["ttft_p99"] > 0 for row in report[mode]["served"])
    assert not report["fast"]["batch_invariant"]
    assert "| decode, batch 3 |" in device_table(report)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so():
    """One line that says what is missing."""
    result = CliRunner().invoke(bench_engine, ["--device", "cuda", "--shape", "llama-3-8b"])
    assert result.exit_code == 1
    assert "device = 'cuda', but" in result.output
