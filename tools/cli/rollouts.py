"""`kvloom models rollout`, `rollback` and `history`: new versions of models that are served."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import click
import msgspec

from kvloom.v1.supervisor_service_pb2 import StartRolloutRequest
from tools.cli.running import running_folder
from tools.failures import CommandError
from tools.options import FabricFlags, fabric_options, option
from tools.supervisor.flag_model import flag_model
from tools.supervisor.models.history import ModelEvent, ModelHistory
from tools.supervisor.rollout.judge import RolloutLimits
from tools.supervisor.rollout.plan import MAX_HOLD_SECONDS, MAX_SHARDS
from tools.supervisor.service.client import SupervisorClient, local_supervisor

_DEFAULTS: Final = RolloutLimits()
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType):
    """Seconds, or a number with a unit: 500ms, 30s, 5m, 1h."""

    name = "duration"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if not isinstance(value, str):
            return float(value)
        number = value.rstrip("msh")
        try:
            seconds = float(number) * _UNITS[value[len(number) :] or "s"]
        except (KeyError, ValueError):
            self.fail(f"{value!r} is no time, such as 30s or 5m", param, ctx)
        if not 0 <= seconds <= MAX_HOLD_SECONDS:
            self.fail(f"{value!r} is not between 0 and 24h", param, ctx)
        return seconds


class StepPercentages(click.ParamType):
    """Percentages, with commas."""

    name = "percent,..."

    def convert(
        self, value: str | tuple[float, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(float(part.strip().rstrip("%")) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} are no percentages, such as 1,10,50,100", param, ctx)


@click.command("rollout")
@click.argument("version", metavar="NAME@VERSION")
@option("--path", scope="models", default="", help="The files of the new version.  [default: the registered ones]")
@option("--shards", scope="models", type=click.IntRange(1, MAX_SHARDS), help="The number of its shards.")
@option(
    "--set",
    "settings",
    scope="models",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of [shard] that the new version has, for example torch.weights=int8. May be repeated.",
)
@option(
    "--steps",
    scope="models",
    type=StepPercentages(),
    default="1,10,50,100",
    show_default=True,
    help="The share in each step.",
)
@option(
    "--hold", scope="models", type=Duration(), default="30s", show_default=True, help="How long a step lasts at least."
)
@option(
    "--timeout-seconds",
    scope="models_rollout",
    type=click.FloatRange(0, MAX_HOLD_SECONDS),
    default=600.0,
    show_default=True,
    help="How long answers of the version that goes may take to end.",
)
@option(
    "--max-error-rate-increase",
    scope="models",
    type=click.FloatRange(0, 1),
    default=_DEFAULTS.max_error_rate_increase,
    show_default=True,
    help="By how much its error rate may exceed that of the old version: 0.02 are 2 of 100 requests.",
)
@option(
    "--max-ttft-ratio",
    scope="models",
    type=click.FloatRange(0),
    default=_DEFAULTS.max_ttft_ratio,
    show_default=True,
    help="How many times as long as with the old version its first token may take.",
)
@option(
    "--max-likelihood-gap",
    scope="models",
    type=click.FloatRange(0),
    default=0.1,
    show_default=True,
    help="How much less likely it may find the answers of the old version, in nats per token.",
)
@option(
    "--scored-share",
    scope="models",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="The share of the old version's answers that it scores for this, for example 0.1. 0: none.",
)
@option(
    "--min-requests",
    scope="models",
    type=click.IntRange(0, 10**9),
    default=_DEFAULTS.min_requests,
    show_default=True,
    help="How many requests it needs in each step.",
)
@option("--detach", scope="models", is_flag=True, help="Return when the rollout has begun.")
@fabric_options
def roll_out(
    version: str,
    path: str,
    shards: int | None,
    settings: tuple[str, ...],
    steps: tuple[float, ...],
    hold: float,
    timeout_seconds: float,
    max_error_rate_increase: float,
    max_ttft_ratio: float,
    max_likelihood_gap: float,
    scored_share: float,
    min_requests: int,
    detach: bool,
    fabric: FabricFlags,
) -> None:
    """Replace what serves NAME by a new version, step by step.

    The new version is loaded beside the old one and gets a growing share of the sessions. If it fails more requests,
    answers later or finds the old version's answers unlikely, it is taken back by itself; Ctrl-C or `kvloom models
    rollback` take it back too. At the end the old version is unloaded. No stream breaks. The running fabric does all
    this, whether this command runs or not.
    """
    request = StartRolloutRequest(
        version=version,
        path=flag_model(path).path if path else "",
        num_shards=shards,
        shard_settings=settings,
        steps=steps,
        hold_seconds=hold,
        drain_seconds=timeout_seconds,
        max_error_rate_increase=max_error_rate_increase,
        max_ttft_ratio=max_ttft_ratio,
        max_likelihood_gap=max_likelihood_gap,
        scored_share=scored_share,
        min_requests=min_requests,
    )

    async def run() -> None:
        async with local_supervisor(running_folder(fabric).run_dir) as supervisor:
            await supervisor.start_rollout(request)
            if not detach:
                await _follow(supervisor, version)

    asyncio.run(run())
    click.echo(f"the rollout of {version} has begun (kvloom status)" if detach else f"rolled out {version}")


async def _follow(supervisor: SupervisorClient, version: str) -> None:
    """Ctrl-C takes the new version back, and this waits until that is done; a second one only ends the command. Raises
    CommandError."""
    num_told, num_seen = 0, 0

    def tell(text: str) -> None:
        nonlocal num_told, num_seen
        num_seen += 1
        if num_seen > num_told:
            num_told = num_seen
            click.echo(f"  {text}")

    try:
        await supervisor.follow_rollout(version, tell)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        await supervisor.roll_back(version)
        num_seen = 0  # it is told from the beginning
        await supervisor.follow_rollout(version, tell)


@click.command("rollback")
@click.argument("name")
@fabric_options
def roll_back(name: str, fabric: FabricFlags) -> None:
    """Take back the new version of NAME that is being rolled out. Returns when only the old one is served."""

    async def run() -> None:
        async with local_supervisor(running_folder(fabric).run_dir) as supervisor:
            await supervisor.roll_back(name)
            try:
                await supervisor.follow_rollout(name, lambda _: None)
            except CommandError as error:
                click.echo(error.message)

    asyncio.run(run())


@click.command("history")
@click.argument("name", required=False, default="")
@option("--json", "as_json", scope="models_history", is_flag=True, help="Print a JSON array.")
@fabric_options
def history(name: str, as_json: bool, fabric: FabricFlags) -> None:
    """List what has happened to the models of this data directory, or to the versions of NAME, the latest last."""
    events = ModelHistory(fabric.home()).events(name)
    if as_json:
        click.echo(msgspec.json.encode(events).decode())
        return
    for event in events:
        click.echo(_line(event))
    if not events:
        click.echo("nothing has happened to " + (name or "any model"))


def _line(event: ModelEvent) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
    over = f" over {event.old}" * bool(event.old)
    step = f", step {event.step} of {event.num_steps}" * bool(event.step)
    reason = f": {event.reason}" * bool(event.reason)
    return f"{at}  {event.event:8} {event.model}{over}: {event.outcome}{step}{reason}"
