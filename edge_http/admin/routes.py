"""Says which path is which method of DirectoryService."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

PREFIX: Final = "/admin/v1/"


@dataclasses.dataclass(frozen=True, slots=True)
class AdminRoute:
    http_method: str
    template: str
    """Behind PREFIX. A segment in braces stands for one of the path, which has the name of an attribute below."""
    method: str
    """The method of DirectoryService."""
    summary: str
    body: str | None = None
    """The field of the request that the body is; "": the request itself; None: there is no body."""
    ids: tuple[tuple[str, str], ...] = ()
    """Fields of the request, and what they are set to: a pattern with the template's names."""
    query: tuple[str, ...] = ()
    """Fields of the request that may be in the query."""

    @property
    def path(self) -> str:
        return PREFIX + self.template


_PAGE: Final = ("page_size", "page_token")


def _of_resource(plural: str, id_: str, resource: str, query: Sequence[str] = (), create: str = "") -> list[AdminRoute]:
    """Returns the routes that organisations, projects and users have in common."""
    one, field = f"{plural}/{id_}", resource.lower()
    ids = (("id", id_),)
    return [
        AdminRoute("GET", plural, f"List{resource}s", f"List {plural}", query=(*query, *_PAGE)),
        AdminRoute(
            "POST", plural, f"Create{resource}", f"Add to the {plural}", field, query=(create,) if create else ()
        ),
        AdminRoute("GET", one, f"Get{resource}", f"Get one of the {plural}", ids=ids),
        AdminRoute(
            "PATCH", one, f"Update{resource}", f"Change one of the {plural}", field, ids=((f"{field}.id", id_),)
        ),
        AdminRoute("DELETE", one, f"Delete{resource}", f"Delete one of the {plural}", ids=ids),
    ]


ADMIN_ROUTES: Final[tuple[AdminRoute, ...]] = (
    *_of_resource("organisations", "{organisation}", "Organisation"),
    *_of_resource("projects", "{organisation}/{project}", "Project", ("organisation",), "create_organisation"),
    *_of_resource("users", "{user}", "User", ("organisation",)),
    AdminRoute(
        "PUT",
        "users/{user}/memberships/{organisation}",
        "SetMembership",
        "Give a user a role in an organisation",
        body="membership",
        ids=(("user", "{user}"), ("membership.organisation", "{organisation}")),
    ),
    AdminRoute(
        "DELETE",
        "users/{user}/memberships/{organisation}",
        "DeleteMembership",
        "Take a user out of an organisation",
        ids=(("user", "{user}"), ("organisation", "{organisation}")),
    ),
    AdminRoute("GET", "keys", "ListKeys", "List keys", query=("organisation", "project", "show_revoked", *_PAGE)),
    AdminRoute("POST", "keys", "CreateKey", "Make a key, which is shown once", body="key", query=("create_project",)),
    AdminRoute("GET", "keys/{key}", "GetKey", "Get a key's properties", ids=(("id", "{key}"),)),
    AdminRoute("PATCH", "keys/{key}", "UpdateKey", "Change a key", body="key", ids=(("key.id", "{key}"),)),
    AdminRoute(
        "POST", "keys/{key}/rotate", "RotateKey", "Replace a key by another one", body="", ids=(("id", "{key}"),)
    ),
    AdminRoute("POST", "keys/{key}/revoke", "RevokeKey", "Revoke a key", body="", ids=(("id", "{key}"),)),
    AdminRoute("GET", "tiers", "ListLimitTiers", "List tiers of limits", query=_PAGE),
    AdminRoute(
        "PUT", "tiers/{tier}", "SetLimitTier", "Set a tier of limits", body="tier", ids=(("tier.name", "{tier}"),)
    ),
    AdminRoute("DELETE", "tiers/{tier}", "DeleteLimitTier", "Delete a tier of limits", ids=(("name", "{tier}"),)),
    AdminRoute("GET", "prices", "ListPrices", "List prices", query=("model", *_PAGE)),
    AdminRoute("POST", "prices", "CreatePrice", "Add a price", body="price"),
    AdminRoute("DELETE", "prices/{price}", "DeletePrice", "Delete a price of the future", ids=(("id", "{price}"),)),
    AdminRoute(
        "GET", "audit", "ListAuditEntries", "List changes, the latest first", query=("organisation", "target", *_PAGE)
    ),
)

BY_PATH: Final[Mapping[str, Mapping[str, AdminRoute]]] = {
    path: {route.http_method: route for route in ADMIN_ROUTES if route.path == path}
    for path in dict.fromkeys(route.path for route in ADMIN_ROUTES)
}
_BY_SEGMENTS: Final[Mapping[tuple[int, str], Sequence[str]]] = {
    key: [path for path in BY_PATH if (path.count("/"), path.split("/")[3]) == key]
    for key in {(path.count("/"), path.split("/")[3]) for path in BY_PATH}
}
"""Paths by their number of segments and the first of these."""


def template_of(raw_path: str) -> str | None:
    """The template that a path fits, percent-encoded as it was sent; None if there is none."""
    segments = raw_path.split("/")
    if len(segments) < 4:
        return None
    for template in _BY_SEGMENTS.get((len(segments) - 1, segments[3]), ()):
        if all(
            wanted == given or (wanted.startswith("{") and given)
            for wanted, given in zip(template.split("/"), segments, strict=True)
        ):
            return template
    return None
