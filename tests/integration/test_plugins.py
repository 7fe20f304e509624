"""The examples of docs/plugins.md, installed as pip would, in real processes' code."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from click.testing import CliRunner

from kvloom.parsers.events import ReasoningDelta, TextDelta
from kvloom.parsers.output_parser import ParserSpec, make_parser
from tests.fakes.plugin_site import PluginSite
from tests.fakes.router_world import RouterWorld
from tools.simulate.command import simulate_command

pytest_plugins = ("tests.fakes.router_fixtures",)

PROMPT = list(range(40))


def session(*, is_canary: bool) -> str:
    """A session that the example's policy counts among those of canaries, or not."""
    return next(name for name in map(str, range(1000)) if (zlib.crc32(name.encode()) % 10 == 0) == is_canary)


def test_the_parser_reads_reasoning(plugin_site: PluginSite) -> None:
    """A reader who follows the page gets a family that works."""
    plugin_site.install_example("kvloom.parsers")
    parser = make_parser(ParserSpec(reasoning="acme"))
    assert parser.feed("<thinking>why</thinking>so") == [ReasoningDelta("why"), TextDelta("so")]


async def test_the_placement_policy_places_requests(world: RouterWorld, plugin_site: PluginSite) -> None:
    """The router's core uses the policy of another package, chosen in the configuration."""
    plugin_site.install_example("kvloom.placement_policies")
    world.config.router.placement.policy = "canary"
    shards = {name: await world.start_shard(name) for name in ("canary-0", "shard-0")}
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 2)
    for is_canary in (True, False, True):
        answer = await world.ask(link, PROMPT, 3, session_key=session(is_canary=is_canary))
        assert len(answer.token_ids[0]) == 3
    assert {name: len(shard.submits) for name, shard in shards.items()} == {"canary-0": 2, "shard-0": 1}


def test_the_placement_policy_is_simulated(tmp_path: Path, plugin_site: PluginSite) -> None:
    """Whoever writes a policy compares it with others before routers use it."""
    plugin_site.install_example("kvloom.placement_policies")
    trace = tmp_path / "mooncake.jsonl"
    calls = [{"timestamp": 50 * i, "input_length": 600, "output_length": 4, "hash_ids": [i, i + 1]} for i in range(20)]
    trace.write_text("".join(json.dumps(call) + "\n" for call in calls))
    arguments = ["--trace", str(trace), "--shards", "2", "--policy", "canary,ect", "--jobs", "1", "--json"]
    result = CliRunner().invoke(simulate_command, arguments)
    assert result.exit_code == 0, result.output
    assert [row["policy"] for row in json.loads(result.stdout)] == ["canary", "ect", "bound"]
