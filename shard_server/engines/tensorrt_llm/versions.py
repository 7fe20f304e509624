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
from typing import Final, Literal

from shard_server.engines.tensorrt_llm.known_names import ARGUMENTS, OBJECTS, SYMBOLS


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
    lacks_attributes: Mapping[str, frozenset[str]]
    """By object, as in known_names.OBJECTS."""
    lacks_symbols: frozenset[str]
    """Without the module's name."""
    defaults: Mapping[str, Mapping[str, object]]
    """By class: the defaults that differ between releases."""
    tells_salts: bool
    """True when KV events name the salts of blocks."""
    block_identities: Literal["integers", "hexadecimal"]
    """The form in which KV events name a block. Hexadecimal identities repeat for each group of layers."""
    stats_per_rank: bool
    """True when each rank of attention data parallelism gives a row of statistics; otherwise only the first does."""
    context_only_finish: Literal["not_finished", "length"]
    """How a request ends that another engine continues."""
    transceivers: frozenset[str]
    """The backends of CacheTransceiverConfig."""
    overlapped_speculation: frozenset[str]
    """The methods of speculation that work with the overlap scheduler; the library turns it off for others."""
    has_error_budget: bool
    """True when the library's health check fails once too many requests have failed."""

    def arguments(self, name: str) -> frozenset[str]:
        """Those of a class or function in known_names that it has, used or not."""
        return ARGUMENTS[name] - self.lacks.get(name, frozenset())

    def used_arguments(self, name: str) -> frozenset[str]:
        """Raises KeyError for a name that is not in known_names."""
        return self.arguments(name) - self.ignores.get(name, frozenset())

    def attributes(self, name: str) -> frozenset[str]:
        return OBJECTS[name] - self.lacks_attributes.get(name, frozenset())

    def has_symbol(self, path: str) -> bool:
        """True when it has e.g. "llmapi.KvCacheConfig"."""
        return f"tensorrt_llm.{path}" in SYMBOLS and path not in self.lacks_symbols


RELEASE_1_2: Final = Release(
    version=(1, 2),
    name="1.2.1",
    lacks={
        "LLM.generate_async": frozenset({"conversation_params", "priority"}),
        "KvCacheConfig": frozenset({"disk_cache_size", "kv_events_config"}),
        "KvCacheConnectorConfig": frozenset({"connector"}),
        "SchedulerConfig": frozenset({"waiting_queue_policy"}),
        "EagleDecodingConfig": frozenset({"speculative_model"}),
        "DraftTargetDecodingConfig": frozenset({"speculative_model"}),
        "SamplingParams": frozenset({"prompt_ignore_length"}),
        "DisaggregatedParams": frozenset(
            {"disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint", "schedule_style", "first_gen_log_probs"}
        ),
    },
    ignores={},
    lacks_attributes={
        "LLM": frozenset({"get_kv_cache_capacity"}),
        "RequestOutput": frozenset({"error"}),
    },
    lacks_symbols=frozenset({"llmapi.Eagle3DecodingConfig"}),
    defaults={"NGramDecodingConfig": {"max_matching_ngram_size": 2}},
    tells_salts=False,
    block_identities="integers",
    stats_per_rank=False,
    context_only_finish="not_finished",
    transceivers=frozenset({"DEFAULT", "UCX", "NIXL", "MPI"}),
    overlapped_speculation=frozenset({"eagle3", "mtp"}),
    has_error_budget=False,
)

NEWEST: Final = Release(
    version=(1, 3),
    name="1.3.0",
    lacks={
        "EagleDecodingConfig": frozenset({"speculative_model_dir"}),
        "Eagle3DecodingConfig": frozenset({"speculative_model_dir"}),
        "DraftTargetDecodingConfig": frozenset({"speculative_model_dir"}),
    },
    ignores={
        # Sampling is recognised by the request.
        "NGramDecodingConfig": frozenset({"allow_advanced_sampling"}),
        "EagleDecodingConfig": frozenset({"allow_advanced_sampling"}),
        "Eagle3DecodingConfig": frozenset({"allow_advanced_sampling"}),
        "DraftTargetDecodingConfig": frozenset({"allow_advanced_sampling"}),
        # The number of layers is read from the model, and max_draft_len is the number of draft tokens.
        "MTPDecodingConfig": frozenset({"allow_advanced_sampling", "num_nextn_predict_layers"}),
    },
    lacks_attributes={},
    lacks_symbols=frozenset(),
    defaults={"NGramDecodingConfig": {"max_matching_ngram_size": 0}},
    tells_salts=True,
    block_identities="hexadecimal",
    stats_per_rank=True,
    context_only_finish="length",
    transceivers=frozenset({"DEFAULT", "UCX", "NIXL", "MPI", "MOONCAKE"}),
    # draft_target is one model there, as eagle3 and mtp are.
    overlapped_speculation=frozenset({"eagle3", "mtp", "draft_target"}),
    has_error_budget=True,
)
"""The newest release known here, from the release candidates 1.3.0rc2x and 1.4.0rc1."""

RELEASES: Final = (RELEASE_1_2, NEWEST)
"""Oldest first."""


def release_of(version: str) -> Release:
    """The newest release here that is not newer than `version`; for older and unreadable versions the oldest one."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return RELEASES[0]
    wanted = (int(match[1]), int(match[2]))
    return next((release for release in reversed(RELEASES) if release.version <= wanted), RELEASES[0])
