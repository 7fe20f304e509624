"""Notes in the audit log what answers follow from in which the safety policy has found something, so that they can be
computed again although nobody has kept them (`kvloom audit reproduce`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import structlog

from kvloom.adapters import Adapter
from kvloom_common.audit.log import AnswerProof, AuditLog, digest_of_output
from kvloom_common.receipts.receipt import digest, without_content
from router.caller_scope import shown_id
from router.core.actions import AnswerFlagged
from router.core.events import ShardDescription
from router.features.fingerprints import ModelFingerprint, fingerprint_of
from router.features.receipts.writer import UNKNOWN, requested

log = structlog.get_logger()


class AnswerProofs:
    """The proofs of one router, in a file of its own, which is made for the first one."""

    def __init__(self, directory: Path, shards: Callable[[], Iterable[ShardDescription]]) -> None:
        self._directory = directory
        self._shards = shards
        self._audit_log: AuditLog | None = None

    def note(self, flagged: AnswerFlagged) -> None:
        request = flagged.request
        try:
            if self._audit_log is None:
                self._audit_log = AuditLog(self._directory, "router")
            self._audit_log.append(
                "computed",
                msgspec.json.encode(self._proof(flagged)).decode(),
                target="answer",
                tenant=request.tenant,
                safety_identifier=request.safety_identifier,
                request_id=shown_id(request.request_id, request.tenant),
            )
        except OSError as error:
            log.warning("audit_write_failed", error=error.strerror, rule="")

    def close(self) -> None:
        if self._audit_log is not None:
            self._audit_log.close()

    def _proof(self, flagged: AnswerFlagged) -> AnswerProof:
        request, adapter = flagged.request, flagged.request.adapter or Adapter("", "")
        of_model = self._fingerprint(flagged)
        wanted = requested(request, of_model, [index for index, _ in flagged.output])
        return AnswerProof(
            model=request.model,
            weights_checksum=of_model.checksum,
            engine_variant=of_model.variant,
            request_digest=digest(wanted),
            output_digest=digest_of_output(flagged.output),
            request=without_content(wanted),
            num_output_tokens=[len(token_ids) for _, token_ids in flagged.output],
            adapter=adapter.name,
            adapter_checksum=adapter.checksum,
        )

    def _fingerprint(self, flagged: AnswerFlagged) -> ModelFingerprint:
        """That of the shard that has computed the whole answer."""
        if flagged.is_exact:
            for shard in self._shards():
                if shard.shard_id == flagged.shard_id:
                    return fingerprint_of(shard)
        return UNKNOWN
