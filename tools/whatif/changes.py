"""Reads limits and prices as `kvloom whatif` takes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from kvloom.errors import KvloomError
from kvloom.v1 import control_service_pb2 as pb
from kvloom_common.tenancy.prices import Price, Prices
from kvloom_common.tenancy.table import TenantTable, price_from_proto
from kvloom_common.transport.plain_messages import fill
from tools.failures import CommandError

_KINDS: Final = ("org", "tenant", "key")


def read_limits(path: Path, tenants: Iterable[str]) -> TenantTable:
    """A table of the tenants, with the limits in a file: an object of JSON or TOML with the limits of each account, in
    the words of `kvloom limits show --json`. Raises CommandError."""
    plain = _read(path)
    if not isinstance(plain, dict):
        raise CommandError(f'{path}: an object with accounts is expected, e.g. {{"tenant:acme/search": {{...}}}}')
    found: dict[str, dict[str, pb.Limits]] = {kind: {} for kind in _KINDS}
    for account, fields in plain.items():
        kind, _, name = str(account).partition(":")
        if kind not in found or not name:
            raise CommandError(f"{path}: {account!r} is none of org:ORG, tenant:ORG/PROJECT and key:ID")
        limits = found[kind][name] = pb.Limits()
        try:
            fill(limits, fields, account)
        except KvloomError as error:
            raise CommandError(f"{path}: {error.message}") from error
    names = sorted({*tenants, *found["tenant"]})
    organisations = sorted({name.partition("/")[0] for name in (*names, *found["org"])})
    table = TenantTable()
    table.apply(
        pb.FollowResponse(
            table_id="whatif",
            version=1,
            begins_snapshot=True,
            is_complete=True,
            organisations=[pb.OrganisationEntry(id=name, limits=found["org"].get(name)) for name in organisations],
            tenants=[pb.TenantEntry(id=name, limits=found["tenant"].get(name)) for name in names],
            keys=[pb.KeyEntry(id=name, digest=name.encode(), limits=limits) for name, limits in found["key"].items()],
        )
    )
    return table


def read_prices(path: Path) -> list[Price]:
    """The prices in a file, as `kvloom prices list --json` prints them. Raises CommandError."""
    plain = _read(path)
    prices = pb.FollowResponse()
    try:
        fill(prices, {"prices": plain})
    except KvloomError as error:
        raise CommandError(f"{path}: {error.message}") from error
    return [price_from_proto(price) for price in prices.prices]


def last_prices(prices: Iterable[Price]) -> Prices:
    """The last price of each model, as if it had always been in force."""
    ordered = sorted(prices, key=lambda price: (price.model, price.effective_from))
    last = [list(of_model)[-1] for _, of_model in itertools.groupby(ordered, key=lambda price: price.model)]
    return Prices(msgspec.structs.replace(price, effective_from=0.0) for price in last)


def _read(path: Path) -> Any:
    """Raises CommandError."""
    decode = msgspec.toml.decode if path.suffix.lower() == ".toml" else msgspec.json.decode
    try:
        return decode(path.read_bytes())
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {error}") from error
