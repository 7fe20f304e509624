"""Which addresses may be called that a client has given."""

from __future__ import annotations

import socket

import pytest

from kvloom_common.transport.public_addresses import is_public, public_socket, split_url

PRIVATE = [
    "0.0.0.0",
    "10.1.2.3",
    "100.64.0.1",
    "127.0.0.1",
    "169.254.169.254",
    "172.16.0.1",
    "192.168.1.1",
    "198.18.0.1",
    "224.0.0.1",
    "239.1.1.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "2002:7f00:1::",
    "2001:0:0:0:0:0:80ff:fffe",
    "fc00::1",
    "fe80::1",
    "fe80::1%eth0",
    "ff02::1",
    "2130706433",
    "127.1",
    "0x7f000001",
    "localhost",
    "",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_not_called(address: str) -> None:
    """Whoever may name an address must not reach the machines of the operator through ours."""
    assert not is_public(address)
    with pytest.raises(OSError, match="not a public one"):
        public_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 443)))


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "64:ff9b::101:101"])
def test_public_addresses_are_called(address: str) -> None:
    """They are what webhooks are for."""
    assert is_public(address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    public_socket((family, socket.SOCK_STREAM, 0, "", (address, 443))).close()


@pytest.mark.parametrize(
    "url",
    ["", "example.com", "https://", "https://a:b@example.com", "https://example.com:0", "https://example.com:x", "gopher://a",
     "https://exämple.com", "https://example.com/\n", "https://example.com\\@127.0.0.1", "https://a.com/" + "x" * 2048],
)  # fmt: skip
def test_urls_that_parsers_may_read_differently_are_refused(url: str) -> None:
    """What is checked must be what is called."""
    with pytest.raises(ValueError, match=r"."):
        split_url(url)


def test_the_parts_of_a_url() -> None:
    """The host is what is resolved."""
    parts = split_url("https://Example.com:8443/hook?a=b")
    assert (parts.scheme, parts.hostname, parts.port) == ("https", "example.com", 8443)
