"""Runs coding agents, each through one session with a scripted model (scripted_agent.py): it reads a file and an image,
is cut off in the middle of a call, edits the file, runs a command, and the session is taken up again.

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

from tests.clients.results import with_table
from tests.clients.run import ENVIRONMENTS, NO_TELEMETRY, PAGE
from tests.clients.scripted_agent import AFTER, BEFORE, IMAGE, NOTE, ScriptedAgent, scripted_agent

FOLDER: Final = Path(__file__).parent / "agents"
AIDER: Final = ENVIRONMENTS / "aider" / "bin"
TIME_LIMIT_SECONDS: Final = 120.0
"""For one command."""
MARK: Final = "agents"
CHECKS: Final = ("file read", "image read", "cut off", "file edited", "command run", "ended", "taken up again")
TASK: Final = f"Read {NOTE}, look at {IMAGE}, edit the note and run a command."
MORE: Final = "Go on."
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
    """Its package, as the registry names it."""
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
)


async def check(agent: Agent, root: Path) -> dict[str, bool]:
    """The outcome of each check that the agent offers."""
    folder, home = root / "work", root / "home"
    await asyncio.to_thread(prepare, folder, home)
    model = ScriptedAgent(folder)
    async with scripted_agent(model) as url:
        session = Session(url, folder, home)
        others = ("OPENAI_", "ANTHROPIC_", "KVLOOM_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        own = {"HOME": str(home), "PWD": str(folder), "IS_SANDBOX": "1", **agent.environment(session)}
        commands = agent.commands(session)
        num_ended = [0]
        for command in commands:
            await run(command, folder, {**inherited, **NO_TELEMETRY, **own})
            num_ended.append(model.num_ended)
    found = {
        "file read": "read" in model.seen,
        "image read": "image" in model.seen,
        "cut off": model.was_cut_off,
        "file edited": (folder / NOTE).read_text() == f"{AFTER}\n",
        "command run": "run" in model.seen,
        "ended": model.num_ended > 0,
        "taken up again": num_ended[-1] > num_ended[-2],
    }
    return {name: outcome for name, outcome in found.items() if name not in agent.not_offered}


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
    parser.add_argument("--write-docs", action="store_true", help="write the table into docs/clients.md")
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
