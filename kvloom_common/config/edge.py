"""The configuration of the HTTP edges."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Final

from msgspec import Meta

from kvloom_common.config.fabric import MOVED_TO_CALLERS, MOVED_TO_FABRIC
from kvloom_common.config.section import (
    AT_START,
    BY_ROUTERS_AND_EDGES,
    Address,
    CellName,
    FilePath,
    Flag,
    Port,
    PositiveFloat,
    PositiveInt,
    Section,
    always,
)

_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#@,A-Z]+")


class CellConfig(Section):
    """Another cell, to which edges may send requests (docs/operate/regions.md)."""

    name: Annotated[CellName, Meta(min_length=1)]
    """Its `fabric.cell`."""
    redis_url: str = ""
    """Its `redis.url`: its routers announce themselves there."""
    key_prefix: str = "kvloom"
    """Its `redis.key_prefix`."""
    routers: Annotated[list[Address], Meta(max_length=32)] = []
    """host:port of each of its routers, in place of `redis_url`."""

    def __post_init__(self) -> None:
        if bool(self.redis_url) == bool(self.routers):
            raise ValueError("a cell needs one of redis_url and routers")


class EdgeConfig(Section):
    """The HTTP edges."""

    moved = {
        **always(
            max_header_bytes="16 KiB",
            max_messages="4096",
            max_buffered_bytes="256 KiB",
            max_pending_body_bytes="64 times max_body_bytes",
            max_answer_bytes="32 MiB",
            max_pending_answer_bytes="256 MiB",
            stream_head_seconds="0.5",
        ),
        "resume": "It is now [resume], for edges and routers",
        **MOVED_TO_FABRIC,
        **MOVED_TO_CALLERS,
    }

    host: Annotated[str, AT_START, Flag("host", "The address on which the HTTP and gRPC ports listen.")] = "127.0.0.1"
    port: Annotated[Port, AT_START, Flag("http-port", "The port of the HTTP API and chat page. 0 picks one.")] = 8080
    root_path: Annotated[str, Meta(pattern=r"^(/[A-Za-z0-9._~-]+)*$", max_length=256)] = ""
    """The path below which a proxy serves the edges, e.g. "/llm": requests may have it or not, and the pages and
    /openapi.json name it. Empty: there is none."""
    num_edges: Annotated[
        int, Meta(ge=1, le=256), AT_START, Flag("edges", "The number of HTTP edges. They share the port.")
    ] = 1
    """How many edges `kvloom up` starts. They share the port."""
    colocate: Annotated[
        bool, AT_START, Flag("colocate", "Run a router inside each edge, which saves one hop per token.")
    ] = False
    """True makes `kvloom up` put a router into each edge's process, instead of starting `router.num_routers`."""
    masks_prompts: bool = False
    """True hides from models what rules of the safety policy in mode `mask` find in prompts, and puts it back into
    answers (docs/operate/safety.md). One call of the safety service precedes each request. What the orchestrator
    stores is then encrypted."""
    max_body_bytes: PositiveInt = 4 * 2**20
    stream_keep_alive_seconds: Annotated[float, Meta(ge=0)] = 10.0
    """After so long without an event a stream gets an SSE comment (of /v1/messages a `ping`), so that no proxy cuts it.
    0: never."""
    max_concurrent_requests: PositiveInt = 8192
    trusted_proxies: Annotated[list[str], BY_ROUTERS_AND_EDGES] = []
    """The networks (CIDR) of reverse proxies in front of the edges. A request from one of them counts as that of the
    last address in X-Forwarded-For that is not in these networks."""
    cors_origins: list[str] = []
    """The origins of web pages that may use the API from a browser, e.g. "https://chat.example.com"; "*": all. Empty:
    only pages of the edge itself."""
    fetch_origins: Annotated[list[str], Meta(max_length=64)] = []
    """The origins from which files and images are fetched that requests name by URLs, e.g. "https://files.example.com";
    "https://*": all with public addresses. One with http is of the operator's own network, and need not have a public
    address. Empty: nothing is fetched."""
    api_docs: bool = True
    """True describes the API at /openapi.json and /docs, also to callers without an API key."""
    strict_fields: bool = False
    """True refuses requests with fields that are not known (docs/reference/http-api.md). The header x-kvloom-strict
    says it for one request."""
    summary_model: str = ""
    """The model that sums up, in the background, what `truncation: "auto"` leaves out of long conversations
    (docs/how-to/stored-state.md). Empty: what is left out is gone."""
    allow_adapter_changes: bool = False
    """True serves POST /v1/load_lora_adapter and /v1/unload_lora_adapter, to all callers of the API."""
    adapters_dir: FilePath = ""
    """The directory below which adapters are that these may load."""
    header_timeout_seconds: PositiveFloat = 10.0
    """The time from a connection's start, or the first byte of a later request, to the end of the headers."""
    body_timeout_seconds: PositiveFloat = 60.0
    """The time from the end of the headers to the end of the body."""
    routers: list[Address] = []
    """host:port of each router. Empty: the one of [router], and all that announce themselves in Redis."""
    cells: Annotated[list[CellConfig], Meta(max_length=15)] = []
    """The other cells. Empty: there are none."""
    reattach_seconds: Annotated[float, Meta(ge=0, le=600)] = 10.0
    """How long an answer that has lost its router may look for another one that continues it. 0: it fails at once."""

    def __post_init__(self) -> None:
        if self.allow_adapter_changes and not self.adapters_dir:
            raise ValueError("allow_adapter_changes needs adapters_dir")
        if len({cell.name for cell in self.cells}) < len(self.cells):
            raise ValueError("cells: two have the same name")
        if self.cells and self.colocate:
            raise ValueError("cells and colocate exclude each other")
        for network in self.trusted_proxies:
            ipaddress.ip_network(network)  # a ValueError names the network, and msgspec adds the key
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not an origin such as https://chat.example.com, nor *")
        for origin in self.fetch_origins:
            if origin == "*" or not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not an origin such as https://files.example.com")
        if "*" in self.cors_origins and len(self.cors_origins) > 1:
            raise ValueError("cors_origins has both * and single origins")
