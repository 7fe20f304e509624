"""Reads the metrics of all endpoints again and again: their load, and whether they are there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import aiohttp
import structlog

from tools.gateway.engine_load import ScrapedLoad, engine_load_in
from tools.gateway.pool import PoolEndpoint

log = structlog.get_logger()

SCRAPE_SECONDS: Final = 0.5
"""Between two readings. What was placed meanwhile is known anyway."""
TIMEOUT_SECONDS: Final = 2.0
MAX_BYTES: Final = 8 * 2**20


async def read_load(session: aiohttp.ClientSession, url: str) -> ScrapedLoad:
    """Raises ValueError, OSError, TimeoutError or aiohttp.ClientError."""
    async with session.get(url, allow_redirects=False) as response:
        response.raise_for_status()
        text = bytearray()
        async for part in response.content.iter_chunked(2**16):
            text += part
            if len(text) > MAX_BYTES:
                raise ValueError(f"its metrics are longer than {MAX_BYTES} bytes")
    return engine_load_in(text.decode())


async def follow_load(
    session: aiohttp.ClientSession,
    endpoint: PoolEndpoint,
    use: Callable[[ScrapedLoad | None], None],
    interval_seconds: float = SCRAPE_SECONDS,
) -> None:
    """Read the load of an endpoint until cancelled, and pass it on; None: it could not be read twice in a row, or
    refuses connections."""
    num_failures = 0
    while True:
        try:
            use(await read_load(session, endpoint.metrics_url))
            num_failures = 0
        except (ValueError, OSError, aiohttp.ClientError) as error:
            num_failures += 1
            if num_failures == 1:
                log.warning("endpoint_read_failed", address=endpoint.address, cause=str(error) or repr(error))
            if num_failures > 1 or isinstance(error, aiohttp.ClientConnectorError):
                use(None)
        await asyncio.sleep(interval_seconds)
