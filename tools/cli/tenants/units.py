"""Times, durations, amounts and limits as people write them."""

from __future__ import annotations

import datetime
import decimal
import re
from typing import Any, Final

import click

from kvloom.v1.control_service_pb2 import Limits as LimitsMessage
from kvloom_common.tenancy.limits import Limits
from tools.options import F, option

_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdwy])")
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0, "y": 365 * 86_400.0}
NANOS: Final = 10**9
_PER_MILLION: Final = 10**6


def duration(text: str) -> float:
    """Seconds of "90s", "12h", "30d". Raises ValueError."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no duration such as 90s, 30m, 12h, 30d or 1y")
    return float(match[1]) * _SECONDS[match[2]]


def moment(text: str, now: float) -> float:
    """Seconds since 1970 of a date or time (UTC unless it says otherwise), or of a duration from now on. Raises
    ValueError."""
    if _DURATION.fullmatch(text):
        return now + duration(text)
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a duration such as 30d nor a date such as 2027-01-31") from None
    return (found if found.tzinfo else found.replace(tzinfo=datetime.UTC)).timestamp()


def shown_time(seconds: float) -> str:
    """To the second, in UTC; "-" for 0."""
    if not seconds:
        return "-"
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def nanos(text: str) -> int:
    """An amount of the currency, in billionths. Raises ValueError."""
    return _whole(text, NANOS)


def nanos_per_token(text: str) -> int:
    """An amount for a million tokens, in billionths for one. Raises ValueError."""
    return _whole(text, NANOS // _PER_MILLION)


def shown_nanos(amount: int) -> str:
    return f"{decimal.Decimal(amount) / NANOS:f}"


def shown_per_million(amount: int) -> str:
    return f"{decimal.Decimal(amount) * _PER_MILLION / NANOS:f}"


def _whole(text: str, factor: int) -> int:
    try:
        amount = decimal.Decimal(text) * factor
    except decimal.InvalidOperation:
        raise ValueError(f"{text!r} is no amount") from None
    if not amount.is_finite() or amount < 0 or amount != amount.to_integral_value():
        raise ValueError(f"{text!r} is negative, or has more digits than are counted")
    return int(amount)


class Converted(click.ParamType):
    """A flag whose text one of these functions converts."""

    def __init__(self, name: str, convert: Any) -> None:
        self.name = name
        self._convert = convert

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._convert(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


AMOUNT: Final = Converted("amount", nanos)
PER_MILLION: Final = Converted("amount", nanos_per_token)
DURATION: Final = Converted("duration", duration)
_COUNT: Final = click.IntRange(0)

_FLAGS: Final[tuple[tuple[str, str, click.ParamType, str], ...]] = (
    ("--requests-per-minute", "requests_per_minute", _COUNT, "Requests in a minute."),
    ("--tokens-per-minute", "tokens_per_minute", _COUNT, "Prompt and output tokens in a minute."),
    ("--tokens-per-day", "tokens_per_day", _COUNT, "Tokens in a day of UTC, exactly."),
    ("--max-concurrent-requests", "max_concurrent_requests", _COUNT, "Requests that run at a time."),
    ("--max-prompt-tokens", "max_prompt_tokens", _COUNT, "Tokens of a prompt."),
    ("--max-output-tokens", "max_output_tokens", _COUNT, "Tokens of an answer."),
    ("--monthly-budget", "monthly_budget_nanos", AMOUNT, "Costs in a month of UTC, exactly, in the currency."),
    ("--cached-token-percent", "cached_token_percent", _COUNT, "What a cached prompt token counts, of 100."),
    ("--reasoning-token-percent", "reasoning_token_percent", _COUNT, "What a token of reasoning counts, of 100."),
)

_KV_SHARE: Final = "kv_share_percent"
_OPTIONAL: Final = frozenset(field.name for field in LimitsMessage.DESCRIPTOR.fields if field.has_presence)


def limit_options(scope: str) -> Any:
    """Flags of all limits, given to the command as arguments with the names of the message's fields."""

    def add(function: F) -> F:
        function = click.option(
            "--shadow/--no-shadow",
            envvar=f"KVLOOM_{scope.upper()}_SHADOW",
            show_envvar=True,
            default=None,
            help="Refuse nothing; count what would be refused.",
        )(function)
        for flag, name, kind, text in reversed(_FLAGS):
            function = option(flag, name, scope=scope, type=kind, help=f"{text} 0: no limit.")(function)
        return function

    return add


def kv_share_option(function: F) -> F:
    """The flag of the one limit that keys do not have."""
    text = "The guaranteed part of every shard's KV blocks, in percent; not for keys. 0: no share."
    return option("--kv-share", _KV_SHARE, scope="limits", type=_COUNT, help=text)(function)


def given_limits(flags: dict[str, Any]) -> dict[str, Any]:
    """Take the limits that were given out of a command's arguments."""
    names = [*(name for _, name, _, _ in _FLAGS), "shadow", _KV_SHARE]
    return {name: value for name in names if (value := flags.pop(name, None)) is not None}


def shown_limits(limits: Any) -> str:
    """A message `Limits` in one line; "-" if it limits nothing."""
    shown: list[str] = []
    for name in Limits.__struct_fields__:
        value: Any = getattr(limits, name)
        if value == getattr(Limits(), name) or (name in _OPTIONAL and not limits.HasField(name)):
            continue
        if name == "monthly_budget_nanos":
            shown.append(f"monthly_budget={shown_nanos(value)}")
        else:
            shown.append(name if value is True else f"{name}={value}")
    return " ".join(shown) or "-"
