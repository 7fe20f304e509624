"""The configuration of what the fabric stores for its callers: responses, conversations, files, vector stores and
batches."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvloom_common.config.section import AT_START, DatabaseUrl, Flag, Port, PositiveInt, Section


class OrchestratorConfig(Section):
    """The orchestrator: stored responses, conversations, files and batches (docs/how-to/stored-state.md)."""

    enabled: Annotated[
        bool,
        AT_START,
        Flag("orchestrator", "Store responses, conversations, files and batches (docs/how-to/stored-state.md)."),
    ] = False
    """True starts an orchestrator. Responses are then stored unless a request says `store: false`."""
    host: Annotated[str, AT_START] = "127.0.0.1"
    port: Annotated[Port, AT_START] = 0
    """Where it listens for the processes of its fabric. 0: the system picks the port."""
    database_url: DatabaseUrl = ""
    """"postgresql://USER@HOST/NAME", or "sqlite:///PATH". Empty: a SQLite file in the data directory."""
    files_url: str = ""
    """Where the contents of files are: "s3://BUCKET/PREFIX", with the credentials of the environment. Empty: the data
    directory."""
    max_file_bytes: PositiveInt = 512 * 2**20
    max_files: PositiveInt = 10_000
    """How large a file may be, and how many a tenant may have."""
    max_vector_stores: PositiveInt = 1000
    """How many vector stores a tenant may have. Each has at most `max_files` files."""
    batch_concurrency: PositiveInt = 16
    """How many lines of a batch are answered at a time."""
    max_background: PositiveInt = 1000
    """How many background responses of a tenant may be queued or in progress."""
    response_days: Annotated[int, Meta(ge=1, le=36_500)] = 30
    """How long responses and chat completions are kept that no conversation has."""
    deleted_days: Annotated[int, Meta(ge=1, le=36_500)] = 30
    """How long a deleted conversation can be restored (`DELETE /kvloom/v1/conversations/{id}`)."""
    retention_days: Annotated[int, Meta(ge=0, le=36_500)] = 0
    """How long contents are kept at most: responses, conversations, files and batches, counted from when they were
    made. A tenant may want less (`POST /kvloom/v1/retention`). 0: tenants decide alone."""
    webhook_private_hosts: Annotated[list[str], Meta(max_length=64)] = []
    """"HOST" or "HOST:PORT": what webhooks may call although it has no public address, also by http. All others are
    called by https at public addresses."""
    max_items: PositiveInt = 10_000
    """How many items a conversation may have, and how many the responses before another one together."""
