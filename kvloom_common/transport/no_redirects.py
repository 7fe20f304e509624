"""HTTP calls of a service to an address that its operator has configured."""

from __future__ import annotations

import urllib.request
from typing import Any


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Fails a call that is answered with a redirect: no other address than the configured one is called."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        return None
