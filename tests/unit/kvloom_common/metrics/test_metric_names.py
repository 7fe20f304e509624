"""The metrics of all processes together: each name means one thing, so that dashboards may add up a fleet."""

from __future__ import annotations

import re
from typing import Final

import pytest
from prometheus_client import CollectorRegistry

from kvloom_common.discovery.records import MetricsTarget
from kvloom_common.metrics.label_values import MAX_LABEL_VALUES, OTHER, LabelValues
from kvloom_common.metrics.targets import http_sd
from tests.conftest import REPOSITORY
from tests.fakes.metric_families import Family, all_families, router_of_many, table_of

ALL: Final = [(role, family) for role, found in all_families().items() for family in found]
MODEL_LABELS: Final = {"model", "model_name", "gen_ai_request_model"}
PAGE: Final = REPOSITORY / "docs" / "metrics.md"


def test_a_name_belongs_to_one_role() -> None:
    """Two processes that count a request under one name count it twice in every sum."""
    roles: dict[str, set[str]] = {}
    for role, family in ALL:
        roles.setdefault(family.name, set()).add(role)
    assert {name: found for name, found in roles.items() if len(found) > 1} == {}
    assert len(roles) == len(ALL)


@pytest.mark.parametrize(("role", "family"), ALL, ids=lambda value: value if isinstance(value, str) else value.name)
def test_a_metric_follows_the_conventions(role: str, family: Family) -> None:
    """Names, labels and help texts are an interface: dashboards, alerts and people rely on their form."""
    prefixes = {"edge": ("kvloom_edge_", "gen_ai_"), "shard": ("kvloom_shard_", "vllm:")}
    assert family.name.startswith(prefixes.get(role, (f"kvloom_{role}_",)))
    model_label = "gen_ai_request_model" if family.name.startswith("gen_ai_") else "model"
    if family.name.startswith("vllm:"):
        model_label = "model_name"
    assert set(family.labels) & MODEL_LABELS <= {model_label}
    assert re.fullmatch(r"[A-Z].*[^.]\. Unit: [a-z0-9 ,]+\.", family.about), family.about
    unit = family.about.rpartition("Unit: ")[2].rstrip(".")
    for suffix, expected in (("_seconds", "seconds"), ("_bytes", "bytes"), ("_tokens", "tokens")):
        assert not family.name.endswith(suffix) or unit == expected


def test_histograms_of_one_unit_have_the_same_buckets() -> None:
    """Quantiles of different processes can be compared only if they are cut at the same values."""
    seconds = {family.bounds for _, family in ALL if family.name.endswith("_seconds") and family.bounds}
    assert len(seconds) == 2, "one set of buckets for requests, and one for tokens"


def test_dashboards_and_autoscalers_find_vllms_names() -> None:
    """Tools that are made for vLLM read exactly these."""
    shard = {family.sample_name: family for role, family in ALL if role == "shard"}
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
    ):
        assert shard[name].labels == ("model_name",)
    assert shard["vllm:cache_config_info"].labels == ("block_size", "model_name", "num_gpu_blocks")


def test_label_values_above_the_limit_share_a_series() -> None:
    """Every value costs memory here and in Prometheus, and some come from outside."""
    values = LabelValues(max_values=2)
    assert [values.fold(value) for value in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]


def test_a_large_fleet_makes_a_bounded_number_of_series() -> None:
    """Models and shards come from the registry, so their number has no limit of its own."""
    num_shards = 3 * MAX_LABEL_VALUES
    registry: CollectorRegistry = router_of_many(num_shards)
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    for name, label in (("kvloom_router_shard_health", "shard_id"), ("kvloom_router_shards_ready", "model")):
        of_name = [sample for sample in samples if sample.name == name]
        assert len({sample.labels[label] for sample in of_name}) == MAX_LABEL_VALUES + 1
        assert sum(sample.value for sample in of_name) == num_shards


def test_labels_of_targets_do_not_hide_labels_of_metrics() -> None:
    """Prometheus renames a metric's label that its target has too, and queries no longer match."""
    [group] = http_sd([MetricsTarget("127.0.0.1:1", "shard", "shard-0", "tiny")])
    of_targets = {label for label in group["labels"] if not label.startswith("__")}
    assert not of_targets & {label for _, family in ALL for label in family.labels}


@pytest.mark.parametrize("role", list(all_families()))
def test_the_page_lists_every_metric(role: str) -> None:
    """docs/metrics.md shows what the processes export, in the words of their help texts."""
    table = table_of(all_families()[role])
    assert table in PAGE.read_text(), f"docs/metrics.md should have:\n\n{table}"
