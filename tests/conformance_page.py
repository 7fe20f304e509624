"""Writes the tables of docs/reference/conformance.md: what of OpenAI's API is served, by the installed openai client.

It is called as `python -m tests.conformance_page`."""

from __future__ import annotations

import collections
import importlib.metadata
import itertools
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
from openai.types import (
    batch_create_params,
    completion_create_params,
    embedding_create_params,
    moderation_create_params,
    upload_complete_params,
    upload_create_params,
    vector_store_create_params,
    vector_store_search_params,
)
from openai.types.chat import completion_create_params as chat_params
from openai.types.conversations import conversation_create_params, item_create_params
from openai.types.responses import ResponseStreamEvent, response_compact_params, response_create_params
from openai.types.vector_stores import file_batch_create_params, file_create_params
from openai.types.webhooks import webhook_create_params

from edge_http.openai import requests
from edge_http.openai.embeddings import EmbeddingsBody
from edge_http.openai.responses import formatter
from edge_http.openai.responses.requests import CompactBody, StoredResponsesBody
from edge_http.server.api_docs import API_ROUTES
from edge_http.state import bodies

PAGE: Final = Path(__file__).parents[1] / "docs" / "reference" / "conformance.md"
MARKER: Final = "<!-- derived: conformance -->\n"
_CALL: Final = re.compile(r'self\._(post|get|delete|get_api_list)\(\s*(?:path_template\(\s*)?"(/[^"?]*)"')
_ID: Final = re.compile(r"\{\w+\}")
_BY_POST: Final = re.compile(r'method="post"')
_PARAMETERS: Final[dict[str, tuple[Any, type]]] = {
    "POST /chat/completions": (chat_params.CompletionCreateParamsBase, requests.ChatBody),
    "POST /completions": (completion_create_params.CompletionCreateParamsBase, requests.CompletionBody),
    "POST /responses": (response_create_params.ResponseCreateParamsBase, StoredResponsesBody),
    "POST /responses/compact": (response_compact_params.ResponseCompactParams, CompactBody),
    "POST /embeddings": (embedding_create_params.EmbeddingCreateParams, EmbeddingsBody),
    "POST /moderations": (moderation_create_params.ModerationCreateParams, requests.ModerationBody),
    "POST /conversations": (conversation_create_params.ConversationCreateParams, bodies.NewConversationBody),
    "POST /conversations/{}/items": (item_create_params.ItemCreateParams, bodies.NewItemsBody),
    "POST /uploads": (upload_create_params.UploadCreateParams, bodies.UploadBody),
    "POST /uploads/{}/complete": (upload_complete_params.UploadCompleteParams, bodies.CompleteUploadBody),
    "POST /webhook_endpoints": (webhook_create_params.WebhookCreateParams, bodies.NewWebhookBody),
    "POST /batches": (batch_create_params.BatchCreateParams, bodies.BatchBody),
    "POST /vector_stores": (vector_store_create_params.VectorStoreCreateParams, bodies.VectorStoreBody),
    "POST /vector_stores/{}/search": (vector_store_search_params.VectorStoreSearchParams, bodies.SearchBody),
    "POST /vector_stores/{}/files": (file_create_params.FileCreateParams, bodies.StoreFileBody),
    "POST /vector_stores/{}/file_batches": (file_batch_create_params.FileBatchCreateParams, bodies.FileBatchBody),
}
"""What the client may send, and what is read of it."""
_ELSEWHERE: Final = ("stream", "include", "extra_headers")
"""Parameters of the base types that stand in the query, or in a type of their own."""


def client_endpoints() -> set[tuple[str, str]]:
    """The method and the path of each call of the client."""
    folder = Path(openai.__file__).parent / "resources"
    return set(itertools.chain.from_iterable(_calls_in(path.read_text()) for path in folder.rglob("*.py")))


def _calls_in(source: str) -> Iterator[tuple[str, str]]:
    for call in _CALL.finditer(source):
        method = call[1].upper()
        if call[1] == "get_api_list":  # a list is a GET unless its last argument says otherwise
            method = "POST" if _BY_POST.search(source, call.end(), _end_of(source, call.end())) else "GET"
        yield method, _ID.sub("{}", call[2])


def _end_of(source: str, start: int) -> int:
    """Where the function ends in which `start` is."""
    found = source.find("\n    def ", start)
    return len(source) if found < 0 else found


def served_endpoints() -> set[tuple[str, str]]:
    """Those of the edge, as the client names them."""
    return {(route.method, _ID.sub("{}", route.path.removeprefix("/v1"))) for route in API_ROUTES}


def client_events() -> set[str]:
    """The types of the events of a streamed response."""
    union = typing.get_args(typing.get_args(ResponseStreamEvent)[0])
    return {typing.get_args(event.model_fields["type"].annotation)[0] for event in union}


def sent_events() -> set[str]:
    text = Path(formatter.__file__).read_text()
    endings = {f"response.{ending}" for ending in ("completed", "incomplete", "failed")}
    return {"error", *endings, *re.findall(r'_head\("([\w.]+)"\)', text)}


def page_with_tables(page: str) -> str:
    """The page with everything below its marker written anew."""
    head, found, _ = page.partition(MARKER)
    assert found, f"docs/reference/conformance.md has no {MARKER}"
    return f"{head}{MARKER}\n" + "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    wanted, served = client_endpoints(), served_endpoints()
    events, sent = client_events(), sent_events()
    read = {name: _read(*types) for name, types in _PARAMETERS.items()}
    num_read, num_known = sum(len(known) for known, _ in read.values()), sum(len(some) for _, some in read.values())
    yield f"By openai {importlib.metadata.version('openai')}:"
    yield f"**{len(wanted & served)} of {len(wanted)} endpoints**, **{len(events & sent)} of {len(events)} events**,"
    yield f"**{100 * num_read / num_known:.0f}% of the parameters** of the requests below."
    yield "\n| API | served | of | endpoints |\n|---|---|---|---|"
    by_api: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    for method, path in sorted(wanted, key=lambda one: (one[1], one[0])):
        by_api[path.split("/")[1]].append((method, path))
    for api, calls in by_api.items():
        own = [call for call in calls if call in served]
        if own:
            yield f"| {api} | {len(own)} | {len(calls)} | {', '.join(f'`{method} {path}`' for method, path in own)} |"
    missing = [f"{api} ({len(calls)})" for api, calls in by_api.items() if not served & set(calls)]
    yield f"\nOf these APIs nothing is served: {', '.join(missing)}."
    yield "\n| request | parameters read | of | refused or left out |\n|---|---|---|---|"
    for name, (known, all_) in read.items():
        left_out = ", ".join(f"`{one}`" for one in sorted(all_ - known)) or "–"
        yield f"| `{name}` | {len(known)} | {len(all_)} | {left_out} |"
    yield f"\nEvents that are sent: {', '.join(f'`{name}`' for name in sorted(events & sent))}."


def _read(params: Any, body: type) -> tuple[set[str], set[str]]:
    wanted = set(typing.get_type_hints(params)) - set(_ELSEWHERE)
    return wanted & set(body.__struct_fields__), wanted


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text()))
