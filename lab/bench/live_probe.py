"""`python -m lab.bench.live_probe HOST PORT`: asks an edge for /live every few milliseconds until its input ends, and
prints how long each answer took, in milliseconds. A process of its own, so that it is late for no other reason."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Final

PERIOD_SECONDS: Final = 0.005
_REQUEST: Final = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"


async def probe(host: str, port: int) -> list[float]:
    loop = asyncio.get_running_loop()
    ended = loop.run_in_executor(None, sys.stdin.buffer.read)
    reader, writer = await asyncio.open_connection(host, port)
    took_ms: list[float] = []
    while not ended.done():
        begun_at = time.perf_counter()
        writer.write(_REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        took_ms.append(round((time.perf_counter() - begun_at) * 1e3, 3))
        await asyncio.sleep(PERIOD_SECONDS)
    writer.close()
    return took_ms


if __name__ == "__main__":
    print(json.dumps(asyncio.run(probe(sys.argv[1], int(sys.argv[2])))))
