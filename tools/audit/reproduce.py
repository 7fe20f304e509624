"""`kvloom audit reproduce`: an answer that nobody has kept is computed again from its prompt, and judged again."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import structlog

from kvloom.errors import KvloomError
from kvloom_common.audit.keys import AuditKeys
from kvloom_common.audit.log import KEYS, AnswerProof, AuditRecord, digest_of_output
from kvloom_common.config import KvloomConfig
from kvloom_common.receipts.receipt import RequestedGeneration, digest, sampling_of
from kvloom_common.text.detokenizer import IncrementalDetokenizer
from kvloom_common.text.model_checksum import ChecksumError, model_checksum
from kvloom_common.text.tokenizer import ModelTokenizer
from safety_svc.policy import PolicyError, SafetyPolicy
from safety_svc.policy_file import PolicyFile
from safety_svc.screen import AnswerScreener
from shard_server.engines.base import EngineError
from tools.audit.command import audit_directory_in, audit_lines, decision_of
from tools.failures import CommandError
from tools.models.registry import ModelRegistry
from tools.models.resolve import resolve_model
from tools.options import choose_data_dir, config_option, data_dir_option, load_config_file, option
from tools.receipts.rerun import Rerunner, rerunner


@click.command()
@click.argument("record_hash")
@option(
    "--prompt", scope="audit", required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A file with the prompt as the model read it, or with JSON that has its prompt_token_ids.",
)  # fmt: skip
@option("--model", scope="audit", required=True, metavar="NAME|PATH", help="The model.")
@data_dir_option
@config_option
def reproduce(record_hash: str, prompt: Path, model: str, data_dir: Path | None, config_file: Path | None) -> None:
    """Compute the answer again about which a decision was made, and judge it again. RECORD_HASH is the beginning of the
    decision's hash, at least 8 characters. Exits with 1 if anything is not as it was."""
    config = load_config_file(config_file)
    home = choose_data_dir(data_dir, config)
    directory = audit_directory_in(config)
    lines = list(audit_lines(directory))
    decision = decision_of(lines, record_hash).record
    proof = proof_of([line.record for line in lines], decision, AuditKeys(directory / KEYS))
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what the engine logs
    resolved = resolve_model(model, home / "models", click.echo, ModelRegistry(home / "models.json"))
    config.model.path, config.model.name = str(resolved.path), resolved.name
    try:
        policy = PolicyFile(config.safety.policy_file).current
        tokenizer = ModelTokenizer.load(resolved.path)
        wanted = wanted_of(proof, prompt.read_text("utf-8"), tokenizer)
        texts = asyncio.run(_computed_here(config, proof, wanted, tokenizer))
    except (EngineError, ChecksumError, PolicyError, KvloomError, OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    num_tokens = sum(proof.num_output_tokens)
    print(f"computed again: the {num_tokens} tokens that the client has are the same")
    if policy.revision != decision.policy:
        print(f"not judged again: the policy here is {policy.revision}, that of the decision {decision.policy}")
    elif not is_found(policy, decision, texts):
        raise CommandError(f"the rule {decision.rule} does not find in it what it has found")
    else:
        print(f"judged again: the rule {decision.rule} finds the same")


def proof_of(records: Sequence[AuditRecord], decision: AuditRecord, keys: AuditKeys) -> AnswerProof:
    """Raises CommandError."""
    name = "computed", decision.tenant, decision.request_id
    for record in records:
        if (record.event, record.tenant, record.request_id) == name:
            opened = keys.open(record.excerpt, record.tenant, record.day, record.safety_identifier)
            if opened is None:
                raise CommandError("The proof of this answer was erased.")
            return msgspec.json.decode(opened, type=AnswerProof)
    raise CommandError("There is no proof of this answer: only answers that were gated have one, at their end.")


def wanted_of(proof: AnswerProof, given: str, tokenizer: ModelTokenizer) -> RequestedGeneration:
    """The request, of which the log lacks what is given. Raises ValueError if it is another one."""
    content: dict[str, Any] = {}
    if given.lstrip().startswith("{"):
        content = json.loads(given)
    if "prompt_token_ids" not in content:
        content = {"prompt_token_ids": list(tokenizer.encode_now(given))}
    fields: dict[str, Any] = {**proof.request, "prompt_token_ids": content["prompt_token_ids"]}
    for parameters in ("sampling", "stop"):
        fields[parameters] = {**fields[parameters], **content.get(parameters, {})}
    wanted = msgspec.convert(fields, RequestedGeneration)
    if digest(wanted) != proof.request_digest:
        raise ValueError("this is another prompt, or the request had stop strings or a guide that are not given")
    return wanted


async def _computed_here(
    config: KvloomConfig, proof: AnswerProof, wanted: RequestedGeneration, tokenizer: ModelTokenizer
) -> list[str]:
    if proof.weights_checksum:
        checksum = await asyncio.to_thread(model_checksum, Path(config.model.path))
        if checksum != proof.weights_checksum:
            raise ValueError(
                f"the model here has the checksum {checksum[:16]}..., not {proof.weights_checksum[:16]}..."
            )
    async with rerunner(config, {}) as engine:
        return await computed(engine, proof, wanted, tokenizer)


async def computed(
    engine: Rerunner, proof: AnswerProof, wanted: RequestedGeneration, tokenizer: ModelTokenizer
) -> list[str]:
    """The texts of the choices. Raises ValueError if they are not those of which the client has the beginning,
    KvloomError if the engine refuses or fails the request."""
    if proof.engine_variant != engine.variant:
        by = proof.engine_variant or "several shards, or by an engine that promises no bits"
        raise ValueError(f"it was computed by {by}; this machine computes with {engine.variant}")
    output = await engine.output(wanted, proof.adapter)
    counts = dict(zip(wanted.indexes, proof.num_output_tokens, strict=True))
    beginnings = [(one.index, one.token_ids[: counts[one.index]]) for one in output]
    if digest_of_output(beginnings) != proof.output_digest:
        raise ValueError("computed again, it is another answer")
    shown = sampling_of(wanted).shown_special_token_ids
    return [_text(IncrementalDetokenizer(tokenizer, shown_special_token_ids=shown), one.token_ids) for one in output]


def _text(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> str:
    return detokenizer.push(token_ids) + detokenizer.flush()


def is_found(policy: SafetyPolicy, decision: AuditRecord, texts: Sequence[str]) -> bool:
    """True when the rule finds in one of the texts what it had found."""
    scope = policy.scopes.of(decision.tenant, [decision.rule])
    for text in texts:
        screener = AnswerScreener(policy.answer, policy.watched_answer, scope)
        screener.push(text)
        if screener.hit is None:
            screener.close()
        hit = screener.hit
        if decision.event == "flagged" and decision.rule in screener.flagged:
            return True
        if hit is not None and (hit.rule.name, hit.start) == (decision.rule, decision.position):
            return True
    return False
