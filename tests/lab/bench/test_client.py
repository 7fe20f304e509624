"""Load clients of `kvloom-lab bench data-plane`: the background load runs during the whole measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvloom_common.config import ModelConfig
from lab.bench.data_plane.client import drive
from lab.bench.data_plane.workloads import Workload
from tools.failures import CommandError

MEASURED = Workload(name="measured", about="", num_streams=1, num_requests=20, num_tokens=1, step_ms=0.0)
OTHERS = msgspec.structs.replace(MEASURED, name="others", num_requests=50_000, prompt_bytes=500)


class Gateway:
    """Answers with one word, or not at all, and records the clients of the requests."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.requests: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        prompt = (await request.json())["messages"][0]["content"]
        self.requests.append("others" if len(prompt) > 300 else "measured")
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"delta":{"content":" word"}}]}\n\ndata: [DONE]\n\n')
        await response.write_eof()
        return response


async def measure(gateway: Gateway, model_dir: Path, others: Workload) -> dict[str, Any]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", gateway.answer)
    async with TestServer(app) as server:
        workload = msgspec.structs.replace(MEASURED, beside=others)
        return await drive(ModelConfig(path=str(model_dir)), workload, str(server.make_url("/")), {}, seed=1)


async def test_others_send_before_and_between_the_measured_requests(model_dir: Path) -> None:
    """Otherwise a stream that no other client disturbed would count as one that withstands disturbance."""
    num_disturbed = 0
    for _ in range(3):  # beside other tests the clients of one process may get their turns in bunches
        gateway = Gateway()
        found = await measure(gateway, model_dir, OTHERS)
        assert (found["num_complete"], found["num_errors"]) == (20, 0)
        before, *between = "".join("m" if one == "measured" else "o" for one in gateway.requests).split("m")
        assert before
        assert len(between) == 20
        num_disturbed = max(num_disturbed, sum(map(bool, between[:-1])))
        if num_disturbed > 10:
            break
    assert num_disturbed > 10


@pytest.mark.long
async def test_others_that_end_too_early_are_an_error(model_dir: Path) -> None:
    """Otherwise the figure would be that of a stream without background load."""
    with pytest.raises(CommandError, match=r"others: they were over \(or failed\) before"):
        await measure(Gateway(), model_dir, msgspec.structs.replace(OTHERS, num_requests=1))


@pytest.mark.long
async def test_other_clients_without_answers_are_an_error(model_dir: Path) -> None:
    """A gateway that rejects long prompts cannot be measured with them."""
    gateway = Gateway(status=503)
    with pytest.raises(CommandError, match="others: none was answered"):
        await measure(gateway, model_dir, OTHERS)
    assert "measured" not in gateway.requests
