"""Explanations of placements as tables."""

from __future__ import annotations

import datetime

from rich.console import Console
from rich.table import Table

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason
from kvloom.v1.router_service_pb2 import ExplainResponse, PlanResponse, RequestOutcome, ShardScore

NOTHING = "–"


def print_plan(plan: PlanResponse, console: Console) -> None:
    """Where a request would go."""
    if plan.shards:
        console.print(_table(plan))
    if plan.HasField("error"):
        _print(console, f"not placed: {plan.error.message}")
    _print_regret(plan, console)


def print_explanation(explanation: ExplainResponse, console: Console) -> None:
    """Where a request went, attempt by attempt, and how it turned out."""
    for decision in explanation.decisions:
        at = datetime.datetime.fromtimestamp(decision.decided_at_seconds).astimezone()
        when = at.isoformat(sep=" ", timespec="milliseconds")
        _print(console, f"{explanation.request_id}: attempt {decision.attempt_id}, placed {when}")
        console.print(_table(decision.plan))
        _print_regret(decision.plan, console)
        console.print()
    if explanation.HasField("outcome"):
        _print_outcome(explanation.outcome, console)
    else:
        _print(console, "it is still running")


def _table(plan: PlanResponse) -> Table:
    terms = sorted({name for shard in plan.shards for name in shard.cost_terms})
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.add_column("shard", no_wrap=True)
    for name in ("overlap", "running", "waiting", "queued prefill", "TTFT ms", *terms, "cost"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("")
    for shard in plan.shards:
        if shard.filtered_reason:
            empty = [NOTHING] * (6 + len(terms))
            table.add_row(shard.shard_id, *empty, shard.filtered_reason)
        else:
            note = "← picked" if shard.shard_id == plan.picked_shard_id else ""
            table.add_row(shard.shard_id, *_numbers(shard, plan.num_prompt_tokens, terms), note)
    return table


def _numbers(shard: ShardScore, num_prompt_tokens: int, terms: list[str]) -> list[str]:
    return [
        f"{shard.num_overlap_tokens} of {num_prompt_tokens}",
        str(shard.num_running),
        str(shard.num_waiting),
        str(shard.num_queued_prefill_tokens),
        f"{1000 * shard.predicted_ttft_seconds:.1f}",
        *(f"{shard.cost_terms[name]:.4g}" if name in shard.cost_terms else NOTHING for name in terms),
        f"{shard.cost_seconds:.4g}",
    ]


def _print_regret(plan: PlanResponse, console: Console) -> None:
    if plan.HasField("regret"):
        regret = plan.regret
        _print(console, f"regret: cost {regret.cost_seconds:.4g}, TTFT {1000 * regret.ttft_seconds:.1f} ms")


def _print_outcome(outcome: RequestOutcome, console: Console) -> None:
    reason = FinishReason.Name(outcome.reason).removeprefix("FINISH_REASON_").lower()
    if outcome.error_reason:
        error = ErrorReason.Name(outcome.error_reason).removeprefix("ERROR_REASON_").lower()
        reason += f" ({error})"
    _print(
        console,
        f"ended: {reason} on {outcome.shard_id} after {outcome.e2e_latency_seconds:.3f} s, "
        f"{outcome.num_output_tokens} tokens, {outcome.num_cached_tokens} of {outcome.num_prompt_tokens} prompt tokens "
        f"cached, {1000 * outcome.queue_time_seconds:.1f} ms in the router's queue",
    )
    predicted = f"{1000 * outcome.predicted_ttft_seconds:.1f} ms" if outcome.HasField("predicted_ttft_seconds") else ""
    if not outcome.HasField("ttft_seconds"):
        _print(console, f"TTFT: no token came{f', predicted {predicted}' if predicted else ''}")
        return
    actual = f"TTFT: {1000 * outcome.ttft_seconds:.1f} ms"
    if predicted:
        actual += f", predicted {predicted} (error {1000 * outcome.ttft_error_seconds:+.1f} ms)"
    _print(console, actual)


def _print(console: Console, text: str) -> None:
    """Ids come from clients: brackets in them are no markup."""
    console.print(text, markup=False)
