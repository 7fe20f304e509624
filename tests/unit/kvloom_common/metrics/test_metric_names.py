"""The metrics of all processes together: each name means one thing, so that dashboards may add up a fleet."""

from __future__ import annotations

import re
import types
from typing import Any, Final, cast

import pytest
from prometheus_client import CollectorRegistry

from kvloom_common.discovery.records import MetricsTarget
from kvloom_common.limits.memory_watch import MemoryRecords
from kvloom_common.metrics.series import MAX_LABEL_VALUES, OTHER, LabelValues
from kvloom_common.metrics.table import HistogramRecord, MetricRecord
from kvloom_common.metrics.targets import http_sd
from kvloom_common.metrics.tenant_table import TenantTableRecords
from router.core.fleet.shard_health import HealthState
from router.metrics import RouterMetrics
from tests.conftest import REPOSITORY
from tests.metrics_page import MODULES, PAGE, TABLES, page_with_tables, shown_name

ALL: Final = [(table.role, record) for table in TABLES for record in table.records.values()]
_ATTRIBUTE: Final = re.compile(r"(?<=\.)[^\W\d]\w*")
MODEL_LABELS: Final = {"model", "model_name", "gen_ai_request_model"}


def test_a_name_belongs_to_one_role() -> None:
    """Two processes that count a request under one name count it twice in every sum."""
    roles: dict[str, set[str]] = {}
    for role, record in ALL:
        roles.setdefault(record.name, set()).add(role)
    assert {name: found for name, found in roles.items() if len(found) > 1} == {}
    assert len(roles) == len(ALL)


@pytest.mark.parametrize(("role", "record"), ALL, ids=lambda value: value if isinstance(value, str) else value.name)
def test_a_metric_follows_the_conventions(role: str, record: MetricRecord) -> None:
    """Names, labels and help texts are an interface: dashboards, alerts and people rely on their form."""
    prefixes = {"edge": ("kvloom_edge_", "gen_ai_"), "shard": ("kvloom_shard_", "vllm:")}
    assert record.name.startswith(prefixes.get(role, (f"kvloom_{role}_",)))
    model_label = "gen_ai_request_model" if record.name.startswith("gen_ai_") else "model"
    if record.name.startswith("vllm:"):
        model_label = "model_name"
    assert set(record.labels) & MODEL_LABELS <= {model_label}
    assert re.fullmatch(r"[A-Z].*[^.]\. Unit: [a-z0-9 ,]+\.", record.help), record.help
    unit = record.help.rpartition("Unit: ")[2].rstrip(".")
    for suffix, expected in (("_seconds", "seconds"), ("_bytes", "bytes"), ("_tokens", "tokens")):
        assert not record.name.endswith(suffix) or unit == expected


def test_histograms_of_one_unit_have_the_same_buckets() -> None:
    """Quantiles of different processes can be compared only if they are cut at the same values."""
    histograms = [record for _, record in ALL if isinstance(record, HistogramRecord)]
    seconds = {record.buckets for record in histograms if record.name.endswith("_seconds")}
    assert len(seconds) == 2, "one set of buckets for requests, and one for tokens"


def test_dashboards_and_autoscalers_find_vllms_names() -> None:
    """Tools that are made for vLLM read exactly these."""
    shard = {shown_name(record): record for role, record in ALL if role == "shard"}
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
    assert shard["vllm:cache_config_info"].labels == ("model_name", "block_size", "num_gpu_blocks")


def test_label_values_above_the_limit_share_a_series() -> None:
    """Every value costs memory here and in Prometheus, and some come from outside."""
    values = LabelValues(max_values=2)
    assert [values.fold(value) for value in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]


def router_of_many(count: int) -> CollectorRegistry:
    """A router that knows so many models, of a shard each."""
    registry = CollectorRegistry()
    models = [types.SimpleNamespace(name=f"model-{i}", num_ready_shards=1, brownout_step=0) for i in range(count)]
    shards = [
        types.SimpleNamespace(description=types.SimpleNamespace(shard_id=f"s-{i}"), health=HealthState.HEALTHY)
        for i in range(count)
    ]
    RouterMetrics(lambda: cast(Any, models), lambda: cast(Any, shards), registry).watch(dict)
    return registry


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
    assert not of_targets & {label for _, record in ALL for label in record.labels}


def test_the_page_lists_every_metric() -> None:
    """docs/reference/metrics.md shows what the processes export, in the words of their help texts."""
    page = PAGE.read_text()
    assert page == page_with_tables(page), "python -m tests.metrics_page writes what is new"


def test_every_record_is_made_into_a_metric() -> None:
    """A record that no process makes a metric of would be documented, and never be seen."""
    folders = ("edge_http", "router", "shard_server", "control", "tools/scaler", "tools/gateway")
    sources = [file.read_text() for folder in folders for file in (REPOSITORY / folder).rglob("*.py")]
    used = {name for source in sources for name in _ATTRIBUTE.findall(source)}
    records = {
        name
        for module in MODULES
        for name, value in vars(module).items()
        if isinstance(value, MetricRecord | TenantTableRecords | MemoryRecords)
    }
    assert records
    assert records <= used
