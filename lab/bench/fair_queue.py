"""`kvloom-lab bench fair-queue`: what the next request costs to find among those of many tenants."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from router.core.dispatch.service_counters import ServiceCounters
from router.core.dispatch.waiting_queues import WaitingQueues
from router.core.events import ChoiceSpec, Request
from router.core.live import Client, LiveRequest, QueueId
from tools.options import option

_QUEUE: Final = QueueId("m")
_MEAN_TOKENS: Final = 2000


@click.command()
@option(
    "--tenants",
    type=click.IntRange(1),
    multiple=True,
    default=(1, 10, 1000, 10_000),
    show_default=True,
    scope="bench-fair-queue",
    help="How many tenants have requests waiting. May be given several times.",
)
@option("--takes", type=click.IntRange(1), default=5000, show_default=True, scope="bench-fair-queue")
@option("--seed", type=click.IntRange(0), default=1, show_default=True, scope="bench-fair-queue")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def bench_fair_queue(tenants: Sequence[int], takes: int, seed: int, as_json: bool) -> None:
    """Measure the CPU time that a router needs to find the request of the tenant that has had least service, and to
    queue another one, while requests of many tenants wait."""
    rows = [_measure(num_tenants, takes, seed) for num_tenants in tenants]
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = Table()
    for heading in ("tenants that wait", "µs per request taken", "µs per request queued"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(str(row["tenants"]), f"{row['take_us']:.1f}", f"{row['push_us']:.1f}")
    Console().print(table)


def _measure(num_tenants: int, num_takes: int, seed: int) -> dict[str, Any]:
    """Two requests of each tenant wait. One is taken, dispatched, and another one of its tenant queued."""
    rng = random.Random(seed)
    service = ServiceCounters()
    queues = WaitingQueues(service)
    requests = (_request(number, f"tenant-{number % num_tenants}") for number in range(2 * num_tenants + num_takes))
    for _ in range(2 * num_tenants):
        queues.push(next(requests), _QUEUE)
    taking = pushing = 0
    for live in requests:
        began = time.process_time_ns()
        taken = queues.take(_QUEUE, lambda _: True)
        taking += time.process_time_ns() - began
        assert taken is not None
        service.note_dispatch(taken, rng.randrange(2 * _MEAN_TOKENS))
        began = time.process_time_ns()
        queues.push(live, _QUEUE)
        pushing += time.process_time_ns() - began
    return {
        "tenants": num_tenants,
        "take_us": round(taking / num_takes / 1000, 2),
        "push_us": round(pushing / num_takes / 1000, 2),
    }


def _request(number: int, tenant: str) -> LiveRequest:
    request = Request(f"r{number}", "c", "m", [1], "", [ChoiceSpec(number, 0)], tenant=tenant)
    return LiveRequest(request, Client("c"), 0.0)
