"""The examples of docs/plugins.md, installed as pip would, in real processes' code."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
from click.testing import CliRunner

from kvloom.enums import ErrorReason
from kvloom.parsers.events import ReasoningDelta, TextDelta
from kvloom.parsers.output_parser import ParserSpec, make_parser
from kvloom.process.service import SERVER_OPTIONS
from kvloom.v1.generation_pb2 import FinishReason
from kvloom.v1.safety_service_pb2_grpc import add_SafetyServiceServicer_to_server
from safety_svc.policy_file import PolicyFile
from safety_svc.server import SafetyServicer
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


RULE = """
[[rules]]
name = "card-number"
kind = "card_number"
message = "Card numbers must not be shared here."
first_digits = "45"
"""
CARD = "4111 1111 1111 1111".replace(" ", "")
FAILING_RULE = """
class Acme:
    max_length = 4

    def __init__(self, fields):
        pass

    def find(self, text, start):
        if "poison" in text:
            raise ValueError(text)
"""


@contextlib.asynccontextmanager
async def safety_service(world: RouterWorld, policy: Path) -> AsyncIterator[None]:
    """The real service, which the router that starts next uses."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_SafetyServiceServicer_to_server(SafetyServicer(PolicyFile(str(policy))), server)
    world.config.safety.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


async def test_the_safety_rule_stops_an_answer_and_a_prompt(
    world: RouterWorld, plugin_site: PluginSite, tmp_path: Path
) -> None:
    """A rule of another package holds for prompts, and no part of what it forbids reaches a client that streams."""
    plugin_site.install_example("kvloom.safety_rules")
    (tmp_path / "policy.toml").write_text(RULE)
    script = list(enumerate([*"My card: ", *CARD, *" thanks, and more text behind it"]))
    await world.start_shard("shard-0", script=script)
    async with safety_service(world, tmp_path / "policy.toml"):
        await world.start_router()
        link = await world.connect()
        await world.wait_for_shards(link, 1)
        answer = await world.ask(link, PROMPT, 100)
        refused = await world.ask(link, PROMPT, 100, prompt_text=f"Is {CARD} a card?")
    assert "My card: ".startswith(answer.texts[0])
    assert answer.finish.reason == FinishReason.FINISH_REASON_CONTENT_FILTER
    assert answer.finish.error.message == "Card numbers must not be shared here."
    assert refused.texts == [""]
    assert refused.finish.reason == FinishReason.FINISH_REASON_CONTENT_FILTER


async def test_a_safety_rule_that_fails_ends_its_request_only(
    world: RouterWorld, plugin_site: PluginSite, tmp_path: Path
) -> None:
    """An error in a plugin is no crash and no stack trace for a client, shows nothing unscreened, and harms no other
    request, although all share a stream to the service."""
    plugin_site.install("acme_rules", "kvloom.safety_rules", {"acme": "acme_rules:Acme"}, FAILING_RULE)
    (tmp_path / "policy.toml").write_text('[[rules]]\nname = "r"\nkind = "acme"\n')
    world.config.safety.on_unavailable = "refuse"
    await world.start_shard("shard-0")
    async with safety_service(world, tmp_path / "policy.toml"):
        await world.start_router()
        link = await world.connect()
        await world.wait_for_shards(link, 1)
        failed = await world.ask(link, PROMPT, 10, prompt_text="poison")
        served = await world.ask(link, PROMPT, 10, prompt_text="fine")
    assert failed.texts == [""]
    assert failed.finish.error.reason == ErrorReason.SAFETY_UNAVAILABLE
    assert "poison" not in failed.finish.error.message
    assert len(served.token_ids[0]) == 10
