"""`kvloom bench load`: how a running fabric answers under load, as its clients see it."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import aiohttp
import click
import msgspec
from rich.console import Console
from rich.table import Table

from tools.bench.streams import MeasuredStream, numbered_prompt, open_session, play_one
from tools.failures import CommandError
from tools.options import FabricFlags, fabric_options, option
from tools.supervisor.state import RunFolder

_MAX_REQUESTS: Final = 20_000
"""The most requests of a run with a rate. The client is one process, and could not send more in time."""
_PAUSE_AFTER_ERROR_SECONDS: Final = 0.2
_SHARES: Final = (0.5, 0.9, 0.99)
_MS: Final = 1000.0


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that clients send, and how long."""

    rate: float | None
    """Requests per second, at random times. None: `concurrency` clients ask again when they are answered."""
    concurrency: int
    seconds: float
    """How long requests are sent."""
    wait_seconds: float
    """How long answers are awaited after that."""
    num_prompt_words: int
    max_tokens: int
    ttft_slo_seconds: float
    seed: int


@click.command("load")
@option("--url", scope="bench-load", help="The fabric, or another server with OpenAI's API.  [default: the one here]")
@option("--api-key", scope="bench-load", help="The API key to send. Prefer the variable to the flag.")
@option("--model", scope="bench-load", help="The model.  [default: the first that is listed]")
@option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    scope="bench-load",
    help="Requests per second, at random times, in place of --concurrency.",
)
@option(
    "--concurrency",
    type=click.IntRange(1, 4096),
    default=8,
    show_default=True,
    scope="bench-load",
    help="Clients that ask again when they are answered.",
)
@option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=30.0,
    show_default=True,
    scope="bench-load",
    help="How long requests are sent.",
)
@option(
    "--wait-seconds",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    scope="bench-load",
    help="How long answers are awaited after that.",
)
@option(
    "--prompt-words",
    "num_prompt_words",
    type=click.IntRange(1, 20_000),
    default=200,
    show_default=True,
    scope="bench-load",
    help="Numbers in the longest prompt; the shortest has half as many. No two prompts share more than a word.",
)
@option(
    "--max-tokens",
    type=click.IntRange(1, 100_000),
    default=128,
    show_default=True,
    scope="bench-load",
    help="Tokens of the longest answer; the shortest has half as many.",
)
@option(
    "--ttft-slo-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    scope="bench-load",
    help="An answer is good if its first token comes within this time.",
)
@option("--seed", type=click.IntRange(0), default=1, show_default=True, scope="bench-load", help="Draws the requests.")
@fabric_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def bench_load(
    context: click.Context,
    url: str | None,
    api_key: str | None,
    model: str | None,
    fabric: FabricFlags,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Send requests to a running fabric; print the times to the first token and between tokens, and the throughput.
    Exits with 1 if no request was answered."""
    plan = LoadPlan(**sizes)
    if plan.rate is not None:
        if context.get_parameter_source("concurrency") is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError("--rate and --concurrency exclude each other.")
        if plan.rate * plan.seconds > _MAX_REQUESTS:
            raise click.UsageError(f"--rate: one client can send {_MAX_REQUESTS:,} requests at most.")
    if url is not None and not url.startswith(("http://", "https://")):
        raise click.UsageError("--url must begin with http:// or https://.")
    if url is None:
        folder = RunFolder(fabric.home())
        url = folder.require_running().http_url
        if not url:
            raise CommandError("this machine has no edge: name another one's with --url")
    report = asyncio.run(_run(url, api_key or "", model, plan))
    if as_json:
        click.echo(json.dumps(report))
    else:
        _show(report)
    if not report["answered"]:
        raise SystemExit(1)


async def _run(url: str, api_key: str, model: str | None, plan: LoadPlan) -> dict[str, Any]:
    async with open_session(url) as session:
        model = model or await _first_model(session, api_key)
        streams = _requests(plan, api_key)
        began = time.monotonic()
        if plan.rate is None:
            sent = await _play_in_turn(session, model, streams, plan)
        else:
            sent = await _play_at_random_times(session, model, streams, plan, plan.rate)
        return {"url": url, "model": model} | report_of(sent, plan, time.monotonic() - began)


async def _first_model(session: aiohttp.ClientSession, api_key: str) -> str:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with session.get("/v1/models", headers=headers) as response:
            text = await response.text()
            if response.status != 200:
                raise CommandError(f"the server does not list its models ({response.status}): {text[:200]}")
            return str(json.loads(text)["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise CommandError(f"the server cannot be reached: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise CommandError("the server lists no model: name one with --model") from error


def _requests(plan: LoadPlan, api_key: str) -> Iterator[MeasuredStream]:
    rng = random.Random(plan.seed)
    for number in itertools.count():
        num_words = rng.randint(max(1, plan.num_prompt_words // 2), plan.num_prompt_words)
        max_tokens = rng.randint(max(1, plan.max_tokens // 2), plan.max_tokens)
        prompt = numbered_prompt(number, num_words, title=f"{rng.getrandbits(64):x}")
        yield MeasuredStream(f"load-{plan.seed}-{number}", max_tokens, prompt, seed=number, api_key=api_key)


async def _play_in_turn(
    session: aiohttp.ClientSession, model: str, streams: Iterator[MeasuredStream], plan: LoadPlan
) -> list[MeasuredStream]:
    sent: list[MeasuredStream] = []
    until = time.monotonic() + plan.seconds

    async def ask() -> None:
        while time.monotonic() < until:
            sent.append(next(streams))
            await play_one(session, model, sent[-1])
            if sent[-1].error:  # a client that is refused does not ask again at once
                await asyncio.sleep(_PAUSE_AFTER_ERROR_SECONDS)

    clients = {asyncio.create_task(ask(), name=f"client {number}") for number in range(plan.concurrency)}
    await _await(clients, plan.seconds + plan.wait_seconds)
    return sent


async def _play_at_random_times(
    session: aiohttp.ClientSession, model: str, streams: Iterator[MeasuredStream], plan: LoadPlan, rate: float
) -> list[MeasuredStream]:
    rng = random.Random(f"{plan.seed} arrivals")
    sent: list[MeasuredStream] = []
    playing: set[asyncio.Task[None]] = set()
    began = time.monotonic()
    at = rng.expovariate(rate)
    while at < plan.seconds:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        sent.append(next(streams))
        playing.add(asyncio.create_task(play_one(session, model, sent[-1]), name=sent[-1].name))
        at += rng.expovariate(rate)
    await _await(playing, plan.wait_seconds)
    return sent


async def _await(tasks: set[asyncio.Task[None]], seconds: float) -> None:
    """Wait for the tasks, and cancel those that have not ended then: their clients leave."""
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=seconds)
    for task in late:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


def report_of(sent: Sequence[MeasuredStream], plan: LoadPlan, seconds: float) -> dict[str, Any]:
    """The figures of a run that took so long. Times are in milliseconds; those of answers that have ended."""
    answered = [stream for stream in sent if stream.has_finished and stream.pieces_at]
    errors = Counter(stream.error_code or stream.error[:80] for stream in sent if stream.error)
    good = [stream for stream in answered if stream.pieces_at[0] - stream.sent_at <= plan.ttft_slo_seconds]
    return {
        "requests": len(sent),
        "answered": len(answered),
        "unfinished": sum(not stream.has_finished and not stream.error for stream in sent),
        "errors": dict(errors.most_common()),
        "good_share": round(len(good) / len(sent), 4) if sent else None,
        "seconds": round(seconds, 2),
        "requests_per_second": round(len(answered) / seconds, 2),
        "output_tokens_per_second": round(sum(stream.num_output_tokens for stream in answered) / seconds, 1),
        "prompt_tokens_per_second": round(sum(stream.num_prompt_tokens for stream in answered) / seconds, 1),
        "ttft_ms": _percentiles([stream.pieces_at[0] - stream.sent_at for stream in answered]),
        "tpot_ms": _percentiles(
            [
                (stream.pieces_at[-1] - stream.pieces_at[0]) / (stream.num_output_tokens - 1)
                for stream in answered
                if stream.num_output_tokens > 1
            ]
        ),
        "longest_pause_ms": _percentiles([stream.longest_pause_seconds for stream in answered]),
        "e2e_ms": _percentiles([stream.pieces_at[-1] - stream.sent_at for stream in answered]),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    ordered = sorted(seconds)
    if not ordered:
        return None
    return {
        f"p{share * 100:g}": round(_MS * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 2)
        for share in _SHARES
    }


def _show(report: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"{report['url']}, {report['model']}: {report['answered']} of {report['requests']} requests answered in "
        f"{report['seconds']:g} s, {report['unfinished']} unfinished",
        soft_wrap=True,
        highlight=False,
    )
    table = Table()
    table.add_column("ms")
    names = [f"p{share * 100:g}" for share in _SHARES]
    for name in names:
        table.add_column(name, justify="right")
    for title, field in (
        ("first token (TTFT)", "ttft_ms"),
        ("per token (TPOT)", "tpot_ms"),
        ("longest pause", "longest_pause_ms"),
        ("whole answer", "e2e_ms"),
    ):
        figures = report[field]
        table.add_row(title, *("-" if figures is None else f"{figures[name]:.2f}" for name in names))
    console.print(table)
    console.print(
        f"{report['requests_per_second']:g} answers/s, {report['output_tokens_per_second']:g} output tokens/s, "
        f"{report['prompt_tokens_per_second']:g} prompt tokens/s",
        highlight=False,
    )
    if report["good_share"] is not None:
        console.print(f"{report['good_share']:.1%} had their first token in time", highlight=False)
    for error, count in report["errors"].items():
        console.print(f"{count} x {error}", markup=False, highlight=False)
