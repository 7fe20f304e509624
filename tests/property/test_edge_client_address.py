"""A client cannot choose the address as which it counts: only what trusted proxies report is believed."""

from __future__ import annotations

import ipaddress

from hypothesis import given
from hypothesis import strategies as st

from kvloom_common.limits.client_address import MAX_PROXIES, client_address

TRUSTED = [ipaddress.ip_network(network) for network in ("10.0.0.0/8", "fd00::/8")]
PROXIES = st.one_of(
    st.ip_addresses(network="10.0.0.0/8"),
    st.ip_addresses(network="fd00::/8"),
).map(str)
CLIENTS = (
    st.ip_addresses()
    .filter(lambda address: not any(address in network for network in TRUSTED))
    .filter(lambda address: getattr(address, "ipv4_mapped", None) is None)
    .map(str)
)
INVENTED = st.lists(st.one_of(st.text(max_size=20), CLIENTS, PROXIES), max_size=6)


@given(CLIENTS, INVENTED)
def test_header_of_a_stranger_is_ignored(peer: str, invented: list[str]) -> None:
    """A client that connects without a trusted proxy cannot claim another address."""
    assert client_address(peer, invented, TRUSTED) == peer


@given(CLIENTS, INVENTED, st.lists(PROXIES, min_size=1, max_size=MAX_PROXIES - 1), st.booleans())
def test_last_address_that_is_no_proxy_counts(
    client: str, invented: list[str], proxies: list[str], one_header: bool
) -> None:
    """Each proxy appends the address that it was connected from, behind what the client had invented."""
    *inner, peer = proxies
    hops = [*invented, client, *inner]
    assert client_address(peer, [", ".join(hops)] if one_header else hops, TRUSTED) == client


@given(st.text(max_size=40), st.lists(st.text(max_size=40), max_size=4), st.booleans())
def test_any_text_is_survived(peer: str, values: list[str], is_trusted: bool) -> None:
    """A malformed header must not fail a request."""
    assert isinstance(client_address("10.0.0.1" if is_trusted else peer, values, TRUSTED), str)


@given(CLIENTS, PROXIES, st.text(alphabet="abcxyz!-", max_size=8), PROXIES)
def test_nothing_left_of_a_malformed_value_is_believed(invented: str, inner: str, malformed: str, peer: str) -> None:
    """A client could otherwise hide its address behind one that it invents."""
    assert client_address(peer, [f"{invented}, {malformed}, {inner}"], TRUSTED) == inner


def test_ports_and_mapped_addresses() -> None:
    """Some proxies append a port, and a socket for both families reports IPv4 addresses inside IPv6 ones."""
    assert client_address("::ffff:10.1.2.3", ["192.0.2.7:4711"], TRUSTED) == "192.0.2.7"
    assert client_address("10.1.2.3", ["[2001:db8::1]:4711"], TRUSTED) == "2001:db8::1"
    assert client_address("10.1.2.3", ["10.9.9.9"], TRUSTED) == "10.9.9.9"
    assert client_address("10.1.2.3", [], TRUSTED) == "10.1.2.3"
