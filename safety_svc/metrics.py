"""The metrics of the safety service. They are updated per frame and per verdict, never per token."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge

BLOCKS: Final = Counter("kvloom_safety_blocks", "Prompts rejected and answers halted.", ("target", "rule"))
PROMPTS: Final = Counter("kvloom_safety_prompts", "Prompts checked, except those that a router's prefilter cleared.")
ANSWERS: Final = Counter("kvloom_safety_answers", "Answers whose screening has begun.")
STREAMS: Final = Gauge("kvloom_safety_streams", "Connected routers.")
POLICY_LOADS: Final = Counter("kvloom_safety_policy_loads", "Changed policy files that were read.", ("result",))
