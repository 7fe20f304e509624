"""The chat page, the reference page and the admin page: static files that are kept in memory and load nothing from
other hosts.

index.html   the page
chat.js      its code
conversations.js  stored conversations on it, where an orchestrator runs
markdown.js  shows the Markdown of answers
stream.js    one streamed answer
chat.css     its style
favicon.svg  the icon of all pages
docs.html    the reference page, which shows /openapi.json
docs.js      its code
docs.css     its style
base.css     what it has in common with the admin page; dom.js as well
admin.html   the admin page; admin.js is its frame, and admin_*.js are its parts
admin.css    its style

The folder vendored has marked, DOMPurify and uPlot, with their licences (docs/reference/third-party.md).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import xxhash
from aiohttp import web

from edge_http.edge import Edge
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason

_FOLDER: Final = Path(__file__).parent
PAGE_FILES: Final = {
    "/": ("index.html", "text/html"),
    "/chat.css": ("chat.css", "text/css"),
    "/chat.js": ("chat.js", "text/javascript"),
    "/conversations.js": ("conversations.js", "text/javascript"),
    "/markdown.js": ("markdown.js", "text/javascript"),
    "/stream.js": ("stream.js", "text/javascript"),
    "/marked.js": ("vendored/marked.js", "text/javascript"),
    "/purify.js": ("vendored/purify.js", "text/javascript"),
    "/favicon.svg": ("favicon.svg", "image/svg+xml"),
}
"""The files of the chat page by path: name and type."""
DOCS_FILES: Final = {
    "/docs": ("docs.html", "text/html"),
    "/docs.css": ("docs.css", "text/css"),
    "/docs.js": ("docs.js", "text/javascript"),
}
"""Those of the reference page."""
ADMIN_FILES: Final = {
    "/admin": ("admin.html", "text/html"),
    "/base.css": ("base.css", "text/css"),
    "/dom.js": ("dom.js", "text/javascript"),
    "/admin.css": ("admin.css", "text/css"),
    "/admin.js": ("admin.js", "text/javascript"),
    "/admin_charts.js": ("admin_charts.js", "text/javascript"),
    "/admin_requests.js": ("admin_requests.js", "text/javascript"),
    "/admin_tenants.js": ("admin_tenants.js", "text/javascript"),
    "/uplot.js": ("vendored/uplot.js", "text/javascript"),
    "/uplot.css": ("vendored/uplot.css", "text/css"),
}
"""Those of the admin page. They hold no secrets: what the page shows, it asks for with its user's key."""
_SECURITY_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # the browser revalidates each time and gets a 304
}


Handler = Callable[[Edge, web.BaseRequest], Awaitable[web.StreamResponse]]


_NEED_STATE: Final = ("conversations.js",)
"""Files that are empty without an orchestrator."""


def check_docs(edge: Edge) -> None:
    """Raises KvloomError (NOT_FOUND) if the API is not described here."""
    if not edge.config.api_docs:
        raise KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, "This path does not exist (edge.api_docs is false).")


def _file_handler(name: str, content_type: str, *, is_docs: bool = False) -> Handler:
    content = (_FOLDER / name).read_bytes()
    etag = f'"{xxhash.xxh3_64_hexdigest(content)}"'
    headers = {**_SECURITY_HEADERS, "ETag": etag}

    async def handle(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
        if is_docs:
            check_docs(edge)
        if etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        if name in _NEED_STATE and edge.orchestrator is None:
            return web.Response(body=b"", content_type=content_type, charset="utf-8", headers=_SECURITY_HEADERS)
        return web.Response(body=content, content_type=content_type, charset="utf-8", headers=headers)

    return handle


PAGE_ROUTES: Final[Mapping[str, Handler]] = {
    **{path: _file_handler(name, content_type) for path, (name, content_type) in {**PAGE_FILES, **ADMIN_FILES}.items()},
    **{path: _file_handler(name, content_type, is_docs=True) for path, (name, content_type) in DOCS_FILES.items()},
}
"""Maps each path to its handler."""
