"""`kvloom prices`: what tokens cost."""

from __future__ import annotations

import time
from typing import Any, Final

import click

from kvloom.v1.control_service_pb2 import Price
from tools.cli.tenants.directory import Directory, directory_options, json_option
from tools.cli.tenants.tables import Columns, show_list, show_one
from tools.cli.tenants.units import AMOUNT, PER_MILLION, moment, shown_nanos, shown_per_million, shown_time
from tools.failures import CommandError
from tools.options import option

COLUMNS: Final[Columns] = {
    "id": lambda one: one.id,
    "model": lambda one: one.model,
    "from": lambda one: shown_time(one.effective_from),
    "prompt": lambda one: shown_per_million(one.prompt_nanos),
    "cached": lambda one: shown_per_million(one.cached_nanos),
    "output": lambda one: shown_per_million(one.output_nanos),
    "request": lambda one: shown_nanos(one.request_nanos),
    "batch": lambda one: f"{one.batch_percent}%",
    "result cache": lambda one: f"{one.result_cache_percent}%",
}
PERCENT: Final = click.IntRange(0, 10_000)


@click.group()
def prices() -> None:
    """Show and set what tokens cost (`kvloom up --control`). Amounts are for a million tokens, in your currency."""


@prices.command("set")
@click.argument("model")
@option("--prompt", scope="prices", type=PER_MILLION, required=True, help="A million prompt tokens.")
@option("--output", scope="prices", type=PER_MILLION, required=True, help="A million output tokens.")
@option("--cached", scope="prices", type=PER_MILLION, help="A million cached prompt tokens.  [default: as --prompt]")
@option("--request", scope="prices", type=AMOUNT, default="0", help="Each request.  [default: 0]")
@option("--batch-percent", scope="prices", type=PERCENT, default=100, show_default=True, help="Requests of tier batch.")
@option(
    "--result-cache-percent",
    scope="prices",
    type=PERCENT,
    default=0,
    show_default=True,
    help="Answers from the result cache.",
)
@option("--from", "start", scope="prices", help="A date, a time, or a duration from now on.  [default: now]")
@json_option("prices")
@directory_options
def set_(
    model: str,
    prompt: int,
    output: int,
    cached: int | None,
    request: int,
    batch_percent: int,
    result_cache_percent: int,
    start: str | None,
    as_json: bool,
    directory: Directory,
) -> None:
    """Set the price of MODEL, of MODEL:ADAPTER, or of "*": all that have no price of their own.

    An earlier price holds until this one does, so that costs in the past stay as they were.
    """
    try:
        effective_from = time.time() if start is None else moment(start, time.time())
    except ValueError as error:
        raise CommandError(f"--from: {error}") from error
    given: dict[str, Any] = {} if cached is None else {"cached_nanos": cached}
    price = Price(
        model=model,
        effective_from=effective_from,
        prompt_nanos=prompt,
        output_nanos=output,
        request_nanos=request,
        batch_percent=batch_percent,
        result_cache_percent=result_cache_percent,
        **given,
    )
    show_one(directory.ask("CreatePrice", price=price).price, COLUMNS, as_json=as_json)


@prices.command("list")
@option("--model", scope="prices", default="", help="Only those of this model.")
@json_option("prices")
@directory_options
def list_(model: str, as_json: bool, directory: Directory) -> None:
    """List all prices, also earlier and later ones."""
    found = sorted(
        directory.list_all("ListPrices", "prices", model=model), key=lambda one: (one.model, one.effective_from)
    )
    empty = "there are no prices: nothing costs anything (kvloom prices set MODEL --prompt 0.15 --output 0.60)"
    show_list(found, COLUMNS, as_json=as_json, empty=empty)


@prices.command("delete")
@click.argument("price_id", metavar="ID")
@directory_options
def delete(price_id: str, directory: Directory) -> None:
    """Delete a price that has not been in force yet."""
    directory.ask("DeletePrice", id=price_id)
    click.echo(f"deleted {price_id}")
