"""Says what each release of TensorRT-LLM has and how it behaves, as plain data.

known_names.py lists the names of all releases together; a `Release` says which of them it lacks, and how it behaves
where that cannot be seen in the library. The adapter first asks the installed library itself (`TensorRtLlm.knows`) and
this table only for the rest. A release that is newer than all of these is thus treated by what it has, and otherwise
like the newest one here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Final

from shard_server.engines.base import Capability
from shard_server.engines.tensorrt_llm.known_names import ARGUMENTS


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """One release, or the newest state of a line of releases."""

    version: tuple[int, int]
    """Major and minor number."""
    name: str
    lacks: Mapping[str, frozenset[str]]
    """By class or function, as in known_names.ARGUMENTS: the arguments that it lacks."""
    ignores: Mapping[str, frozenset[str]]
    """The arguments, by class, that it accepts without using them, because they are deprecated or were meant for the
    library itself."""
    transceivers: frozenset[str]
    """The backends of CacheTransceiverConfig."""
    overlapped_speculation: frozenset[str]
    """The decoding types that work with the overlap scheduler, as in TensorRtSettings.decoding_type."""
    logprobs_beside: frozenset[str]
    """The decoding types whose sampler gives log-probabilities. With others 1.2.1 fails all running requests, and newer
    versions give none."""
    hands_over_serially: bool
    """True when a prompt that is computed for another engine ends this one while the overlap scheduler is on."""
    sampler: frozenset[Capability]
    """The parameters that the default sampler applies; it ignores the rest without a word."""

    def arguments(self, name: str) -> frozenset[str]:
        """Those of a class or function in known_names that it has, used or not."""
        return ARGUMENTS[name] - self.lacks.get(name, frozenset())

    def used_arguments(self, name: str) -> frozenset[str]:
        """Raises KeyError for a name that is not in known_names."""
        return self.arguments(name) - self.ignores.get(name, frozenset())


RELEASE_1_2: Final = Release(
    version=(1, 2),
    name="1.2.1",
    lacks={
        "LLM": frozenset({"telemetry_config"}),
        "LLM.generate_async": frozenset({"conversation_params", "priority"}),
        "KvCacheConfig": frozenset({"disk_cache_size", "disk_cache_path", "kv_events_config"}),
        "KvCacheConnectorConfig": frozenset({"connector", "server_url"}),
        "SchedulerConfig": frozenset({"waiting_queue_policy"}),
        "DisaggregatedParams": frozenset(
            {"disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint", "schedule_style", "first_gen_log_probs"}
        ),
    },
    ignores={},
    transceivers=frozenset({"DEFAULT", "UCX", "NIXL", "MPI"}),
    overlapped_speculation=frozenset({"EAGLE", "EAGLE3", "MTP"}),
    logprobs_beside=frozenset({"NGRAM", "DRAFTTARGET"}),
    hands_over_serially=True,
    sampler=frozenset({Capability.MIN_P, Capability.LOGIT_BIAS}),
)

NEWEST: Final = Release(
    version=(1, 3),
    name="1.4.0rc4",
    lacks={"LLM": frozenset({"sampler_type"})},
    ignores={
        # Sampling is recognised by the request.
        "NGramDecodingConfig": frozenset({"allow_advanced_sampling"}),
        "EagleDecodingConfig": frozenset({"allow_advanced_sampling"}),
        "Eagle3DecodingConfig": frozenset({"allow_advanced_sampling"}),
        "DraftTargetDecodingConfig": frozenset({"allow_advanced_sampling"}),
        # The number of layers is read from the model, and max_draft_len is the number of draft tokens.
        "MTPDecodingConfig": frozenset({"allow_advanced_sampling", "num_nextn_predict_layers"}),
    },
    transceivers=frozenset({"DEFAULT", "UCX", "NIXL", "MPI", "MOONCAKE"}),
    # All of these are one model there.
    overlapped_speculation=frozenset({"EAGLE", "EAGLE3", "MTP", "DRAFTTARGET", "PARD", "SA", "DFLASH"}),
    logprobs_beside=frozenset({"NGRAM"}),
    hands_over_serially=False,
    sampler=frozenset({Capability.MIN_P, Capability.LOGIT_BIAS, Capability.PENALTIES, Capability.REPETITION_PENALTY}),
)
"""The newest line known here: the release candidates of 1.3.0 and 1.4.0."""

RELEASES: Final = (RELEASE_1_2, NEWEST)
"""Oldest first."""


def release_of(version: str) -> Release:
    """The newest release here that is not newer than `version`; for older and unreadable versions the oldest one."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return RELEASES[0]
    wanted = (int(match[1]), int(match[2]))
    return next((release for release in reversed(RELEASES) if release.version <= wanted), RELEASES[0])
