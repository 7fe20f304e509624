"""Helps a client whose base URL is not the right one."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from typing import Final

_BASE: Final = (
    "OpenAI's clients have the server's address with /v1 as their base URL, Anthropic's the address without it."
)
_PREFIX: Final = re.compile(r"(?:/(?:v\d+(?:beta|alpha)?|api|openai|anthropic|deployments/[^/]+|engines/[^/]+))*")


def not_found_message(path: str, routes: Container[str]) -> str:
    """Says that there is no such path, and which one was meant if that can be told."""
    for candidate in _candidates(path):
        if candidate != path and candidate in routes:
            return f"This path does not exist. Did you mean {candidate}? {_BASE}"
    if path.rstrip("/") in ("/v1", "") or path.startswith("/v1/"):
        return f"This path does not exist. GET /v1/models lists the models, and GET /docs all paths. {_BASE}"
    return "This path does not exist. GET /docs lists all paths."


def _candidates(path: str) -> Iterator[str]:
    plain = re.sub("/{2,}", "/", path).rstrip("/")
    yield plain
    prefix = _PREFIX.match(plain)
    rest = plain[prefix.end() :] if prefix is not None else plain
    yield "/v1" + rest
    yield rest
    # The whole URL of an endpoint as the base URL.
    for endpoint in ("/chat/completions", "/responses", "/messages", "/completions", "/embeddings"):
        if rest.startswith(endpoint + "/"):
            yield "/v1" + endpoint
