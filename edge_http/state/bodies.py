"""The bodies of requests about stored objects."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from edge_http.openai.requests import Body

MAX_NEW_ITEMS: Final = 20
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
NewItems = Annotated[list[msgspec.Raw], Meta(max_length=MAX_NEW_ITEMS)]


class NewConversationBody(Body, kw_only=True):
    items: NewItems | None = None
    """The items with which it begins."""
    metadata: Metadata | None = None
    """Up to 16 texts by name, such as a title."""


class ConversationBody(Body, kw_only=True):
    metadata: Metadata | None
    """It replaces the metadata that there is."""


class OutputExpiry(Body, kw_only=True):
    anchor: Literal["created_at"]
    """The time from which the seconds count."""
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]
    """The number of seconds after which output and error files expire; 30 days by default."""


class BatchBody(Body, kw_only=True):
    input_file_id: str
    """A file of the purpose batch. Each of its lines is a request: `{custom_id, method: "POST", url, body}`."""
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    """The `url` of all lines."""
    completion_window: Literal["24h"]
    """A batch that is not completed then expires."""
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None
    """The time after which its files expire."""


class NewItemsBody(Body, kw_only=True):
    items: NewItems
    """They are added at the end, in this order."""
