"""The targets of fuzzing; CONTRIBUTING.md tells how to add one."""

from __future__ import annotations

from typing import Final

from tests.fuzz.target import Target
from tests.fuzz.targets import (
    chat_templates,
    http_bodies,
    http_requests,
    journal_entries,
    local_framing,
    registry_records,
    router_stream,
    safety_stream,
    shard_stream,
    text_files,
    weight_files,
)

TARGETS: Final[dict[str, Target]] = {
    module.TARGET.name: module.TARGET
    for module in (
        router_stream,
        shard_stream,
        safety_stream,
        local_framing,
        http_requests,
        http_bodies,
        registry_records,
        journal_entries,
        text_files,
        weight_files,
        chat_templates,
    )
}
