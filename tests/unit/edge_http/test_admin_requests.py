"""/admin/v1 as requests of DirectoryService."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from edge_http.admin.calls import as_caller_knows, request_of
from edge_http.admin.routes import ADMIN_ROUTES, BY_PATH, template_of
from kvloom.enums import ErrorReason
from kvloom.errors import KvloomError
from kvloom.v1 import directory_service_pb2 as pb
from kvloom.v1.control_service_pb2 import Limits


def request(method: str, path: str, body: Any = None, **query: str) -> Any:
    template = template_of(f"/admin/v1/{path}")
    assert template is not None
    raw = b"" if body is None else msgspec.json.encode(body)
    return request_of(BY_PATH[template][method], f"/admin/v1/{path}", query, raw)


def test_every_method_has_a_path() -> None:
    """What the commands can do, programs can do."""
    declared = {method.name for method in pb.DESCRIPTOR.services_by_name["DirectoryService"].methods}
    assert sorted(route.method for route in ADMIN_ROUTES) == sorted(declared - {"GetLimitTier"})


@pytest.mark.parametrize("path", ["/admin/v1/", "/admin/v1/nothing", "/admin/v1/keys/", "/admin/v1/keys/a/b", "/admin"])
def test_other_paths_fit_nothing(path: str) -> None:
    """They are 404, also if a segment is empty."""
    assert template_of(path) is None


def test_ids_come_from_the_path_and_decoded() -> None:
    """The name of a certificate has slashes."""
    assert request("GET", "projects/acme/search") == pb.GetProjectRequest(id="acme/search")
    assert request("GET", "keys/cert:spiffe%3A%2F%2Fa%2Fb") == pb.GetKeyRequest(id="cert:spiffe://a/b")
    assert request("PUT", "users/ann%40acme.com/memberships/acme", {"role": "admin"}) == pb.SetMembershipRequest(
        user="ann@acme.com", membership=pb.Membership(organisation="acme", role="admin")
    )


def test_a_patch_changes_what_its_body_has() -> None:
    """One limit, or all of them; a client may send the id along."""
    wanted = request("PATCH", "keys/k1", {"id": "k1", "name": "x", "limits": {"tokens_per_day": 5}})
    assert wanted.key == pb.ApiKey(id="k1", name="x", limits=Limits(tokens_per_day=5))
    assert list(wanted.update_mask.paths) == ["name", "limits.tokens_per_day"]
    assert list(request("PATCH", "keys/k1", {"limits": {}}).update_mask.paths) == ["limits"]


def test_query_and_body_fill_the_request() -> None:
    """As the OpenAPI document says."""
    assert request("GET", "keys", project="a/b", show_revoked="true", page_size="7") == pb.ListKeysRequest(
        project="a/b", show_revoked=True, page_size=7
    )
    made = request("POST", "keys", {"project": "a/b", "scopes": ["usage"], "expires_at": 5}, create_project="true")
    assert made == pb.CreateKeyRequest(
        key=pb.ApiKey(project="a/b", scopes=["usage"], expires_at=5.0), create_project=True
    )
    assert request("POST", "keys/k1/rotate", {"grace_seconds": 60}) == pb.RotateKeyRequest(id="k1", grace_seconds=60.0)
    assert request("POST", "keys/k1/revoke") == pb.RevokeKeyRequest(id="k1")
    price = request("POST", "prices", {"model": "*", "prompt_nanos": 5}).price
    assert not price.HasField("batch_percent")


@pytest.mark.parametrize(
    ("method", "path", "body", "query", "field"),
    [
        ("POST", "keys", {"project": 5}, {}, "project"),
        ("POST", "keys", {"scopes": "admin"}, {}, "scopes"),
        ("POST", "keys", {"scopes": [1]}, {}, "scopes[0]"),
        ("POST", "keys", {"colour": "red"}, {}, "colour"),
        ("POST", "keys", {"limits": {"tokens_per_day": -1}}, {}, "limits.tokens_per_day"),
        ("POST", "keys", {"limits": {"tokens_per_day": True}}, {}, "limits.tokens_per_day"),
        ("POST", "keys", {"limits": {"max_prompt_tokens": 2**40}}, {}, "limits.max_prompt_tokens"),
        ("POST", "keys", {"limits": 7}, {}, "limits"),
        ("PATCH", "keys/k1", {"id": "k2"}, {}, "id"),
        ("GET", "keys", None, {"page_size": "many"}, "page_size"),
        ("GET", "keys", None, {"colour": "red"}, "colour"),
        ("POST", "keys", [], {}, ""),
    ],
)
def test_what_does_not_fit_is_refused_with_its_field(
    method: str, path: str, body: Any, query: dict[str, str], field: str
) -> None:
    """A limit that was misspelt and ignored would be no limit."""
    with pytest.raises(KvloomError) as info:
        request(method, path, body, **query)
    assert (info.value.reason, info.value.field) == (ErrorReason.INVALID_ARGUMENT, field)


def test_errors_of_control_name_the_field_as_the_body_has_it() -> None:
    """Clients do not know how the edge calls what they send."""
    error = KvloomError(ErrorReason.INVALID_ARGUMENT, "", field="key.limits.tokens_per_day")
    route = BY_PATH["/admin/v1/keys"]["POST"]
    assert as_caller_knows(error, route).field == "limits.tokens_per_day"
