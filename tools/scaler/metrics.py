"""The metrics of `kvloom scaler`."""

from __future__ import annotations

from typing import Final

from kvloom_common.metrics.table import MetricTable

TABLE: Final = MetricTable("scaler")
QUEUED_SECONDS: Final = TABLE.gauge(
    "kvloom_scaler_queued_seconds", "seconds", "How long the shards need for the prompts that wait.", "model"
)
QUESTIONS: Final = TABLE.counter("kvloom_scaler_questions", "calls", "Calls of KEDA that were answered.", "method")
READING_AGE: Final = TABLE.gauge(
    "kvloom_scaler_reading_age_seconds", "seconds", "How long ago routers last answered, or this process started."
)
SHARDS_NEEDED: Final = TABLE.gauge(
    "kvloom_scaler_shards_needed",
    "shards",
    "What each measure of the load asks for by itself (docs/operate/autoscaling.md).",
    "model",
    "term",
)
SHARDS_READY: Final = TABLE.gauge("kvloom_scaler_shards_ready", "shards", "Shards that take requests now.", "model")
SHARDS_RECOMMENDED: Final = TABLE.gauge(
    "kvloom_scaler_shards_recommended", "shards", "How many shards the model should have.", "model"
)
