"""The kinds of jobs that an orchestrator does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvloom_common.config import OrchestratorConfig
from kvloom_common.database.database import Database
from kvloom_common.trust.state_seal import StateSealer
from orchestrator.background.log import ResponseLogs
from orchestrator.background.run import MAX_RUNS, ResponseRun
from orchestrator.batches.batch import BatchWork
from orchestrator.files.sealed import TenantContents
from orchestrator.jobs.edges import Edges
from orchestrator.jobs.erasure import KIND as ERASURE
from orchestrator.jobs.erasure import MAX_ERASURES, ErasureWork
from orchestrator.jobs.runner import Clock, JobKind
from orchestrator.search.embedding import FabricEncoder
from orchestrator.search.indexing import MAX_INDEXED, FileIndexing
from orchestrator.store import vector_files
from orchestrator.webhooks.delivery import MAX_DELIVERIES, WebhookDelivery
from orchestrator.webhooks.outbox import JOB

if TYPE_CHECKING:
    from orchestrator.store.hot_items import HotItems

MAX_BATCHES: Final = 8
"""That one process works at."""


def job_kinds(
    settings: OrchestratorConfig,
    database: Database,
    contents: TenantContents,
    edges: Edges,
    logs: ResponseLogs,
    sealer: StateSealer,
    name: str,
    audit_dir: str = "",
    clock: Clock = time.time,
    hot_items: HotItems | None = None,
) -> Mapping[str, JobKind]:
    """`name`: this process's. `logs` get the events of the background responses at which it works. `sealer`: of the
    secrets of webhooks. `audit_dir`: the audit log on this machine, if there is one. `hot_items`: None where
    conversations are not copied."""

    def batch(job: Any) -> BatchWork:
        return BatchWork(database, contents, edges, job, settings.batch_concurrency, clock)

    def response(job: Any) -> ResponseRun:
        return ResponseRun(database, edges, logs, name, job, clock)

    def store_file(job: Any) -> FileIndexing:
        return FileIndexing(database, contents, FabricEncoder(edges), name, job)

    def webhook(job: Any) -> WebhookDelivery:
        return WebhookDelivery(database, sealer, settings.webhook_private_hosts, name, job, clock)

    def erasure(job: Any) -> ErasureWork:
        return ErasureWork(database, contents.delete, excerpts, job, clock, hot_items)

    def excerpts(tenant: str, user: str | None) -> int:
        if not (audit_dir and Path(audit_dir).is_dir()):
            return 0
        from kvloom_common.audit.log import erase_excerpts  # only here, since it needs cryptography

        return erase_excerpts(Path(audit_dir), name, tenant, user)

    return {
        "batch": JobKind(batch, MAX_BATCHES),
        "response": JobKind(response, MAX_RUNS),
        vector_files.JOB_KIND: JobKind(store_file, MAX_INDEXED),
        JOB: JobKind(webhook, MAX_DELIVERIES),
        ERASURE: JobKind(erasure, MAX_ERASURES),
    }
