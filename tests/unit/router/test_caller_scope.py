"""What a caller may name, and where it calls from."""

from __future__ import annotations

import pytest

from router.caller_scope import TRUSTED, CallerScope, peer_host, shown_id


@pytest.mark.parametrize("caller", ["key-1", "address-2", ""])
@pytest.mark.parametrize("given", ["a", "a@b", "a@key-1", "@", "\N{SNOWMAN}"])
def test_a_caller_gets_back_the_id_that_it_gave(caller: str, given: str) -> None:
    """Clients find their answers, and operators their log lines, by the ids that clients chose."""
    scope = CallerScope(caller)
    inside = scope.request_id(given)
    assert inside != given
    assert scope.given_id(inside) == shown_id(inside, caller) == given


def test_a_trusted_process_names_requests_as_they_are() -> None:
    """An edge's ids are unique, and its requests belong to whom it says."""
    assert TRUSTED.given_id(TRUSTED.request_id("a@b")) == TRUSTED.request_id("a@b") == "a@b"
    assert TRUSTED.tenant("alice") == "alice"
    assert CallerScope("bob").tenant("alice") == "bob"


@pytest.mark.parametrize(
    ("peer", "host"), [("ipv4:127.0.0.1:1234", "127.0.0.1"), ("ipv6:%5B::1%5D:1234", "::1"), ("ipv6:[::1]:1", "::1")]
)
def test_a_peer_is_named_by_its_address(peer: str, host: str) -> None:
    """The edge names anonymous callers by the same addresses: a caller has one name, whichever API it uses."""
    assert peer_host(peer) == host
