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
