"""The metrics of the safety service. They are updated per frame and per verdict, never per token."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge

from kvloom_common.metrics.label_values import LabelValues

BLOCKS: Final = Counter(
    "kvloom_safety_blocks", "Prompts rejected and answers halted, by rule. Unit: texts.", ("target", "rule")
)
PROMPTS: Final = Counter(
    "kvloom_safety_prompts", "Prompts checked, except those that a router's prefilter cleared. Unit: prompts."
)
ANSWERS: Final = Counter("kvloom_safety_answers", "Answers whose screening has begun. Unit: answers.")
STREAMS: Final = Gauge("kvloom_safety_streams", "Streams of connected routers now. Unit: streams.")
POLICY_LOADS: Final = Counter(
    "kvloom_safety_policy_loads",
    "Changed policy files that were read, by whether they were valid. Unit: files.",
    ("result",),
)

RULES: Final = LabelValues()
"""Policy files change while the service runs, and each may name other rules."""
