"""A resolver whose answers a test chooses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence


class FakeDns:
    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}
        """By name. Others have none."""
        self.failure: OSError | None = None
        """What queries end with."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_queries = 0

    async def resolve(self, name: str) -> Sequence[str]:
        self.num_queries += 1
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        if not self.addresses.get(name):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return list(self.addresses[name])
