"""All methods of DirectoryService by their names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from control.directory import audit_log, keys, organisations, prices, projects, tiers, users
from control.directory.actor import Actor
from control.directory.transaction import DirectoryChange

READS: Final[Mapping[str, Callable[[AsyncConnection, Actor, Any], Awaitable[Any]]]] = {
    "GetOrganisation": organisations.ORGANISATION.get,
    "ListOrganisations": organisations.list_,
    "GetProject": projects.PROJECT.get,
    "ListProjects": projects.list_,
    "GetUser": users.get,
    "ListUsers": users.list_,
    "GetKey": keys.KEY.get,
    "ListKeys": keys.list_,
    "ListLimitTiers": tiers.list_,
    "ListPrices": prices.list_,
    "ListAuditEntries": audit_log.list_,
}
WRITES: Final[Mapping[str, Callable[[DirectoryChange, Any], Awaitable[Any]]]] = {
    "CreateOrganisation": organisations.create,
    "UpdateOrganisation": organisations.update,
    "DeleteOrganisation": organisations.delete,
    "CreateProject": projects.create,
    "UpdateProject": projects.update,
    "DeleteProject": projects.delete,
    "CreateUser": users.create,
    "UpdateUser": users.update,
    "DeleteUser": users.delete,
    "SetMembership": users.set_membership,
    "DeleteMembership": users.delete_membership,
    "CreateKey": keys.create,
    "UpdateKey": keys.update,
    "RotateKey": keys.rotate,
    "RevokeKey": keys.revoke,
    "SetLimitTier": tiers.set_,
    "DeleteLimitTier": tiers.delete,
    "CreatePrice": prices.create,
    "DeletePrice": prices.delete,
}
