"""`kvloom doctor engine` reports which parts of an engine work and which do not."""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from click.testing import CliRunner

from kvloom_common.config import KvloomConfig
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import Capability, EngineRequest, SequenceEnd, SequenceFinishReason, StepOutput
from tests.fakes.fake_tensorrt_llm import NEWEST, RELEASE_1_2, LibraryRelease, Variant, installed_tensorrt_llm
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tiny_bert import write_tiny_bert
from tests.fakes.word_tokenizer import word_tokenizer
from tools.doctor.checks import CHECKS, EMBEDDINGS, CheckFailedError, embeddings
from tools.doctor.command import Result, doctor_engine, examine
from tools.doctor.session import EngineSession


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Restores the logging configuration, which the command sets for its process, here the tests'."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes a driver that answers queries."""
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 580.65'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def doctor(model_dir: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(doctor_engine, ["--model", str(model_dir), "--json", *arguments])
    return result.exit_code, json.loads(result.stdout)


def outcomes(report: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["outcome"] for check in report["checks"]}


def test_the_simulated_engine_is_well(model_dir: Path):
    """Every check runs or states why it does not; features that an engine does not offer are skipped."""
    status, report = doctor(model_dir, "--engine", "sim")
    assert status == 0
    assert report["ok"]
    found = outcomes(report)
    assert [name for name, _ in (*CHECKS, EMBEDDINGS)] == list(found)[3:-1]
    skipped = {name for name, outcome in found.items() if outcome == "skipped"}
    assert {"penalties", "guided decoding"} <= skipped
    assert set(found.values()) == {"ok", "skipped"}


def test_an_encoder_is_asked_for_embeddings_only(tmp_path: Path):
    """It would refuse everything else."""
    word_tokenizer().save(str(write_tiny_bert(tmp_path) / "tokenizer.json"))
    status, report = doctor(tmp_path, "--engine", "torch")
    assert status == 0
    assert [name for name, outcome in outcomes(report).items() if outcome == "ok"][-3:] == [
        "start",
        "embeddings",
        "close",
    ]


class Scores(ScriptedEngine):
    """A cross-encoder, each of whose scores is by `drift` larger than the one before."""

    def __init__(self, drift: float) -> None:
        super().__init__()
        capabilities = frozenset({Capability.EMBED, Capability.CROSS_ENCODE})
        self.info = dataclasses.replace(self.info, capabilities=capabilities, embedding_size=1)
        self._drift = drift

    def submit(self, request: EngineRequest) -> None:
        super().submit(request)
        score = struct.pack("<f", 3.0 + self._drift * len(self.submitted))
        self.put(StepOutput(ends=[SequenceEnd(request.request_id, SequenceFinishReason.STOP, embedding=score)]))


async def test_a_score_that_depends_on_others_is_found() -> None:
    """A number has no direction: every two of them have the cosine 1, or -1."""
    tokenizer = ModelTokenizer(word_tokenizer())
    async with EngineSession(Scores(drift=0.0), tokenizer) as session:
        assert await embeddings(session) == "1 dimensions"
    async with EngineSession(Scores(drift=0.1), tokenizer) as session:
        with pytest.raises(CheckFailedError, match="another vector"):
            await embeddings(session)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("variant", [Variant(), Variant(release=NEWEST, window_sizes=(4096, 512), rank=0)])
def test_tensorrt_llm_is_well_where_it_behaves(model_dir: Path, variant: Variant):
    """This is what an operator should see on a GPU machine."""
    with installed_tensorrt_llm(variant):
        status, report = doctor(model_dir, "--engine", "tensorrt_llm")
    assert [check for check in report["checks"] if check["outcome"] == "failed"] == []
    assert status == 0
    assert outcomes(report)["KV events"] == "ok"
    assert outcomes(report)["prefix reuse"] == "ok"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("release", [RELEASE_1_2, NEWEST], ids=["1.2.1", "newest"])
async def test_what_ended_engines_before_is_asked_for(model_dir: Path, tmp_path: Path, release: LibraryRelease):
    """A hand-off, an adapter that does not exist, log-probabilities beside speculation, a cancel in the queue."""
    config = KvloomConfig()
    config.shard.engine, config.shard.role, config.shard.max_batch = "tensorrt_llm", "prefill", 8
    config.shard.tensorrt_llm.options = {
        "cache_transceiver_config": {"backend": "NIXL"},
        "speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 2, "speculative_model": str(tmp_path)},
        "lora_config": {"lora_target_modules": ["attn_q"]},
    }
    config.model.path = str(model_dir)
    with installed_tensorrt_llm(Variant(release=release)):
        results = await examine(config, lambda _: None)
    found = {result.name: result for result in results}
    assert [result for result in results if result.outcome == "failed"] == []
    assert "bytes" in found["hand-off"].detail
    assert "no such directory" in found["unknown adapter"].detail
    assert "has no logprobs" in found["sampled logprobs"].detail
    assert "behind 8 others" in found["cancel in the queue"].detail


@pytest.mark.usefixtures("gpu")
def test_the_report_is_a_table_that_can_be_sent(model_dir: Path):
    """Nobody here has the library: what a user's machine shows is how its differences become known."""
    with installed_tensorrt_llm():
        result = CliRunner().invoke(doctor_engine, ["--model", str(model_dir), "--engine", "tensorrt_llm"])
        _, report = doctor(model_dir, "--engine", "tensorrt_llm")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["feature", "expected", "seen"]
    assert lines[-1] == "all is well"
    (params,) = (line for line in lines if "llmapi.DisaggregatedParams" in line)
    assert params.startswith("–")
    assert params.endswith("schedule_style")
    assert "10 names" in params
    (stop,) = (line for line in lines if " stop token " in line)
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["stop token"]["expected"]
    assert checks["stop token"]["detail"] in stop
    assert len(lines) == len(checks) + 2


@pytest.mark.usefixtures("gpu")
async def test_missing_kv_events_are_found(model_dir: Path):
    """Without KV events routing ignores caches, which would be hard to notice otherwise."""
    config = KvloomConfig()
    config.shard.engine = "tensorrt_llm"
    config.model.path = str(model_dir)
    with installed_tensorrt_llm(Variant(has_events=False)):
        results = await examine(config, lambda _: None, kv_event_seconds=0.2)
    found = {result.name: result.outcome for result in results}
    assert found["KV events"] == "failed"
    assert found["32 at once"] == "ok", "the other checks are made"


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
def test_missing_kv_events_are_a_failure_of_the_command(model_dir: Path):
    """It waits as long for the events as it does on a user's machine."""
    with installed_tensorrt_llm(Variant(has_events=False)):
        status, report = doctor(model_dir, "--engine", "tensorrt_llm")
    assert status == 1
    assert not report["ok"]
    assert outcomes(report)["KV events"] == "failed"
    assert outcomes(report)["32 at once"] == "ok", "the other checks go on"


@pytest.mark.usefixtures("gpu")
def test_an_engine_that_cannot_start_is_reported_in_one_line(model_dir: Path):
    """The line has the reason."""
    with installed_tensorrt_llm(Variant(has_stats=False)):
        status, report = doctor(model_dir, "--engine", "tensorrt_llm")
    assert status == 1
    assert report["checks"][-1]["name"] == "start"
    assert "shard.num_blocks" in report["checks"][-1]["detail"]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("variant", "seen"),
    [
        (Variant(release=dataclasses.replace(NEWEST, name="2.7.0")), "2.7.0, used by what it has, else like 1.4.0rc4"),
        (Variant(is_stub=True), "the index's stub"),
        (None, "cannot be imported"),
    ],
    ids=["unknown", "stub", "absent"],
)
def test_the_table_is_there_whatever_is_installed(
    model_dir: Path, variant: Variant | None, seen: str, monkeypatch: pytest.MonkeyPatch
):
    """A version that is refused, or is no library, is the one whose differences are to be known."""
    with installed_tensorrt_llm(variant):
        if variant is None:
            monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
        status, report = doctor(model_dir, "--engine", "tensorrt_llm")
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["release"]["expected"] == "1.2.1 or 1.4.0rc4"
    assert seen in checks["release"]["detail"]
    is_there = variant is not None and not variant.is_stub
    assert (status == 0) == is_there
    assert (checks["llmapi.KvCacheConfig"]["detail"] == "absent") == (not is_there)
    assert checks["llmapi.KvCacheConfig"]["expected"].endswith("names")


def test_a_machine_without_a_driver_is_no_place_for_tensorrt_llm(model_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """The most common mistake is a container that was started without --gpus."""
    monkeypatch.setenv("PATH", "")
    with installed_tensorrt_llm():
        status, report = doctor(model_dir, "--engine", "tensorrt_llm")
    assert status == 1
    assert outcomes(report)["GPU"] == "failed"


async def test_an_engine_that_dies_under_examination_ends_it(model_dir: Path):
    """Every further check would fail in the same way."""
    config = KvloomConfig()
    config.shard.engine = "tensorrt_llm"
    config.model.path = str(model_dir)
    with installed_tensorrt_llm() as fake:

        def report(result: Result) -> None:
            if result.name == "streaming":
                fake.llm.die(RuntimeError("CUDA error: device-side assert triggered"))

        results = await examine(config, report)
    failed = next(result for result in results if result.name == "stop token")
    assert failed.outcome == "failed"
    assert "shutting down" in failed.detail
    assert [result.name for result in results[-2:]] == ["stop token", "close"]


def test_tensorrt_llm_wants_a_directory():
    """TensorRT-LLM does not convert checkpoints here."""
    result = CliRunner().invoke(doctor_engine, ["--engine", "tensorrt_llm", "--model", "smollm2-135m-instruct"])
    assert result.exit_code == 1


def test_people_get_signs(model_dir: Path):
    """Each check is reported when it ends, because all take minutes; the table has one row per check."""
    result = CliRunner().invoke(doctor_engine, ["--model", str(model_dir), "--engine", "sim"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert result.stderr.startswith("✓ versions: Python ")
    assert lines[1].startswith("✓  versions ")
    assert any(line.startswith("–  penalties ") for line in lines)
    assert lines[-1] == "all is well"
