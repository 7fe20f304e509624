"""`kvloom explain`: why a request was placed on its shard, or where one would be placed."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path
from typing import Final

import click
import msgspec
from google.protobuf import json_format
from rich.console import Console
from rich.table import Table

from kvloom.client.client import Client
from kvloom.client.generate_request import GenerateOptions
from kvloom.errors import KvloomError
from kvloom.transport.channel_options import OpenChannel
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import (
    ExplainResponse,
    JudgedTerm,
    ObjectivesOutcome,
    PlanResponse,
    ShardScore,
)
from kvloom_common.finish_reasons import FINISH_REASON_NAMES
from kvloom_common.overview.time_parts import where_time_went
from tools.cli.router_client import RouterFlags, Routers, client_options, first_model
from tools.failures import CommandError
from tools.options import option

MAX_WIDTH: Final = 1000


@click.command()
@option(
    "--prompt", scope="explain", metavar="TEXT", help="Show where this question would be placed, without placing it."
)
@option("--raw", scope="explain", is_flag=True, help="Use the prompt as it is, without the chat template of the model.")
@option(
    "--tokens",
    scope="explain",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A file of token ids to use instead of a prompt: a JSON array, or numbers separated by whitespace.",
)
@option("--max-tokens", scope="explain", type=click.IntRange(min=1), help="The largest number of tokens of the answer.")
@option("--model", scope="explain", metavar="NAME", help="The name of a served model.  [default: the first one]")
@option("--request-id", scope="explain", metavar="ID", help="Show why this request was placed on its shard.")
@option("--json", "as_json", scope="explain", is_flag=True, help="Print one JSON object.")
@client_options
def explain(
    prompt: str | None,
    raw: bool,
    tokens: Path | None,
    max_tokens: int | None,
    model: str | None,
    request_id: str | None,
    as_json: bool,
    reach: RouterFlags,
) -> None:
    """Show every shard as the router sees it for a request: the overlap, the queue, the predicted time to first token,
    each term of the cost, why a shard is filtered out, which one is picked, and the regret of this choice.

    Over HTTP the ID of a request is the "id" of its answer, or the x-request-id that its caller chose. If several
    requests had the same x-request-id, the latest one is shown, and the others are named.
    """
    if sum(given is not None for given in (prompt, tokens, request_id)) != 1:
        raise click.UsageError("give one of --prompt, --tokens and --request-id")
    options = GenerateOptions(model=model or "")
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if tokens is not None:
        options["token_ids"] = read_token_ids(tokens)
    elif prompt is not None and raw:
        options["text"] = prompt
    elif prompt is not None:
        options["messages"] = [{"role": "user", "content": prompt}]
    routers = reach.routers()
    answer = asyncio.run(_ask_any(routers, request_id, options))
    if as_json:
        _print_json(answer)
    elif isinstance(answer, ExplainResponse):
        print_explanation(answer, _console())
    else:
        print_plan(answer, _console())


def read_token_ids(path: Path) -> list[int]:
    """Raises CommandError."""
    try:
        text = path.read_text()
        found = msgspec.json.decode(text, type=list[int]) if text.lstrip()[:1] == "[" else list(map(int, text.split()))
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise CommandError(f"{path} does not contain token ids: {error}") from error
    if not found:
        raise CommandError(f"{path} holds no token ids")
    return found


async def _ask_any(
    routers: Routers, request_id: str | None, options: GenerateOptions
) -> PlanResponse | ExplainResponse:
    """Ask the routers. Only the router that placed a request remembers it, but any of them can plan. Raises
    CommandError."""
    candidates = (routers.own_addresses if request_id is not None else []) or [routers.any_address]
    errors: list[KvloomError] = []
    for by_caller in (False, True) if request_id is not None else (False,):
        for address in candidates:
            try:
                return await _ask(address, routers.open_channel, request_id, options, by_caller=by_caller)
            except KvloomError as error:
                errors.append(error)
    answered = [error for error in errors if error.reason != ErrorReason.ERROR_REASON_ROUTER_LOST]
    raise CommandError(
        answered[0].message if answered else f"no router answers at {', '.join(candidates)}"
    ) from errors[0]


async def _ask(
    address: str, open_channel: OpenChannel, request_id: str | None, options: GenerateOptions, *, by_caller: bool
) -> PlanResponse | ExplainResponse:
    async with Client(address, client_id="explain", open_channel=open_channel) as client:
        if request_id is not None:
            return await (client.explain(client_request_id=request_id) if by_caller else client.explain(request_id))
        if not options["model"]:
            options["model"] = await first_model(client)
        return await client.plan(**options)


def _print_json(answer: PlanResponse | ExplainResponse) -> None:
    """Print the message of router_service.proto with its field names."""
    fields = json_format.MessageToDict(
        answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    print(msgspec.json.encode(fields).decode())


def _console() -> Console:
    """Rows are as wide as necessary, because a table that hides numbers explains nothing. `less -S` scrolls
    sideways."""
    return Console(highlight=False, soft_wrap=True, width=MAX_WIDTH)


NOTHING = "–"


def print_plan(plan: PlanResponse, console: Console) -> None:
    """Print where a request would be placed."""
    if plan.route:
        rule = f" ({plan.conditions})" if plan.conditions else ""
        _print(console, f"model {plan.model}, chosen by {plan.route}{rule}")
    if plan.candidates:
        tests = ", ".join(plan.tests)
        _print(console, f"an edge asks first, and judges by {tests}: {', '.join(plan.candidates)}")
    if plan.shards:
        console.print(_table(plan))
    if plan.brownout:
        _print(console, f"the model is overloaded: the answer would be degraded (brownout step {plan.brownout})")
    if plan.HasField("error"):
        _print(console, f"not placed: {plan.error.message}")
    _print_regret(plan, console)
    if plan.HasField("prefill_deviation_seconds"):
        _print(console, f"its prefill time is known to ± {_milliseconds(plan.prefill_deviation_seconds)}")


def print_explanation(explanation: ExplainResponse, console: Console) -> None:
    """Print where a request was placed, attempt by attempt, and its outcome."""
    for decision in explanation.decisions:
        at = datetime.datetime.fromtimestamp(decision.decided_at_seconds).astimezone()
        when = at.isoformat(sep=" ", timespec="milliseconds")
        what = f"attempt {decision.attempt_id}" if decision.attempt_id else "its prompt, for another shard's answer"
        _print(console, f"{explanation.request_id}: {what}, placed {when}")
        console.print(_table(decision.plan))
        _print_regret(decision.plan, console)
        console.print()
    if explanation.priority_class:  # routers of an earlier version do not say it
        _print(console, _class_line(explanation))
    if explanation.brownout:
        _print(console, f"the model was overloaded: the answer is degraded (brownout step {explanation.brownout})")
    if explanation.HasField("outcome"):
        _print_outcome(explanation, console)
    else:
        _print(console, "it is still running")
    if explanation.other_request_ids:
        _print(console, f"earlier requests with the same x-request-id: {', '.join(explanation.other_request_ids)}")


def _class_line(explanation: ExplainResponse) -> str:
    line = f"class {explanation.priority_class}, rank {explanation.rank}"
    if explanation.HasField("outcome") and explanation.outcome.rank < explanation.rank:
        line += f", {explanation.outcome.rank} after {explanation.outcome.queue_time_seconds:.1f} s of waiting"
    if explanation.tenant:
        line += f"; in the share of {explanation.tenant}"
    return line + (f", sub-flow {explanation.fairness_id}" if explanation.fairness_id else "")


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


def _print_objectives(outcome: ObjectivesOutcome, console: Console) -> None:
    parts: list[str] = []
    for name in ("deadline", "ttft", "tpot"):
        if outcome.wanted.HasField(f"{name}_ms"):
            milliseconds = getattr(outcome.wanted, f"{name}_ms")
            is_decided = outcome.HasField(f"{name}_met")
            met = ("met" if getattr(outcome, f"{name}_met") else "missed") if is_decided else "not decided"
            parts.append(f"{name} {milliseconds:g} ms ({met})")
    known = outcome.HasField("predicted_ttft_seconds")
    predicted = f"{1000 * outcome.predicted_ttft_seconds:.1f} ms" if known else "not known"
    refused = f"; refused as impossible, because of {outcome.refused}" if outcome.refused else ""
    _print(console, f"objectives: {', '.join(parts)}; TTFT predicted on arrival: {predicted}{refused}")


def _print_outcome(explanation: ExplainResponse, console: Console) -> None:
    outcome = explanation.outcome
    reason = FINISH_REASON_NAMES[outcome.reason]
    if outcome.error_reason:
        error = ErrorReason.Name(outcome.error_reason).removeprefix("ERROR_REASON_").lower()
        reason += f" ({error})"
    end = f"{outcome.end}, " if outcome.end else ""  # routers of an earlier version do not say it
    where = f" on {outcome.shard_id}" if outcome.shard_id else ""
    _print(
        console,
        f"ended: {end}{reason}{where} after {outcome.e2e_latency_seconds:.3f} s, "
        f"{outcome.num_output_tokens} tokens, {outcome.num_cached_tokens} of {outcome.num_prompt_tokens} prompt tokens "
        f"cached, {1000 * outcome.queue_time_seconds:.1f} ms in the router's queue",
    )
    moves = {
        "preempted": outcome.num_preemptions,
        "migrated": outcome.num_migrations - outcome.num_notice_migrations,
        "migrated (notice)": outcome.num_notice_migrations,
        "failed over": outcome.num_failovers,
    }
    if any(moves.values()):
        _print(console, f"moved: {', '.join(f'{name} {count}x' for name, count in moves.items() if count)}")
    went = where_time_went(explanation)
    if went is not None and went.parts:
        parts = ", ".join(f"{part.name.replace('_', ' ')} {_milliseconds(part.seconds)}" for part in went.parts)
        _print(console, f"time: {parts}")
        _print(console, f"why: {went.why}")
    if outcome.HasField("objectives"):
        _print_objectives(outcome.objectives, console)
    if outcome.limits:
        _print(console, f"limits: {outcome.limits}")
    predicted = f"{1000 * outcome.predicted_ttft_seconds:.1f} ms" if outcome.HasField("predicted_ttft_seconds") else ""
    if not outcome.HasField("ttft_seconds"):
        _print(console, f"TTFT: no token came{f', predicted {predicted}' if predicted else ''}")
        return
    actual = f"TTFT: {1000 * outcome.ttft_seconds:.1f} ms"
    if predicted:
        actual += f", predicted {predicted} (error {1000 * outcome.ttft_error_seconds:+.1f} ms)"
    _print(console, actual)
    if outcome.predictions:  # routers of an earlier version do not say it
        _print(console, f"predicted at the first placement: {', '.join(map(_judged, outcome.predictions))}")


def _judged(judged: JudgedTerm) -> str:
    text = f"{judged.term} {_milliseconds(judged.predicted_seconds)}"
    if not judged.HasField("actual_seconds"):
        return f"{text} (not known what it was)"
    return f"{text} (was {_milliseconds(judged.actual_seconds)})"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _print(console: Console, text: str) -> None:
    """Print without markup, because ids come from clients and may have brackets."""
    console.print(text, markup=False)
