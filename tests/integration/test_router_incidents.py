"""A running router keeps what it was given, and the bundle of it decides the same again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from click.testing import CliRunner

from lab.dst.command import dst
from lab.dst.replay import read_bundle
from tests.fakes.router_world import TIMEOUT_SECONDS, RouterWorld
from tools.cli.incident import capture

pytest_plugins = ("tests.fakes.router_fixtures",)


async def test_a_router_is_repeated_from_its_bundle(world: RouterWorld, tmp_path: Path) -> None:
    """By the commands that the guide has: one captures while the router runs, one repeats. Real frames, links and
    clocks were between the events."""
    world.config.router.records_incidents = True
    world.config.data_dir = str(tmp_path)
    for number in range(2):
        await world.start_shard(f"shard-{number}")
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 2)
    for number in range(6):
        await world.ask(link, list(range(40 + number)), 5, request_id=f"r{number}", session_key="chat")
    world.stop.set()
    assert world.served is not None
    await asyncio.wait_for(world.served, TIMEOUT_SECONDS)
    bundle = tmp_path / "bundle"
    told = await asyncio.to_thread(
        CliRunner().invoke, capture, [str(bundle), "--router", "router-0", "--data-dir", str(tmp_path)]
    )
    assert "events in" in told.output, told.output
    run = read_bundle(bundle)
    assert (run.versions["policy"], run.versions["router_id"]) == ("ect", "router-0")
    names = [line.partition(b'"RequestArrived"')[1] for line in run.lines]
    assert sum(map(bool, names)) == 6
    assert not any(b'"token_ids":[1' in line or b"[0,1,2,3," in line for line in run.lines), "no prompt is in it"
    again = await asyncio.to_thread(CliRunner().invoke, dst, ["--replay", str(bundle)])
    assert again.exit_code == 0, again.output
    assert "decisions are the same" in again.output
    otherwise = await asyncio.to_thread(CliRunner().invoke, dst, ["--replay", str(bundle), "--policy", "round_robin"])
    assert otherwise.exit_code == 1, "each of the requests has a longer prompt than the one before, on the same shard"
    assert "recorded: ['submit', 'r" in otherwise.output
