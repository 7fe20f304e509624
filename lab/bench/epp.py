"""`kvloom-lab bench epp`: the CPU time of `kvloom epp` for long prompts, on llm-d's sizing workload.

llm-d: prompts of 100,000 tokens of which 95,000 are shared, answers of 1,000, 100 simulated engines; 35 to 47 cores at
99 requests per second. Here this process plays Envoy and the engines, and only the picker's CPU time counts.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import click
import grpc.aio
import psutil
from aiohttp import web

from kvloom.v1 import external_processor_pb2 as ext_proc
from kvloom.v1.external_processor_pb2_grpc import ExternalProcessorStub
from lab.bench.experiment import Column, Report, TableOf, experiment
from lab.flags import count, flag
from tools.gateway.exchange import DESTINATION
from tools.gateway.prompts import BYTES_PER_TOKEN, CHAT_PATH

SHARED_TOKENS: Final = 95_000
OWN_TOKENS: Final = 5_000
PIECE_BYTES: Final = 2**16
"""Envoy's pieces of a body are of about this size."""
IDLE_SECONDS: Final = 5.0
METRICS: Final = 'vllm:num_requests_running 0\nvllm:cache_config_info{block_size="16",num_gpu_blocks="60000"} 1\n'
WORDS: Final = [
    "the",
    "and",
    "for",
    "you",
    "not",
    "but",
    "all",
    "can",
    "has",
    "one",
    "our",
    "out",
    "day",
    "how",
    "now",
    "see",
]
"""Each is a token and four bytes, with its space."""


class PickerRun:
    def __init__(self, process: psutil.Process, stub: ExternalProcessorStub, num_groups: int) -> None:
        self._process = process
        self._stub = stub
        draw = random.Random(1)
        self._draw = draw
        self._prefixes = [" ".join(draw.choices(WORDS, k=SHARED_TOKENS)) for _ in range(num_groups)]
        self._homes: dict[int, set[str]] = {}
        self.num_found = 0

    def cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    async def run(self, num_requests: int, rate: float, num_chunks: int, idle_cores: float) -> dict[str, Any]:
        """The figures are those beyond what the picker needs when idle."""
        self.num_found = 0
        began, began_at = self.cpu_seconds(), asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for number in range(num_requests):
                group.create_task(self._request(number % len(self._prefixes), num_chunks))
                await asyncio.sleep(self._draw.expovariate(rate))
        idle_seconds = idle_cores * (asyncio.get_running_loop().time() - began_at)
        milliseconds = 1000 * (self.cpu_seconds() - began - idle_seconds) / num_requests
        what = f"answers of {num_chunks} pieces" if num_chunks else "answers not seen"
        found = self.num_found / num_requests
        return {"what": what, "cpu_ms": milliseconds, "cores_at_99": milliseconds * 0.099, "found": found}

    async def _request(self, group: int, num_chunks: int) -> None:
        own = " ".join(self._draw.choices(WORDS, k=OWN_TOKENS))
        messages = [{"role": "system", "content": self._prefixes[group]}, {"role": "user", "content": own}]
        body = json.dumps({"model": "m", "stream": True, "max_tokens": 1000, "messages": messages}).encode()
        call = self._stub.Process()
        headers = {":path": CHAT_PATH, "content-type": "application/json"}
        mode = ext_proc.FULL_DUPLEX_STREAMED if num_chunks else ext_proc.NONE
        config = ext_proc.ProtocolConfiguration(
            request_body_mode=ext_proc.FULL_DUPLEX_STREAMED, response_body_mode=mode
        )
        given = ext_proc.HeaderMap(
            headers=[ext_proc.HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()]
        )
        first = ext_proc.HttpHeaders(headers=given)
        await call.write(ext_proc.ProcessingRequest(request_headers=first, protocol_config=config))
        pieces = [body[begin : begin + PIECE_BYTES] for begin in range(0, len(body), PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            part = ext_proc.HttpBody(body=piece, end_of_stream=number == len(pieces) - 1)
            await call.write(ext_proc.ProcessingRequest(request_body=part))
        response = await call.read()
        endpoint = (
            response.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION].string_value.partition(",")[0]
        )
        homes = self._homes.setdefault(group, set())
        self.num_found += endpoint in homes
        homes.add(endpoint)
        for _ in pieces:
            await call.read()
        await call.write(ext_proc.ProcessingRequest(response_headers=ext_proc.HttpHeaders()))
        await call.read()
        for number in range(num_chunks):
            part = ext_proc.HttpBody(body=b'data: {"token": "abc"}\n\n', end_of_stream=number == num_chunks - 1)
            await call.write(ext_proc.ProcessingRequest(response_body=part))
            await call.read()
        await call.done_writing()
        await call.read()


async def _bench(
    num_endpoints: int, num_groups: int, num_requests: int, rate: int, num_chunks: int, tokenizer: Path | None
) -> dict[str, Any]:
    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()
    port = runner.addresses[0][1]
    with tempfile.TemporaryDirectory() as folder:
        pool = Path(folder) / "pool.toml"
        addresses = [f"127.0.{1 + number // 200}.{1 + number % 200}:{port}" for number in range(num_endpoints)]
        pool.write_text("".join(f'[[endpoints]]\naddress = "{address}"\n' for address in addresses))
        command = [sys.executable, "-m", "tools.cli.commands", "epp", "--pool", str(pool), "--port", str(port + 1)]
        command += [] if tokenizer is None else ["--tokenizer", str(tokenizer)]
        picker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port + 1}") as channel:
                await channel.channel_ready()
                await asyncio.sleep(IDLE_SECONDS)
                run = PickerRun(psutil.Process(picker.pid), ExternalProcessorStub(channel), num_groups)
                began = run.cpu_seconds()
                await asyncio.sleep(IDLE_SECONDS)
                idle_cores = (run.cpu_seconds() - began) / IDLE_SECONDS
                await run.run(num_groups, rate, 0, idle_cores)  # each prefix once
                rows = [await run.run(num_requests, rate, chunks, idle_cores) for chunks in (0, num_chunks)]
                memory = psutil.Process(picker.pid).memory_info().rss / 2**20
        finally:
            picker.terminate()
            await picker.wait()
            await runner.cleanup()
    return {"rows": rows, "idle_cores": idle_cores, "memory_mib": memory}


_COLUMNS: Final = (
    Column("per request", "what", is_left=True),
    Column("CPU-ms", "cpu_ms", ".2f"),
    Column("cores at 99/s", "cores_at_99", ".2f"),
    Column("prefix found", "found", ".0%"),
)


@experiment(
    "epp",
    count("--endpoints", 100, "Engines.", most=1000, to="num_endpoints"),
    count("--groups", 20, "Shared prefixes.", most=1000, to="num_groups"),
    count("--requests", 100, "Requests of each kind.", most=100_000, to="num_requests"),
    count("--rate", 5, "Requests per second.", most=1000),
    count("--pieces", 1000, "Pieces of an answer that Envoy sends.", most=100_000, to="num_chunks"),
    flag(
        "--tokenizer",
        click.Path(path_type=Path, exists=True),
        None,
        "The directory of a tokenizer; without, bytes count.",
    ),
)
def bench_epp(
    num_endpoints: int, num_groups: int, num_requests: int, rate: int, num_chunks: int, tokenizer: Path | None
) -> Report:
    """Measure the CPU time of the endpoint picker on llm-d's sizing workload: prompts of 100,000 tokens, of which
    95,000 are shared (docs/how-to/gateway.md)."""
    report = asyncio.run(_bench(num_endpoints, num_groups, num_requests, rate, num_chunks, tokenizer))
    prompt_bytes = (SHARED_TOKENS + OWN_TOKENS) * BYTES_PER_TOKEN
    about = (
        f"{num_endpoints} engines, {num_groups} shared prefixes, bodies of {prompt_bytes:,} bytes, {rate}/s\n"
        f"idle {report['idle_cores']:.3f} cores for the engines' metrics; {report['memory_mib']:.0f} MiB"
    )
    return Report(report, [about, TableOf(_COLUMNS, report["rows"])])
