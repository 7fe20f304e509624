"""The metrics of the orchestrator."""

from __future__ import annotations

from typing import Final

from prometheus_client import REGISTRY

from kvloom_common.metrics.table import MetricTable

TABLE: Final = MetricTable("orchestrator")
CALLS: Final = TABLE.counter(
    "kvloom_orchestrator_calls",
    "calls",
    "Calls of edges, by operation and the error's reason, which is empty for a success.",
    "operation",
    "reason",
).family(REGISTRY)
BATCH_LINES: Final = TABLE.counter(
    "kvloom_orchestrator_batch_lines", "lines", "Lines of batches that have ended, by how they have.", "state"
).family(REGISTRY)
BACKGROUND_ENDED: Final = TABLE.counter(
    "kvloom_orchestrator_background_responses", "responses", "Background responses that have ended, by how.", "status"
).family(REGISTRY)
INDEXED_FILES: Final = TABLE.counter(
    "kvloom_orchestrator_indexed_files", "files", "Files of vector stores that were indexed, by how it ended.", "status"
).family(REGISTRY)
HOT_READS: Final = TABLE.counter(
    "kvloom_orchestrator_hot_reads",
    "reads",
    "Reads of conversations that found copies in Redis (copy), or none; and Redis, when it was away.",
    "outcome",
).family(REGISTRY)
RERANKED: Final = TABLE.counter(
    "kvloom_orchestrator_reranked_searches",
    "searches",
    "Searches whose passages a model was asked to rank again: done, late or failed.",
    "outcome",
).family(REGISTRY)
WEBHOOKS: Final = TABLE.counter(
    "kvloom_orchestrator_webhooks",
    "tries",
    "Webhooks that were sent, failed and are tried again, or were given up, by outcome.",
    "outcome",
).family(REGISTRY)
EXPIRED: Final = TABLE.counter(
    "kvloom_orchestrator_expired", "objects", "Objects that were deleted because they had expired."
).series(REGISTRY)
