"""Writes the Grafana dashboards beside it from the tables below: `python deploy/observe/dashboards.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent / "dashboards"
PANELS_A_ROW: Final = 3
WIDTH, HEIGHT = 24 // PANELS_A_ROW, 8

Panel = tuple[str, str, dict[str, str]]
"""(title, Grafana's unit, queries by their legends)."""


def quantiles(metric: str, by: str = "") -> dict[str, str]:
    labels = f"le, {by}" if by else "le"
    legend = f"{{{{{by}}}}} " if by else ""
    return {
        f"{legend}p{100 * share:g}": f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket[5m])))"
        for share in (0.5, 0.99)
    }


def rate(metric: str, by: str = "", where: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{where}[5m]))"


IN_TIME: Final = '{le="2.5"}'
ERRORS: Final = '{outcome="error"}'
DASHBOARDS: Final[dict[str, tuple[str, list[Panel]]]] = {
    "fleet": (
        "kvloom: fleet",
        [
            ("Shards ready", "short", {"{{model}}": "max by (model) (kvloom_router_shards_ready)"}),
            ("Requests live and queued", "short", {
                "live": "sum(kvloom_router_requests_live)", "queued": "sum(kvloom_router_requests_queued)"}),
            ("Output tokens", "short", {"{{process}}": rate("vllm:generation_tokens_total", "process")}),
            ("KV in use", "percentunit", {"{{process}}": "vllm:kv_cache_usage_perc"}),
            ("Sequences running", "short", {"{{process}}": "vllm:num_requests_running"}),
            ("Sequences waiting", "short", {"{{process}}": "vllm:num_requests_waiting"}),
            ("Prompt tokens found in a cache", "percentunit", {
                "share": f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}"}),
            ("Time to first token", "s", quantiles("kvloom_router_time_to_first_token_seconds")),
            ("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
            ("Time in the router's queue", "s", quantiles("kvloom_router_queue_time_seconds", "model")),
            ("Prefill", "s", quantiles("kvloom_router_prefill_seconds", "model")),
            ("Regret of placements", "s", quantiles("kvloom_router_placement_regret_seconds")),
            ("Prediction errors of placements", "s", quantiles("kvloom_router_prediction_error_seconds", "term")),
            ("Moved, preempted, failed over", "short", {
                "{{disruption}}": rate("kvloom_router_requests_disrupted_total", "disruption")}),
            ("Suspected shards", "short", {
                "{{shard_id}}": 'sum by (shard_id) (kvloom_router_shard_health{state="suspected"})'}),
            ("Brownout", "short", {"{{model}}": "max by (model) (kvloom_router_brownout_step)"}),
            ("Tokens computed in vain", "short", {"{{process}}": rate("kvloom_shard_wasted_tokens_total", "process")}),
        ],
    ),
    "tenants": (
        "kvloom: tenants",
        [
            ("Spend of this month", "none", {
                "{{tenant}}": "topk(20, max by (tenant) (kvloom_control_usage_cost))"}),
            ("What limits did", "short", {
                "{{kind}} {{outcome}}": rate("kvloom_router_limit_decisions_total", "kind, outcome")}),
            ("Accounts with limits in use", "short", {"{{process}}": "kvloom_router_limit_accounts"}),
            ("Usage records", "short", {"made": rate("kvloom_router_usage_records_total"),
                                        "stored": rate("kvloom_control_usage_records_stored_total")}),
            ("Records that wait", "short", {"routers": "sum(kvloom_router_usage_records_unstored)",
                                            "control": "sum(kvloom_control_usage_entries_waiting)"}),
            ("Records lost", "short", {"{{process}}": rate("kvloom_router_usage_records_dropped_total", "process")}),
            ("Notices about budgets", "short", {"{{outcome}}": rate("kvloom_control_budget_alerts_total", "outcome")}),
            ("Age of the table of tenants", "s", {
                "{{process}}": "max by (process) ({__name__=~\"kvloom_(edge|router)_tenant_table_age_seconds\"})"}),
            ("Keys", "short", {"keys": "max(kvloom_router_tenant_table_keys)"}),
            ("Calls of administrators", "short", {
                "{{method}} {{reason}}": rate("kvloom_control_calls_total", "method, reason")}),
        ],
    ),
    "safety": (
        "kvloom: safety",
        [
            ("Safety service connected", "short", {"{{process}}": "kvloom_router_safety_connected"}),
            ("Blocks", "short", {"all": rate("kvloom_safety_blocks_total")}),
            ("Flags", "short", {"all": rate("kvloom_safety_flags_total")}),
            ("Prompts screened", "short", {"all": rate("kvloom_safety_prompts_total")}),
            ("Answers screened", "short", {"all": rate("kvloom_safety_answers_total")}),
            ("Answers stopped", "short", {
                "{{model}}": rate("kvloom_router_requests_total", "model", '{outcome="content_filter"}')}),
        ],
    ),
    "slo": (
        "kvloom: SLO",
        [
            ("Requests that fail", "percentunit", {
                "share": f"{rate('kvloom_router_requests_total', '', ERRORS)} / "
                         f"{rate('kvloom_router_requests_total')}"}),
            ("Failures by cause", "short", {
                "{{error_type}}": rate("kvloom_router_requests_total", "error_type", ERRORS)}),
            ("First tokens within 2.5 s", "percentunit", {
                "share": f"{rate('kvloom_router_time_to_first_token_seconds_bucket', '', IN_TIME)} / "
                         f"{rate('kvloom_router_time_to_first_token_seconds_count')}"}),
            ("First tokens by class", "s", quantiles("kvloom_router_time_to_first_token_seconds", "priority_class")),
            ("Time between tokens by model", "s", quantiles("kvloom_router_time_per_output_token_seconds", "model")),
            ("Whole requests", "s", quantiles("kvloom_router_request_duration_seconds", "model")),
            ("Objectives", "short", {"{{kind}} {{outcome}}": rate("kvloom_router_objectives_total", "kind, outcome")}),
            ("Refused as impossible", "short", {
                "{{cause}}": rate("kvloom_router_objectives_impossible_total", "cause")}),
            ("HTTP refusals", "short", {
                "{{status}}": rate("kvloom_edge_requests_total", "status", '{status=~"4..|5.."}')}),
        ],
    ),
}  # fmt: skip


def dashboard(name: str) -> dict[str, Any]:
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"kvloom-{name}",
        "title": title,
        "tags": ["kvloom"],
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]},
        "panels": [_panel(number, *panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    row, column = divmod(number, PANELS_A_ROW)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": WIDTH * column, "y": HEIGHT * row, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expr, "legendFormat": legend}
            for place, (legend, expr) in enumerate(queries.items())
        ],
    }


def text_of(name: str) -> str:
    """One line a panel, so that a change is a line in a diff."""
    made = dashboard(name)
    panels = ",\n".join(json.dumps(panel) for panel in made.pop("panels"))
    return f'{json.dumps(made)[:-1]}, "panels": [\n{panels}\n]}}\n'


if __name__ == "__main__":
    for each in DASHBOARDS:
        (FOLDER / f"{each}.json").write_text(text_of(each))
