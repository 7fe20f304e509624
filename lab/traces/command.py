"""`kvloom-lab trace`: the trace of one request, across the processes of a running fabric."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Final

import aiohttp
import click
import msgspec

from kvloom_common.tracing.trace_context import TraceContext
from lab.traces.collector import CollectedSpan, Collector, collecting
from lab.traces.picture import as_svg, as_text

PARTS: Final = frozenset({"kvloom-edge", "kvloom-router", "kvloom-shard"})
"""The services whose spans a whole trace has."""
_POLL_SECONDS: Final = 0.1


@click.command()
@click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="The fabric's HTTP API.")
@click.option("--key", default="", help="The API key, where the fabric wants one.")
@click.option("--model", default="", help="The model to ask.  [default: the first one listed]")
@click.option("--question", default="What is the capital of France?", show_default=True, help="The question.")
@click.option("--max-tokens", type=click.IntRange(1, 4096), default=16, show_default=True, help="The answer's length.")
@click.option("--port", type=click.IntRange(0, 65535), default=4317, show_default=True, help="The collector's port.")
@click.option("--wait", type=click.FloatRange(0.1, 60), default=10.0, show_default=True, help="Seconds for the spans.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the spans here.")
@click.option("--svg", "svg_path", type=click.Path(path_type=Path, dir_okay=False), help="Write a picture here.")
def trace(
    url: str,
    key: str,
    model: str,
    question: str,
    max_tokens: int,
    port: int,
    wait: float,
    json_path: Path | None,
    svg_path: Path | None,
) -> None:
    """Collect traces, ask a running fabric one question, and show the trace of the answer. The fabric sends its traces
    here if it runs with --otlp-endpoint http://127.0.0.1:4317.

    The exit status is 1 if spans of the edge, a router or a shard did not arrive in time."""
    spans = asyncio.run(_traced(url.rstrip("/"), key, model, question, max_tokens, port, wait))
    click.echo(as_text(spans))
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(spans), indent=2) + b"\n")
    if svg_path is not None:
        svg_path.write_text(as_svg(spans), encoding="utf-8")
    if missing := PARTS - {span.service for span in spans}:
        raise click.ClickException(f"no spans of {', '.join(sorted(missing))} arrived within {wait:g} s")


async def _traced(
    url: str, key: str, model: str, question: str, max_tokens: int, port: int, wait: float
) -> list[CollectedSpan]:
    context = TraceContext(secrets.randbits(128) or 1, secrets.randbits(64) or 1, is_sampled=True)
    try:
        async with collecting(port) as (collector, _):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            timeout = aiohttp.ClientTimeout(total=120)
            async with aiohttp.ClientSession(headers=headers, timeout=timeout, raise_for_status=True) as http:
                if not model:
                    async with http.get(f"{url}/v1/models") as response:
                        model = (await response.json())["data"][0]["id"]
                body = {
                    "model": model,
                    "messages": [{"role": "user", "content": question}],
                    "max_tokens": max_tokens,
                    "stream": True,
                }
                traced = {"traceparent": context.header}
                async with http.post(f"{url}/v1/chat/completions", json=body, headers=traced) as response:
                    await response.read()
            trace_id = f"{context.trace_id:032x}"
            await _until_whole(collector, trace_id, wait)
            return collector.trace(trace_id)
    except (aiohttp.ClientError, TimeoutError, RuntimeError, KeyError, IndexError) as error:
        raise click.ClickException(f"{url}: {error or type(error).__name__}") from error


async def _until_whole(collector: Collector, trace_id: str, wait: float) -> None:
    """Wait for the spans of all parts, at most so many seconds."""
    for _ in range(round(wait / _POLL_SECONDS)):
        if {span.service for span in collector.trace(trace_id)} >= PARTS:
            return
        await asyncio.sleep(_POLL_SECONDS)
