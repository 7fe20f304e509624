"""Runs the checks of all clients against one fabric with a real model and one edge with a scripted one.

`python -m tests.clients.run [--only NAME ...] [--write-docs]`, as `make test-clients` does once it has installed the
clients. Prints a table of clients and checks, and exits with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.clients.clients import CLIENTS, Client
from tests.clients.results import ClientResult, read_report, table, with_table
from tests.clients.scripted_edge import scripted_edge
from tests.e2e.fabric import REPOSITORY, RunningFabric, kvloom_environment, run_kvloom

FOLDER = Path(__file__).parent
ENVIRONMENTS = REPOSITORY / ".venv-clients"
"""A virtual environment for each requirements file in `python/`."""
PAGE = REPOSITORY / "docs" / "how-to" / "clients.md"
TIME_LIMIT_SECONDS = 600.0
"""For one client."""
NO_TELEMETRY = {
    "DO_NOT_TRACK": "1",
    "ANONYMIZED_TELEMETRY": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LOGFIRE_IGNORE_NO_CONFIG": "1",
}
"""The clients talk to kvloom alone."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.run", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="clients whose names have one of these")
    parser.add_argument("--write-docs", action="store_true", help="write the table into docs/how-to/clients.md")
    options = parser.parse_args()
    wanted = [client for client in CLIENTS if _is_wanted(client, options.only)]
    if not wanted:
        parser.error(f"no client has {' or '.join(options.only)} in its name")
    with tempfile.TemporaryDirectory(prefix="kvloom-clients-") as folder:
        results = asyncio.run(check_all(wanted, Path(folder)))
    written = table(results)
    print(f"\n{written}")
    if options.write_docs:
        PAGE.write_text(with_table(PAGE.read_text(), written))
    return 0 if all(result.passed for result in results) else 1


def _is_wanted(client: Client, words: list[str]) -> bool:
    return not words or any(word.lower() in client.name.lower() for word in words)


async def check_all(clients: list[Client], folder: Path) -> list[ClientResult]:
    """One after the other, so that each can tell when its aborted requests have ended."""
    key = run_kvloom("keys", "add", "client", "--file", str(folder / "keys"), env=kvloom_environment(folder))
    if key.returncode:
        raise SystemExit(key.stderr)
    fabric = await asyncio.to_thread(
        RunningFabric.start, folder / "data", "--shards", "1", "--api-keys", str(folder / "keys")
    )
    try:
        async with scripted_edge() as scripted_url:
            servers = {
                "KVLOOM_URL": fabric.http_url,
                "KVLOOM_API_KEY": key.stdout.strip(),
                "KVLOOM_SCRIPTED_URL": scripted_url,
            }
            return [await check(client, folder, servers) for client in clients]
    finally:
        await asyncio.to_thread(fabric.stop)


async def check(client: Client, folder: Path, servers: Mapping[str, str]) -> ClientResult:
    print(f"== {client.name}", flush=True)
    report = folder / f"{client.environment}-{client.file}.xml"
    # The clients must not import from this repository, nor read anyone's keys.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith(("OPENAI_", "ANTHROPIC_", "KVLOOM_"))
    }
    process = await asyncio.create_subprocess_exec(
        *command(client, report), cwd=FOLDER, env={**inherited, **NO_TELEMETRY, **servers}
    )
    try:
        async with asyncio.timeout(TIME_LIMIT_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
        print(f"{client.name}: stopped after {TIME_LIMIT_SECONDS:g} s", file=sys.stderr)
        report.unlink(missing_ok=True)
    return ClientResult(client, version_of(client), read_report(report))


def command(client: Client, report: Path) -> list[str]:
    if client.environment == "node":
        reporters = ["--test-reporter=junit", f"--test-reporter-destination={report}"]
        shown = ["--test-reporter=spec", "--test-reporter-destination=stdout"]
        return ["node", "--test", *shown, *reporters, f"node/{client.file}"]
    options = ["-q", "--tb=short", "-c", "python/pytest.ini", f"--junitxml={report}"]
    return [python_of(client), "-m", "pytest", *options, f"python/{client.file}"]


def python_of(client: Client) -> str:
    return str(ENVIRONMENTS / client.environment / "bin" / "python")


def version_of(client: Client) -> str:
    """Of the first package alone, or of all with their names."""
    versions = {package: _version(client, package) for package in client.packages}
    if len(versions) == 1:
        return next(iter(versions.values()))
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def _version(client: Client, package: str) -> str:
    if client.environment == "node":
        described = json.loads((FOLDER / "node" / "node_modules" / package / "package.json").read_text())
        return described["version"]
    question = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    done = subprocess.run([python_of(client), "-c", question], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
