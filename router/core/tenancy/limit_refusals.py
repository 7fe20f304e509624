"""The errors of requests above a limit."""

from __future__ import annotations

from typing import Final

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from router.core.lease_messages import LeaseKind, LeaseName

_WHAT: Final = {
    LeaseKind.REQUESTS: "requests per minute",
    LeaseKind.TOKENS: "tokens per minute",
    LeaseKind.SLOTS: "concurrent requests",
    LeaseKind.DAY_TOKENS: "tokens per day",
    LeaseKind.MONTH_NANOS: "budget of the month",
}


def rate_limited(name: LeaseName, limit: int, retry_after_seconds: float) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_RATE_LIMITED,
        f"The limit of {_of(name)} is reached: {limit} {_WHAT[name.kind]}.",
        retry_after_seconds=retry_after_seconds,
        limit=limit_name(name),
    )


def never_admitted(name: LeaseName, limit: int, num_tokens: int) -> KvloomError:
    """The prompt alone is more than a minute's tokens."""
    return KvloomError(
        ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE,
        f"The prompt counts as {num_tokens} tokens, but {_of(name)} may use {limit} tokens per minute.",
        limit=limit_name(name),
    )


def prompt_too_long(account: str, limit: int, num_tokens: int) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE,
        f"The prompt has {num_tokens} tokens, but those of {account} may have {limit}.",
        limit=f"{account} max_prompt_tokens",
    )


def budget_exhausted(name: LeaseName) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_BUDGET_EXHAUSTED,
        f"What is left of {_of(name)}'s {_WHAT[name.kind]} ({name.period}) does not suffice for this request.",
        limit=limit_name(name),
    )


def budget_unavailable(name: LeaseName) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_BUDGET_UNAVAILABLE,
        f"The service that owns {_of(name)}'s budget cannot be reached, and nothing may be used that may not be there.",
        retry_after_seconds=1.0,
        limit=limit_name(name),
    )


def limit_name(name: LeaseName) -> str:
    """Returns the limit's name in answers and errors, e.g. "tenant:acme/web tokens_per_day"."""
    return f"{name.account} {name.kind.value}"


def _of(name: LeaseName) -> str:
    kind, _, account = name.account.partition(":")
    return f"the {'organisation' if kind == 'org' else kind} {account}"
