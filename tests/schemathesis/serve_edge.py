"""An edge with a fake router, which `make test-schemathesis` attacks.

`python -m tests.schemathesis.serve_edge -- COMMAND` runs a command with the URL of its /openapi.json as the last
argument, and ends as the command does.
"""

from __future__ import annotations

import asyncio
import sys

from kvloom.v1.generation_pb2 import TokenLogprobs
from kvloom_common.models.served_model import ServedModel
from tests.fakes.edge_world import edge_world
from tests.fakes.fake_router_link import FakeRequest, FakeRouterLink


class AnyModel(dict[str, ServedModel]):
    """Has the one model under every name, so that made-up requests get further than its name."""

    def get(self, key: str, default: ServedModel | None = None) -> ServedModel | None:
        return next(iter(self.values()), default) if key else default


def play(request: FakeRequest) -> None:
    """Answers every choice with one token."""
    with_logprobs = request.request.wanted.sampling.HasField("logprobs")
    for index in range(request.request.n):
        request.start(index)
        request.tokens("x", index, token_ids=[1], logprobs=[TokenLogprobs(logprob=-1.0)] if with_logprobs else [])
        request.finish(index=index)


async def run(command: list[str]) -> int:
    link = FakeRouterLink()
    link.script = play
    async with edge_world(link=link) as world:
        world.edge.models.by_name = AnyModel(world.edge.models.by_name)
        process = await asyncio.create_subprocess_exec(*command, f"{world.url}/openapi.json")
        return await process.wait()


if __name__ == "__main__":
    raise SystemExit(asyncio.run(run(sys.argv[sys.argv.index("--") + 1 :])))
