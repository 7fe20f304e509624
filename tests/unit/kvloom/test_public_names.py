"""The public names of the SDK, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import kvloom

STREAMING = """
import asyncio, sys
import kvloom
assert not {"grpc", "google.protobuf"} & sys.modules.keys(), "importing kvloom loads gRPC"
from kvloom import ChatMessage, Client, KvloomError

async def main():
    async with Client("127.0.0.1:1", connect_timeout_seconds=0.1, max_retries=0) as client:
        for prompt in ({"token_ids": [1]}, {"text": "a"}, {"messages": [ChatMessage("user", "a")]}):
            try:
                async for delta in client.generate(model="m", **prompt):
                    pass
            except KvloomError:
                pass

asyncio.run(main())
print(*{name.partition(".")[0] for name in sys.modules})
"""
SERVICES_ONLY = {
    "aiohttp",
    "jinja2",
    "msgspec",
    "numpy",
    "prometheus_client",
    "redis",
    "structlog",
    "tokenizers",
    "uvloop",
}


def test_every_public_name_can_be_imported_and_is_listed() -> None:
    """`dir(kvloom)` is where a newcomer looks first."""
    assert dir(kvloom) == sorted(kvloom.__all__)
    for name in kvloom.__all__:
        assert getattr(kvloom, name) is not None
    assert kvloom.__version__[0].isdigit()


def test_the_client_loads_no_library_of_the_services() -> None:
    """`pip install kvloom` must be small: a client that streams needs gRPC and little else."""
    done = subprocess.run([sys.executable, "-c", STREAMING], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "grpc" in loaded
    assert not loaded & SERVICES_ONLY
