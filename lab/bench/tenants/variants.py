"""The fabrics and the keys that `kvloom-lab bench tenants` compares, all up at the same time: one fabric without
tenants, and one with them, whose keys have more and more limits. No limit is ever reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import urllib.error
import urllib.request
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from lab.bench.data_plane.client import drive
from lab.bench.data_plane.run import BenchPlan, fabric_config, fabric_pids
from lab.bench.data_plane.workloads import Workload
from tools.failures import CommandError
from tools.supervisor.child import bound_command
from tools.supervisor.child_fabric import child_fabric

OFF: Final = "off"
IDENTITY: Final = "identity"
KEY_LIMITS: Final = "5 limits"
ALL_LIMITS: Final = "15 limits"
ABOUT: Final[Mapping[str, str]] = {
    OFF: "no tenants",
    IDENTITY: "a key without limits; requests are metered and priced",
    KEY_LIMITS: "and five limits of the key: requests, tokens, slots, tokens per day, monthly budget",
    ALL_LIMITS: "and the same five of its project and of its organisation: everything is on",
}
_LIMITS: Final = (
    *("--requests-per-minute", "10000000"),
    *("--tokens-per-minute", "1000000000"),
    *("--max-concurrent-requests", "10000"),
    *("--tokens-per-day", "1000000000000"),
    *("--monthly-budget", "1000000"),
)
_PRICES: Final = ("prices", "set", "*", "--prompt", "0.15", "--output", "0.60")
_COMMAND_SECONDS: Final = 60.0
_KEY_SECONDS: Final = 30.0
"""How long a new key may take until the edge knows it."""
_ASK_AGAIN_SECONDS: Final = 0.1


class Variant(msgspec.Struct, frozen=True):
    """A measured variant: requests with this key to this fabric."""

    plan: BenchPlan
    url: str
    data_dir: Path
    api_key: str = ""

    async def measure(self, workload: Workload, seed: int) -> dict[str, Any]:
        """The client's figures. Raises CommandError."""
        return await drive(self.plan.model, workload, self.url, fabric_pids(self.data_dir), seed, self.api_key)


@contextlib.asynccontextmanager
async def variants(plan: BenchPlan, workload: Workload, home: Path) -> AsyncIterator[Mapping[str, Variant]]:
    """Start the fabrics, whose engines have the workload's pace, with their files in `home`. The reference is the first
    one. Raises CommandError."""
    folders = home / "off", home / "tenants"
    async with contextlib.AsyncExitStack() as stack:
        urls: list[str] = []
        for folder in folders:
            folder.mkdir()
            config = fabric_config(plan, workload, folder)
            config.control.enabled = folder is folders[1]
            urls.append(await stack.enter_async_context(child_fabric(config, folder)))
        keys = await _make_keys(folders[1])
        found = {OFF: Variant(plan, urls[0], folders[0])}
        for name, key in keys.items():
            await _await_key(urls[1], key)
            found[name] = Variant(plan, urls[1], folders[1], key)
        yield found


async def _make_keys(data_dir: Path) -> dict[str, str]:
    """By variant; each of a project and an organisation of its own."""
    await _kvloom(data_dir, *_PRICES)
    limits_of = {IDENTITY: (), KEY_LIMITS: _LIMITS, ALL_LIMITS: _LIMITS}
    keys: dict[str, str] = {}
    for name, limits in limits_of.items():
        project = f"bench-{len(keys)}/web"
        made = await _kvloom(data_dir, "keys", "create", "--project", project, "--create", "--json", *limits)
        keys[name] = json.loads(made)["secret"]
        if name == ALL_LIMITS:
            for account in (f"tenant:{project}", f"org:{project.partition('/')[0]}"):
                await _kvloom(data_dir, "limits", "set", account, *_LIMITS)
    return keys


async def _kvloom(data_dir: Path, *arguments: str) -> bytes:
    """Run a command on a fabric, as its operators do. Returns what it prints. Raises CommandError."""
    command = (sys.executable, "-P", "-m", "tools.cli.commands", *arguments, "--data-dir", str(data_dir))
    process = await asyncio.create_subprocess_exec(*bound_command(command), stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(_COMMAND_SECONDS):
            output, errors = await process.communicate()
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise CommandError(f"kvloom {' '.join(arguments[:2])} did not end in {_COMMAND_SECONDS:g} s") from error
    if process.returncode:
        raise CommandError(f"kvloom {' '.join(arguments[:2])} failed: {errors.decode(errors='replace').strip()}")
    return output


async def _await_key(url: str, key: str) -> None:
    """Until the edge knows the key. Raises CommandError."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        async with asyncio.timeout(_KEY_SECONDS):
            while not await asyncio.to_thread(_is_accepted, request):  # noqa: ASYNC110  (only the edge can say so)
                await asyncio.sleep(_ASK_AGAIN_SECONDS)
    except TimeoutError as error:
        raise CommandError(f"a new key was not accepted within {_KEY_SECONDS:g} s") from error


def _is_accepted(request: urllib.request.Request) -> bool:
    try:
        with urllib.request.urlopen(request, timeout=_KEY_SECONDS):
            return True
    except urllib.error.URLError:
        return False
