"""Finds ports for processes that start a moment later."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tools.failures import CommandError

_EPHEMERAL_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_FIRST_EPHEMERAL: Final = 32768
_FIRST: Final = 10_000
"""Well-known services have lower ports."""

_MAX_TRIES: Final = 200


def pick_free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns consecutive ports on which no process listens now. They are lower than those that the system hands out
    by itself: an outgoing connection of any process could otherwise have one of them before its owner starts, or while
    its owner restarts. They are chosen at random, so that two fabrics that start at once hardly choose the same. Raises
    CommandError if so many cannot be found."""
    for _ in range(_MAX_TRIES):
        start = random.randrange(_FIRST, _first_ephemeral_port() - count)
        ports = list(range(start, start + count))
        if _all_free(ports, host):
            return ports
    raise CommandError(f"{host} has no {count} free ports in a row between {_FIRST} and {_first_ephemeral_port()}")


def _first_ephemeral_port() -> int:
    try:
        first = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # This is another system than Linux.
        return _USUAL_FIRST_EPHEMERAL
    return first if first >= 2 * _FIRST else 65536  # Where nearly all ports are handed out, there are no better ones.


def _all_free(ports: list[int], host: str) -> bool:
    with ExitStack() as stack:
        for port in ports:
            try:
                stack.enter_context(socket.create_server((host, port)))
            except OSError:
                return False
    return True
