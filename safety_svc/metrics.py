"""The metrics of the safety service. They are updated per frame and per verdict, never per token."""

from __future__ import annotations

from typing import Final

from prometheus_client import REGISTRY

from kvloom_common.metrics.series import LabelValues
from kvloom_common.metrics.table import MetricTable

TABLE: Final = MetricTable("safety")
ANSWERS: Final = TABLE.counter("kvloom_safety_answers", "answers", "Answers whose screening has begun.").series(
    REGISTRY
)
BLOCKS: Final = TABLE.counter(
    "kvloom_safety_blocks", "texts", "Prompts rejected and answers halted, by rule.", "target", "rule"
).family(REGISTRY)
FLAGS: Final = TABLE.counter(
    "kvloom_safety_flags",
    "texts",
    "Prompts and answers in which a rule that blocks nothing has found something, by rule.",
    "target",
    "rule",
).family(REGISTRY)
POLICY_LOADS: Final = TABLE.counter(
    "kvloom_safety_policy_loads", "files", "Changed policy files that were read, by whether they were valid.", "result"
).family(REGISTRY)
PROMPTS: Final = TABLE.counter(
    "kvloom_safety_prompts", "prompts", "Prompts checked, except those that a router's prefilter cleared."
).series(REGISTRY)
STREAMS: Final = TABLE.gauge("kvloom_safety_streams", "streams", "Streams of connected routers now.").gauge(REGISTRY)

RULES: Final = LabelValues()
"""Policy files change while the service runs, and each may name other rules."""
