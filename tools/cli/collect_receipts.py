"""`kvloom receipts collect`: asks a running fabric for short answers, whose receipts can then be verified."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import click

from kvloom.client.client import Client
from kvloom.errors import KvloomError
from tools.cli.router_client import RouterFlags, client_options, first_model
from tools.failures import CommandError
from tools.options import option
from tools.receipts.collect import collected


@click.command()
@option(
    "--out",
    scope="receipts",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to which the receipts are appended, one a line.",
)
@option("--count", scope="receipts", type=click.IntRange(1, 100_000), default=100, show_default=True, help="How many.")
@option("--model", scope="receipts", help="The name of a served model, or MODEL:ADAPTER.  [default: the first one]")
@option(
    "--max-tokens",
    scope="receipts",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="The largest number of tokens of an answer.",
)
@option("--seed", scope="receipts", type=click.IntRange(0, 2**32), default=0, show_default=True, help="Draws prompts.")
@client_options
def collect_receipts(
    out: Path,
    count: int,
    model: str | None,
    max_tokens: int,
    seed: int,
    reach: RouterFlags,
) -> None:
    """Ask a running fabric for short answers, and keep their receipts: `verify` then checks a sample of them."""
    routers = reach.routers()

    async def run() -> int:
        num_receipts = 0
        addresses = routers.own_addresses or [routers.any_address]
        async with Client(addresses, client_id="receipts", open_channel=routers.open_channel) as client:
            found = collected(client, model or await first_model(client), count, max_tokens, seed)
            with out.open("ab") as file:
                async with contextlib.aclosing(found):
                    async for receipt in found:
                        file.write(receipt + b"\n")
                        num_receipts += 1
        return num_receipts

    try:
        num_receipts = asyncio.run(run())
    except KvloomError as error:
        raise CommandError(error.message) from error
    except OSError as error:
        raise CommandError(f"{out} cannot be written: {error.strerror}") from error
    print(f"saved {num_receipts} to {out}")
