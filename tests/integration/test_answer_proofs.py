"""An answer in which the safety policy has found something is computed again, although nobody has kept it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from kvloom_common.audit.keys import AuditKeys
from kvloom_common.audit.log import KEYS, AnswerProof, AuditLine, AuditLog, erase_excerpts, read_log
from kvloom_common.config import KvloomConfig, ModelConfig, ShardConfig
from kvloom_common.receipts.receipt import digest, without_content
from kvloom_common.receipts.receipt import wanted_of as requested
from kvloom_common.text.tokenizer import ModelTokenizer
from lab.shallow_model import write_shallow_model
from safety_svc.audit import Audit
from safety_svc.policy_file import PolicyFile
from shard_server.engines.base import Engine
from shard_server.engines.torch_engine.engine import TorchEngine
from tests.fakes.embedding_world import EmbeddingWorld, embedding_world, sim_engine
from tests.fakes.failover_world import MODEL
from tests.fakes.screened_world import serve_safety
from tests.waiting import eventually
from tools.audit.reproduce import computed, is_found, proof_of, wanted_of
from tools.cli.commands import main
from tools.failures import CommandError
from tools.receipts.rerun import rerunner

pytest_plugins = ("tests.fakes.router_fixtures",)

POLICY = """
[[rules]]
name = "cut"
applies_to = ["answer"]
patterns = ['on']
prefixes = ["on"]

[[rules]]
name = "noted"
applies_to = ["answer"]
patterns = ['e']
prefixes = ["e"]
mode = "monitor"
"""


class Fabric:
    """Asks for answers, and keeps nothing of them but what the test compares."""

    def __init__(self, folder: Path, tokenizer: ModelTokenizer) -> None:
        self.audit_dir = folder / "audit"
        self.policy = folder / "policy.toml"
        self.policy.write_text(POLICY)
        self.tokenizer = tokenizer
        self.prompts: dict[str, str] = {}
        """By the request's name."""
        self.texts: list[str] = []

    async def ask(self, redis_url: str, engine: tuple[Engine, ShardConfig], count: int) -> None:
        async with contextlib.AsyncExitStack() as stack:
            audit = Audit(AuditLog(self.audit_dir, "safety"))
            stack.callback(audit.close)
            port = await serve_safety(stack, PolicyFile(str(self.policy)), audit)

            def configure(config: KvloomConfig) -> None:
                config.safety.port, config.safety.audit_dir = port, str(self.audit_dir)
                config.safety.on_unavailable = "refuse"

            world = await stack.enter_async_context(
                embedding_world(redis_url, self.tokenizer, engine, configure=configure)
            )
            link = world.fabric.server._parts.safety_link
            assert link is not None
            await eventually(lambda: link.policy_revision is not None, "the policy")
            room = asyncio.Semaphore(8)
            await asyncio.gather(*(self._ask_one(world, room, number) for number in range(count)))

    async def _ask_one(self, world: EmbeddingWorld, room: asyncio.Semaphore, number: int) -> None:
        prompt = f"Tell me of the {number}th loom."
        async with room:
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": 24, "temperature": 0.9, "seed": number}
            status, answer = await world.post("/v1/completions", **body)
        assert status == 200, answer
        self.prompts[answer["id"]] = prompt
        self.texts.append(answer["choices"][0]["text"])

    def decisions(self) -> tuple[list[AuditLine], list[AuditLine]]:
        """(all records, those of decisions about answers)"""
        lines = list(read_log(self.audit_dir))
        return lines, [line for line in lines if line.record.rule]

    async def reproduced(self, config: KvloomConfig) -> dict[str, int]:
        """How many answers were the same, by what was decided about them."""
        lines, decisions = self.decisions()
        records, policy = [line.record for line in lines], PolicyFile(str(self.policy)).current
        counts = {"blocked": 0, "flagged": 0}
        async with rerunner(config, {}) as engine:
            for line in decisions:
                proof = proof_of(records, line.record, AuditKeys(self.audit_dir / KEYS))
                wanted = wanted_of(proof, self.prompts[line.record.request_id], self.tokenizer)
                texts = await computed(engine, proof, wanted, self.tokenizer)
                assert line.record.policy == policy.revision
                assert is_found(policy, line.record, texts), line.record
                counts[line.record.event] += 1
        return counts

    def check_that_nothing_is_kept(self) -> None:
        stored = b"".join(path.read_bytes() for path in self.audit_dir.rglob("*") if path.is_file())
        for text in (*self.prompts.values(), *self.texts):
            for start in range(0, len(text) - 12, 12):  # fewer characters may be the name of a field
                assert text[start : start + 12].encode() not in stored


async def test_answers_are_computed_again_from_their_prompts(
    router_redis_url: str, tokenizer: ModelTokenizer, model_dir: Path, tmp_path: Path
) -> None:
    """Their digests are equal, the rules find the same at the same place, and not a character of them was stored."""
    fabric = Fabric(tmp_path, tokenizer)
    engine, shard = sim_engine()
    await fabric.ask(router_redis_url, (engine, shard), 20)
    counts = await fabric.reproduced(KvloomConfig(model=ModelConfig(path=str(model_dir), name=MODEL), shard=shard))
    assert min(counts.values()) > 0
    assert sum(counts.values()) >= 20
    fabric.check_that_nothing_is_kept()
    lines, decisions = fabric.decisions()
    records, keys = [line.record for line in lines], AuditKeys(fabric.audit_dir / KEYS)
    with pytest.raises(ValueError, match="another prompt"):
        wanted_of(proof_of(records, decisions[0].record, keys), "another", tokenizer)
    config = tmp_path / "kvloom.toml"
    config.write_text(
        f'[safety]\naudit_dir = "{fabric.audit_dir}"\npolicy_file = "{fabric.policy}"\n'
        '[shard]\nengine = "sim"\n[shard.sim]\nstep_ms = 1.0\nprefill_tokens_per_second = 1e6\n'
    )
    blocked = next(line for line in decisions if line.record.event == "blocked")
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(fabric.prompts[blocked.record.request_id])
    command = ["audit", "reproduce", blocked.hash[:12], "--prompt", str(prompt), "--model", str(model_dir)]
    result = await asyncio.to_thread(CliRunner().invoke, main, [*command, "--config", str(config)])
    assert result.exit_code == 0, result.output
    assert "judged again: the rule cut finds the same" in result.output
    assert erase_excerpts(fabric.audit_dir, "command", blocked.record.tenant) > 0
    with pytest.raises(CommandError, match="was erased"):
        proof_of(records, blocked.record, keys)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_two_hundred_answers_of_the_torch_engine(
    router_redis_url: str, tokenizer: ModelTokenizer, model_dir: Path, tmp_path: Path
) -> None:
    """Bit for bit, in batches and then one by one."""
    folder = write_shallow_model(model_dir, tmp_path / "shallow", num_layers=2)
    fabric, shard = Fabric(tmp_path, tokenizer), ShardConfig(num_blocks=512)
    await fabric.ask(router_redis_url, (TorchEngine(folder, MODEL, shard), shard), 500)
    counts = await fabric.reproduced(KvloomConfig(model=ModelConfig(path=str(folder), name=MODEL), shard=shard))
    assert sum(counts.values()) >= 200
    fabric.check_that_nothing_is_kept()


def test_a_request_with_a_stop_string_needs_it_again() -> None:
    """It is a text of the client, so it is not kept; everything else is."""
    wanted = requested([1, 2], SamplingParams(seed=7), StopConditions(stop=["secret"], max_tokens=3), 3, [0])
    plain = without_content(wanted)
    assert "secret" not in str(plain)
    proof = AnswerProof("m", "", "", digest(wanted), "", [0], plain)
    given = msgspec.json.encode({"prompt_token_ids": [1, 2], "stop": {"stop": ["secret"]}}).decode()
    no_tokenizer: Any = None
    assert wanted_of(proof, given, no_tokenizer) == wanted
    with pytest.raises(ValueError, match="stop strings"):
        wanted_of(proof, '{"prompt_token_ids": [1, 2]}', no_tokenizer)
