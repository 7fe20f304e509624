"""The kinds of jobs that an orchestrator does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from kvloom_common.config import OrchestratorConfig
from kvloom_common.database.database import Database
from kvloom_common.trust.state_seal import StateSealer
from orchestrator.background.log import ResponseLogs
from orchestrator.background.run import MAX_RUNS, ResponseRun
from orchestrator.batches.batch import BatchWork
from orchestrator.files.sealed import TenantContents
from orchestrator.jobs.edges import Edges
from orchestrator.jobs.runner import Clock, JobKind
from orchestrator.search.embedding import FabricEncoder
from orchestrator.search.indexing import MAX_INDEXED, FileIndexing
from orchestrator.store import vector_files
from orchestrator.webhooks.delivery import MAX_DELIVERIES, WebhookDelivery
from orchestrator.webhooks.outbox import JOB

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
    clock: Clock = time.time,
) -> Mapping[str, JobKind]:
    """`name`: this process's. `logs` get the events of the background responses at which it works. `sealer`: of the
    secrets of webhooks."""

    def batch(job: Any) -> BatchWork:
        return BatchWork(database, contents, edges, job, settings.batch_concurrency, clock)

    def response(job: Any) -> ResponseRun:
        return ResponseRun(database, edges, logs, name, job, clock)

    def store_file(job: Any) -> FileIndexing:
        return FileIndexing(database, contents, FabricEncoder(edges), name, job)

    def webhook(job: Any) -> WebhookDelivery:
        return WebhookDelivery(database, sealer, settings.webhook_private_hosts, name, job, clock)

    return {
        "batch": JobKind(batch, MAX_BATCHES),
        "response": JobKind(response, MAX_RUNS),
        vector_files.JOB_KIND: JobKind(store_file, MAX_INDEXED),
        JOB: JobKind(webhook, MAX_DELIVERIES),
    }
