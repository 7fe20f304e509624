"""HTTP calls of a service to addresses that its operator has configured, or that a client has given: of these only
addresses of the public Internet are called, whatever a name resolves to at that moment."""

from __future__ import annotations

import ipaddress
import socket
import urllib.request
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that stand for the IPv4 addresses in their last 32 bits."""
MAX_URL_CHARS: Final = 2048


def is_public(address: str) -> bool:
    """False for what is no address, too."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return all(one.is_global and not one.is_multicast for one in _meant(found))


def _meant(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[Any]:
    """The address, and those that it stands for."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address in _NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    if address.sixtofour is not None:
        return [address, address.sixtofour]
    return [address, *(address.teredo or ())]


def public_socket(addr_info: Any) -> socket.socket:
    """A socket for a connection to an address; aiohttp asks for one after it has resolved a name, and connects to this
    address and no other (`TCPConnector(socket_factory=public_socket)`). Raises OSError."""
    family, kind, protocol, _, place = addr_info
    if not is_public(str(place[0])):
        raise OSError("the address is not a public one")
    return socket.socket(family, kind, protocol)


def split_url(url: str) -> SplitResult:
    """The parts of the URL of a call. Raises ValueError, whose message says what is wrong."""
    if len(url) > MAX_URL_CHARS or not url.isascii() or any(char <= " " or char in "\\\x7f" for char in url):
        raise ValueError(f"it must have at most {MAX_URL_CHARS} characters, of ASCII, without spaces")
    parts = urlsplit(url)
    if parts.scheme not in ("https", "http") or not parts.hostname:
        raise ValueError("it must begin with https:// and the name of a host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("it must have no user name and no password")
    if parts.port == 0:
        raise ValueError("0 is no port")
    return parts


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Fails a call that is answered with a redirect: no other address than the configured one is called."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        return None
