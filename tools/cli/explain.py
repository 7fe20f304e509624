"""`kvloom explain`: why a request went where it went, or where one would go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import msgspec
from google.protobuf import json_format
from rich.console import Console

from kvloom.client.client import Client
from kvloom.client.generate_request import GenerateOptions
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import ExplainResponse, PlanResponse
from tools.cli.explain_view import print_explanation, print_plan
from tools.cli.router_client import choose_router_addresses, first_model
from tools.failures import CommandError
from tools.options import config_option, data_dir_option, option

MAX_WIDTH: Final = 1000


@click.command()
@option("--prompt", scope="explain", metavar="TEXT", help="Where would this question go? Nothing is placed.")
@option("--raw", scope="explain", is_flag=True, help="Take the prompt as it is, without the model's chat template.")
@option(
    "--tokens",
    scope="explain",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Instead of a prompt: token ids, as a JSON array or one after the other.",
)
@option("--max-tokens", scope="explain", type=click.IntRange(min=1), help="Length of the answer at most.")
@option("--model", scope="explain", metavar="NAME", help="Name of a served model.  [default: the first one]")
@option("--request-id", scope="explain", metavar="ID", help="Why did this request go where it went?")
@option("--json", "as_json", scope="explain", is_flag=True, help="One JSON object on stdout.")
@option("--router-address", metavar="HOST:PORT", help="[default: that of the fabric in the data directory]")
@data_dir_option
@config_option
def explain(
    prompt: str | None,
    raw: bool,
    tokens: Path | None,
    max_tokens: int | None,
    model: str | None,
    request_id: str | None,
    as_json: bool,
    router_address: str | None,
    data_dir: Path | None,
    config_file: Path | None,
) -> None:
    """Show every shard as the router sees it for a request: overlap, queue, predicted time to first token, each term of
    the cost, why it cannot take it, which one is picked and what that gives up.

    Over HTTP a request's ID is the "id" of its answer.
    """
    if sum(given is not None for given in (prompt, tokens, request_id)) != 1:
        raise click.UsageError("give one of --prompt, --tokens and --request-id")
    options = GenerateOptions(model=model or "")
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if tokens is not None:
        options["token_ids"] = read_token_ids(tokens)
    elif prompt is not None and raw:
        options["text"] = prompt
    elif prompt is not None:
        options["messages"] = [{"role": "user", "content": prompt}]
    addresses = choose_router_addresses(router_address, data_dir, config_file)
    answer = asyncio.run(_ask_any(addresses, request_id, options))
    if as_json:
        _print_json(answer)
    elif isinstance(answer, ExplainResponse):
        print_explanation(answer, _console())
    else:
        print_plan(answer, _console())


def read_token_ids(path: Path) -> list[int]:
    """Raises CommandError."""
    try:
        text = path.read_text()
        found = msgspec.json.decode(text, type=list[int]) if text.lstrip()[:1] == "[" else list(map(int, text.split()))
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise CommandError(f"{path} does not hold token ids: {error}") from error
    if not found:
        raise CommandError(f"{path} holds no token ids")
    return found


async def _ask_any(
    addresses: Sequence[str], request_id: str | None, options: GenerateOptions
) -> PlanResponse | ExplainResponse:
    """Only the router that placed a request remembers it; any of them can plan. Raises CommandError."""
    # The first address is that of all of them: with several, which one answers there is chance.
    candidates = addresses[1:] or addresses if request_id is not None else addresses[:1]
    errors: list[KvloomError] = []
    for address in candidates:
        try:
            return await _ask(address, request_id, options)
        except KvloomError as error:
            errors.append(error)
    told = [error for error in errors if error.reason != ErrorReason.ERROR_REASON_ROUTER_LOST]
    raise CommandError(told[0].message if told else f"no router answers at {', '.join(candidates)}") from errors[0]


async def _ask(address: str, request_id: str | None, options: GenerateOptions) -> PlanResponse | ExplainResponse:
    async with Client(address, client_id="explain") as client:
        if request_id is not None:
            return await client.explain(request_id)
        if not options["model"]:
            options["model"] = await first_model(client)
        return await client.plan(**options)


def _print_json(answer: PlanResponse | ExplainResponse) -> None:
    """The message of router_service.proto, with its field names."""
    fields = json_format.MessageToDict(
        answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    print(msgspec.json.encode(fields).decode())


def _console() -> Console:
    """Rows are as wide as they need to be: a table that hides numbers explains nothing. `less -S` scrolls sideways."""
    return Console(highlight=False, soft_wrap=True, width=MAX_WIDTH)
