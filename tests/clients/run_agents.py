"""Runs coding agents, each through one session with a fabric whose engine plays a model (scripted_engine.py).

The agent reads a file and an image, is cut off in the middle of a call, edits the file, runs a command, and the session
is taken up again.

`python -m tests.clients.run_agents [--only NAME ...] [--write-docs]`, as `make test-clients` does once it has installed
them. Prints a table, and exits with 1 if an agent has not done something that it can do.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.clients import scripted_engine
from tests.clients.results import with_table
from tests.clients.run import ENVIRONMENTS, NO_TELEMETRY, PAGE
from tests.clients.scripted_agent import AFTER, BEFORE, IMAGE, NOTE
from tests.e2e.fabric import MODEL_CACHE_DIR, REPOSITORY, RunningFabric

FOLDER: Final = Path(__file__).parent / "agents"
AIDER: Final = ENVIRONMENTS / "aider" / "bin"
TIME_LIMIT_SECONDS: Final = 120.0
"""For one command."""
MARK: Final = "agents"
CHECKS: Final = ("file read", "image read", "cut off", "file edited", "command run", "ended", "taken up again")
TASK: Final = f"Read {NOTE}, look at {IMAGE}, edit the note and run a command."
MORE: Final = "Go on."
WINDOW: Final = 10**6
MODEL: Final = MODEL_CACHE_DIR / "smollm2-135m-instruct"
CONFIG: Final = f"""
[model]
name = "tiny"
path = "{{model}}"
tool_parser = "hermes"

[shard]
engine = "{scripted_engine.NAME}"
num_shards = 1
num_blocks = {WINDOW // 16}

[shard.sim]
step_ms = 1
prefill_tokens_per_second = 10_000_000

[shard.plugin]
folder = "{{folder}}"
state_file = "{{state_file}}"
"""
_PIXEL: Final = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@dataclasses.dataclass(frozen=True)
class Session:
    """Where an agent runs."""

    url: str
    folder: Path
    """What it works on."""
    home: Path


Commands = Callable[[Session], Sequence[Sequence[str]]]


@dataclasses.dataclass(frozen=True)
class Agent:
    name: str
    package: str
    """Its package, as the registry names it; "": it has none, and is played from its published source."""
    commands: Commands
    """Of the session; those behind the first take it up again."""
    api: str
    environment: Callable[[Session], Mapping[str, str]] = lambda _: {}
    not_offered: frozenset[str] = frozenset()
    """Checks of what it does not do."""


def binary(name: str) -> str:
    return str(FOLDER / "node_modules" / ".bin" / name)


def claude(session: Session) -> Sequence[Sequence[str]]:
    options = ["--model", "tiny", "--allowedTools", "Read,Edit,Bash"]
    return [[binary("claude"), "-p", TASK, *options], [binary("claude"), "-c", "-p", MORE, *options]]


def codex(session: Session) -> Sequence[Sequence[str]]:
    provider = f'{{name="kvloom",base_url="{session.url}/v1",wire_api="responses",env_key="KVLOOM_KEY"}}'
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "tiny"]
    options += ["-c", 'model_provider="kvloom"', "-c", f"model_providers.kvloom={provider}"]
    return [
        [binary("codex"), "exec", *options, TASK],
        [binary("codex"), "exec", "resume", "--last", *options, MORE],
    ]


def opencode(session: Session) -> Sequence[Sequence[str]]:
    options = {"baseURL": f"{session.url}/v1", "apiKey": "none"}
    model = {"name": "tiny", "limit": {"context": 900_000, "output": 4_000}, "attachment": True}
    model |= {"modalities": {"input": ["text", "image"], "output": ["text"]}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "kvloom", "options": options, "models": {"tiny": model}}
    config = {"provider": {"kvloom": provider}, "autoupdate": False, "share": "disabled"}
    (session.home / "opencode.json").write_text(json.dumps(config))
    options_given = ["-m", "kvloom/tiny"]
    return [
        [binary("opencode"), "run", *options_given, TASK],
        [binary("opencode"), "run", "-c", *options_given, MORE],
    ]


def continue_cli(session: Session) -> Sequence[Sequence[str]]:
    model = {"name": "tiny", "provider": "openai", "model": "tiny", "apiBase": f"{session.url}/v1", "apiKey": "none"}
    model |= {"roles": ["chat"], "capabilities": ["tool_use"], "defaultCompletionOptions": {"contextLength": 900_000}}
    config = session.home / "config.yaml"  # JSON is YAML
    config.write_text(json.dumps({"name": "kvloom", "version": "1.0.0", "schema": "v1", "models": [model]}))
    options = ["--config", str(config), "--auto"]
    return [[binary("cn"), "-p", TASK, *options], [binary("cn"), "-p", MORE, "--resume", *options]]


def cline(session: Session) -> Sequence[Sequence[str]]:
    place = ["--data-dir", str(session.home / "cline")]
    provider = ["-p", "openai", "-k", "none", "-m", "tiny", "-b", f"{session.url}/v1"]
    return [[binary("cline"), "auth", *provider, *place], [binary("cline"), *place, "-y", TASK]]


def aider(session: Session) -> Sequence[Sequence[str]]:
    options = ["--openai-api-base", f"{session.url}/v1", "--openai-api-key", "none", "--model", "openai/tiny"]
    options += [
        "--yes-always",
        "--no-check-update",
        "--no-show-model-warnings",
        "--analytics-disable",
        "--no-gitignore",
    ]
    return [[str(AIDER / "aider"), *options, "--message", TASK, NOTE]]


def goose(session: Session) -> Sequence[Sequence[str]]:
    player = [sys.executable, str(Path(__file__).parent / "goose_player.py"), session.url, str(session.home)]
    return [[*player, TASK], [*player, MORE]]


AGENTS: Final = (
    Agent(
        "Claude Code",
        "@anthropic-ai/claude-code",
        claude,
        "Messages",
        lambda session: {
            "ANTHROPIC_BASE_URL": session.url,
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    Agent("Codex CLI", "@openai/codex", codex, "Responses", lambda _: {"KVLOOM_KEY": "none"}),
    Agent(
        "OpenCode",
        "opencode-ai",
        opencode,
        "chat completions",
        lambda session: {"OPENCODE_CONFIG": str(session.home / "opencode.json")},
    ),
    Agent("Continue", "@continuedev/cli", continue_cli, "chat completions", not_offered=frozenset(("image read",))),
    Agent("Cline", "cline", cline, "chat completions", not_offered=frozenset(("taken up again",))),
    Agent(
        "aider",
        "aider-chat",
        aider,
        "chat completions",
        not_offered=frozenset(("image read", "cut off", "command run", "taken up again")),
    ),
    Agent("goose", "", goose, "chat completions"),
)


async def check(agent: Agent, root: Path) -> dict[str, bool]:
    """The outcome of each check that the agent offers."""
    folder, home = root / "work", root / "home"
    await asyncio.to_thread(prepare, folder, home)
    state_file = root / "state.json"
    fabric = await asyncio.to_thread(start_fabric, root, folder, state_file)
    try:
        session = Session(fabric.http_url, folder, home)
        others = ("OPENAI_", "ANTHROPIC_", "KVLOOM_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        own = {"HOME": str(home), "PWD": str(folder), "IS_SANDBOX": "1", **agent.environment(session)}
        commands = agent.commands(session)
        num_ended = [0]
        state = {"seen": [], "was_cut_off": False, "num_ended": 0}
        for command in commands:
            await run(command, folder, {**inherited, **NO_TELEMETRY, **own})
            if state_file.exists():
                state = json.loads(state_file.read_text())
            num_ended.append(state["num_ended"])
    finally:
        await asyncio.to_thread(fabric.stop)
    found = {
        "file read": "read" in state["seen"],
        "image read": "image" in state["seen"],
        "cut off": state["was_cut_off"],
        "file edited": (folder / NOTE).read_text() == f"{AFTER}\n",
        "command run": "run" in state["seen"],
        "ended": state["num_ended"] > 0,
        "taken up again": num_ended[-1] > num_ended[-2],
    }
    return {name: outcome for name, outcome in found.items() if name not in agent.not_offered}


def start_fabric(root: Path, folder: Path, state_file: Path) -> RunningFabric:
    """A fabric with the scripted engine, whose model `tiny` has the tokenizer of the built-in model and a large
    window."""
    model, site = root / "model", root / "site"
    model.mkdir()
    for file in MODEL.iterdir():
        if file.name != "config.json":
            (model / file.name).symlink_to(file)
    described = json.loads((MODEL / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(described | {"max_position_embeddings": WINDOW}))
    info = site / "kvloom_scripted-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvloom_scripted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(scripted_engine.ENTRY)
    config = root / "kvloom.toml"
    config.write_text(CONFIG.format(model=model, folder=folder, state_file=state_file))
    path = os.pathsep.join((str(site), str(REPOSITORY)))
    return RunningFabric.start(root / "data", "--config", str(config), PYTHONPATH=path)


def prepare(folder: Path, home: Path) -> None:
    folder.mkdir(parents=True)
    home.mkdir()
    (folder / NOTE).write_text(f"{BEFORE}\n")
    (folder / IMAGE).write_bytes(_PIXEL)
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)


async def run(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(TIME_LIMIT_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        output, _ = await process.communicate()
    sys.stdout.write(output.decode(errors="replace")[-2000:] + "\n")


def table(results: Mapping[Agent, Mapping[str, bool]]) -> str:
    rows = [["agent", "version", "API", *CHECKS], ["---"] * (len(CHECKS) + 3)]
    for agent, outcomes in results.items():
        marks = [{True: "pass", False: "FAIL", None: "-"}[outcomes.get(name)] for name in CHECKS]
        rows.append([agent.name, version_of(agent), agent.api, *marks])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def version_of(agent: Agent) -> str:
    if not agent.package:
        return "played"
    if agent.name != "aider":
        return json.loads((FOLDER / "node_modules" / agent.package / "package.json").read_text())["version"]
    question = f"import importlib.metadata; print(importlib.metadata.version({agent.package!r}))"
    done = subprocess.run(
        [str(AIDER / "python"), "-c", question], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


async def check_all(agents: Sequence[Agent]) -> dict[Agent, dict[str, bool]]:
    with tempfile.TemporaryDirectory(prefix="kvloom-agents-", dir=Path.home()) as folder:
        return {agent: await check(agent, Path(folder) / agent.name.replace(" ", "-")) for agent in agents}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.run_agents", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="agents whose names have one of these")
    parser.add_argument("--write-docs", action="store_true", help="write the table into docs/how-to/clients.md")
    options = parser.parse_args()
    words = [word.lower() for word in options.only]
    wanted = [agent for agent in AGENTS if not words or any(word in agent.name.lower() for word in words)]
    results = asyncio.run(check_all(wanted))
    written = table(results)
    sys.stdout.write(f"\n{written}\n")
    if options.write_docs:
        PAGE.write_text(with_table(PAGE.read_text(), written, MARK))
    return 0 if all(all(outcomes.values()) for outcomes in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
