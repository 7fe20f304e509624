"""Stored objects as the OpenAPI document describes them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ConversationObject(msgspec.Struct):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedObject(msgspec.Struct):
    id: str
    object: str
    deleted: bool


class FileObject(msgspec.Struct):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str
    status_details: str | None


class FileList(msgspec.Struct):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class UploadObject(msgspec.Struct):
    id: str
    object: Literal["upload"]
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    bytes: int
    mime_type: str
    status: Literal["pending", "completed", "cancelled"]
    file: FileObject | None


class UploadPartObject(msgspec.Struct):
    id: str
    object: Literal["upload.part"]
    created_at: int
    upload_id: str


class BatchObject(msgspec.Struct):
    """OpenAI's batch, with the times of its states, and its usage."""

    id: str
    object: Literal["batch"]
    endpoint: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    created_at: int
    expires_at: int
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    request_counts: dict[str, int]
    errors: dict[str, Any] | None


class BatchList(msgspec.Struct):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ItemObject(msgspec.Struct):
    """An item of any type; it has further fields."""

    id: str
    type: str


class ItemList(msgspec.Struct):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileCounts(msgspec.Struct):
    in_progress: int
    completed: int
    failed: int
    cancelled: int
    total: int


class VectorStoreObject(msgspec.Struct):
    id: str
    object: Literal["vector_store"]
    created_at: int
    name: str
    description: str | None
    status: Literal["in_progress", "completed"]
    file_counts: FileCounts
    usage_bytes: int
    """The size of its texts and vectors."""
    last_active_at: int
    expires_after: dict[str, Any] | None
    expires_at: int | None
    metadata: dict[str, str]
    embedding_model: str


class VectorStoreList(msgspec.Struct):
    object: Literal["list"]
    data: list[VectorStoreObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VectorStoreFileObject(msgspec.Struct):
    id: str
    object: Literal["vector_store.file"]
    created_at: int
    vector_store_id: str
    status: Literal["in_progress", "completed", "failed", "cancelled"]
    usage_bytes: int
    last_error: dict[str, str] | None
    chunking_strategy: dict[str, Any]
    """The sizes that are used."""
    attributes: dict[str, Any]


class VectorStoreFileList(msgspec.Struct):
    object: Literal["list"]
    data: list[VectorStoreFileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileBatchObject(msgspec.Struct):
    id: str
    object: Literal["vector_store.files_batch"]
    created_at: int
    vector_store_id: str
    status: Literal["in_progress", "completed", "failed", "cancelled"]
    file_counts: FileCounts


class ContentPage(msgspec.Struct):
    object: Literal["vector_store.file_content.page"]
    data: list[dict[str, str]]
    """The texts of the chunks, in order."""
    has_more: bool
    next_page: str | None


class SearchResult(msgspec.Struct):
    file_id: str
    filename: str
    score: float
    """From 0 to 1. Of fused rankings: 1 for what is the first in all of them."""
    attributes: dict[str, Any]
    content: list[dict[str, str]]


class SearchPage(msgspec.Struct):
    object: Literal["vector_store.search_results.page"]
    search_query: list[str]
    data: list[SearchResult]
    has_more: bool
    next_page: str | None


class WebhookEndpointObject(msgspec.Struct):
    id: str
    object: Literal["webhook_endpoint"]
    created_at: int
    updated_at: int
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str
    signing_secret: str | msgspec.UnsetType = msgspec.UNSET
    """Only when it is made or rotated."""


class WebhookEndpointList(msgspec.Struct):
    object: Literal["list"]
    data: list[WebhookEndpointObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class WebhookTestObject(msgspec.Struct):
    object: Literal["webhook_endpoint.test"]
    webhook_endpoint_id: str
    event_type: str
    status_code: int
    success: Literal[True]


class EventTypeList(msgspec.Struct):
    object: Literal["list"]
    data: list[str]


class PromptObject(msgspec.Struct):
    """One version of a prompt."""

    id: str
    object: Literal["prompt"]
    created_at: int
    name: str | None
    metadata: dict[str, str]
    latest_version: str
    version: str
    version_created_at: int
    instructions: str | None
    input: list[dict[str, Any]]
    variables: list[str]


class PromptList(msgspec.Struct):
    object: Literal["list"]
    data: list[PromptObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class HistoryObject(ConversationObject):
    """A conversation, as a user looks for it."""

    title: str
    num_items: int
    snippets: list[dict[str, str]] | msgspec.UnsetType = msgspec.UNSET
    """Where the words of a search were found."""


class HistoryList(msgspec.Struct):
    object: Literal["list"]
    data: list[HistoryObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class RemovedObject(DeletedObject):
    purged_at: int


class FeedbackObject(msgspec.Struct):
    id: str
    object: Literal["feedback"]
    created_at: int
    response_id: str
    rating: Literal["up", "down"] | None
    text: str | None


class FeedbackList(msgspec.Struct):
    object: Literal["list"]
    data: list[FeedbackObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class RetentionObject(msgspec.Struct):
    object: Literal["retention"]
    days: int | None
    max_days: int | None
    """The operator's bound."""


class ErasureObject(msgspec.Struct):
    """An erasure, with the number of objects that it has deleted of each kind. It names its user by the SHA-256 of
    `safety_identifier` alone."""

    id: str
    object: Literal["erasure"]
    created_at: int
    status: Literal["in_progress", "completed"]
    completed_at: int | None
    tenant: str
    safety_identifier_sha256: str | None
    counts: dict[str, int]


class ErasureList(msgspec.Struct):
    object: Literal["list"]
    data: list[ErasureObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
