"""The bodies of requests about stored objects."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from edge_http.openai.requests import Body
from edge_http.openai.search_options import RankingOptions, SearchFilter
from kvloom_common.webhook_events import WebhookEvent

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


class FileExpiry(Body, kw_only=True):
    anchor: Literal["created_at"]
    """The time from which the seconds count."""
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]
    """The number of seconds after which the file expires."""


class UploadBody(Body, kw_only=True):
    filename: str
    """The name of the file."""
    purpose: str
    """The same as that of a file."""
    bytes: Annotated[int, Meta(ge=1, le=2**33)]
    """The size of the file, which all parts together have."""
    mime_type: Annotated[str, Meta(min_length=1, max_length=256)]
    """The type of the file, such as text/plain."""
    expires_after: FileExpiry | None = None
    """The time after which the file expires."""


class CompleteUploadBody(Body, kw_only=True):
    part_ids: Annotated[list[str], Meta(min_length=1, max_length=1000)]
    """The parts, in the order of the file."""
    md5: Annotated[str, Meta(max_length=64)] | None = None
    """The checksum of the file, in hexadecimal. By default it is not checked."""


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


class StoreExpiry(Body, kw_only=True):
    anchor: Literal["last_active_at"]
    """The time from which the days count: the last search."""
    days: Annotated[int, Meta(ge=1, le=365)]
    """The number of days after which the vector store is deleted."""


class StaticChunks(Body, kw_only=True):
    max_chunk_size_tokens: Annotated[int, Meta(ge=100, le=4096)]
    """The most that a chunk has. It is also bounded by the window of the encoder."""
    chunk_overlap_tokens: Annotated[int, Meta(ge=0, le=2048)]
    """How much of it stood at the end of the chunk before; at most half."""


class ChunkingStrategy(Body, kw_only=True):
    type: Literal["auto", "static"]
    """"auto": chunks of 800 tokens that overlap by 400, as far as the encoder's window has room."""
    static: StaticChunks | None = None
    """With type static: the sizes."""


FileIds = Annotated[list[str], Meta(max_length=500)]
Attributes = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)] | int | float | bool],
    Meta(max_length=16),
]


class VectorStoreBody(Body, kw_only=True):
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: Annotated[str, Meta(max_length=1024)] | None = None
    file_ids: FileIds | None = None
    """Files that are indexed at once."""
    metadata: Metadata | None = None
    expires_after: StoreExpiry | None = None
    """The time after which it is deleted. By default it stays."""
    chunking_strategy: ChunkingStrategy | None = None
    """How `file_ids` are cut."""
    embedding_model: str | None = None
    """An extension: the model that makes the vectors. The default is the first encoder of the fabric by name."""


class VectorStoreChanges(Body, kw_only=True):
    name: Annotated[str, Meta(max_length=256)] | None = None
    metadata: Metadata | None = None
    expires_after: StoreExpiry | None = None
    """The time after which it is deleted. By default it stays."""


class SearchBody(Body, kw_only=True):
    query: str | list[str]
    """One query, or several whose results are fused."""
    filters: SearchFilter | None = None
    """Conditions on the attributes of files."""
    max_num_results: Annotated[int, Meta(ge=1, le=50)] | None = None
    """The default is 10."""
    ranking_options: RankingOptions | None = None
    """How results are ranked. By default vectors and words count."""
    rewrite_query: bool | None = None
    """Without effect: queries are searched for as they are."""


class StoreFileBody(Body, kw_only=True):
    file_id: str
    """The file that is indexed."""
    attributes: Attributes | None = None
    """Up to 16 texts, numbers and truth values by name, for filters."""
    chunking_strategy: ChunkingStrategy | None = None
    """How the file is cut."""


class AttributesBody(Body, kw_only=True):
    attributes: Attributes | None
    """They replace those that there are."""


class FileBatchBody(Body, kw_only=True):
    file_ids: FileIds | None = None
    """The files; either these or `files`."""
    files: Annotated[list[StoreFileBody], Meta(max_length=500)] | None = None
    """The files, each with attributes and a chunking strategy of its own."""
    attributes: Attributes | None = None
    """Those of all `file_ids`."""
    chunking_strategy: ChunkingStrategy | None = None
    """That of all `file_ids`."""


EventTypes = Annotated[
    list[WebhookEvent],
    Meta(min_length=1, max_length=64),
]
EndpointName = Annotated[str, Meta(min_length=1, max_length=256)]


class NewWebhookBody(Body, kw_only=True):
    name: EndpointName
    """For its readers."""
    url: str
    """It begins with https://, and has a public address."""
    event_types: EventTypes
    """The events that it is told of."""


class WebhookBody(Body, kw_only=True):
    name: EndpointName | None = None
    """Another name. By default it stays, as the others do."""
    url: str | None = None
    """Another URL."""
    event_types: EventTypes | None = None
    """All that it is told of from now on."""


class RotateSecretBody(Body, kw_only=True):
    keep_old_secret_active_for_24_hours: bool | None = None
    """True: messages are signed with the old secret, too, for a day. The default is false."""


class WebhookTestBody(Body, kw_only=True):
    event_type: WebhookEvent
    """The event that the message tells of."""


class PromptVersionBody(Body, kw_only=True):
    instructions: str | None = None
    """The system message. `{{name}}` stands for a variable, here and in the messages."""
    input: NewItems | None = None
    """Messages that come before all others."""


class NewPromptBody(PromptVersionBody, kw_only=True):
    name: EndpointName | None = None
    """For its readers."""
    metadata: Metadata | None = None
    """Up to 16 texts by name."""


class TitleBody(Body, kw_only=True):
    title: Annotated[str, Meta(min_length=1, max_length=512)]
    """It becomes the `title` of the conversation's metadata."""


class FeedbackBody(Body, kw_only=True):
    rating: Literal["up", "down"] | None = None
    """A thumb. By default there is none, and only a text."""
    text: Annotated[str, Meta(max_length=4096)] | None = None
    """The words of the user. By default there are none."""


class RetentionBody(Body, kw_only=True):
    days: Annotated[int, Meta(ge=1, le=36_500)] | None
    """The number of days after which contents are deleted; null: what the operator has set holds alone."""


class ErasureBody(Body, kw_only=True):
    safety_identifier: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    """The user whose objects are erased. By default those of all users are."""
    tenant: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    """Another tenant that the key administers (ORGANISATION/PROJECT). By default it is the key's own."""
