"""The tool `file_search` of responses: the vector stores that a request names are searched for what the user asks,
before the answer is generated. When that takes too long or fails, the answer comes without it, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec
from aiohttp import web

from edge_http.edge import Edge
from edge_http.endpoints.model_choice import last_user_text
from edge_http.endpoints.ownership import owner_of
from edge_http.openai.responses.file_search import (
    DEFAULT_RESULTS,
    RESULTS,
    FilePassage,
    FileSearch,
    FileSearchTool,
    search_tools,
)
from edge_http.openai.responses.requests import StoredResponsesBody
from edge_http.orchestrator_link import OrchestratorLink
from edge_http.wire.headers import FILE_SEARCH
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.orchestrator_service_pb2 import Owner
from kvloom.v1.router_service_pb2 import ModerateRequest
from kvloom_common.models.served_model import ServedModel

SEARCH_SECONDS: Final = 3.0
"""How long an answer waits for its passages."""
MAX_QUERY_CHARS: Final = 1000
"""More of a question would not fit the window of an encoder."""
WINDOW_SHARE: Final = 2
"""Passages take at most one part in so many of the model's window."""
MAX_PASSAGE_TOKENS: Final = 16_384
_OF_CALLER: Final = (ErrorReason.ERROR_REASON_NOT_FOUND, ErrorReason.ERROR_REASON_INVALID_ARGUMENT)
_CALLERS_FIELDS: Final = ("vector_store_ids", "ranking_options.hybrid_search")


class _Content(msgspec.Struct):
    text: str


class _Result(msgspec.Struct):
    file_id: str
    filename: str
    score: float
    attributes: dict[str, str | int | float | bool]
    content: list[_Content]


class _Page(msgspec.Struct):
    data: list[_Result]


_PAGE: Final = msgspec.json.Decoder(_Page)


async def searched(
    edge: Edge, request: web.BaseRequest, body: StoredResponsesBody, model: ServedModel, *, is_run: bool = False
) -> FileSearch | None:
    """Runs the file search of a body; None: there is none, or nothing to search for. `is_run`: it was
    searched when the background response was begun. Raises KvloomError (NOT_FOUND, INVALID_ARGUMENT) that names the
    field."""
    tools = search_tools(body)
    if not tools:
        return None
    [(number, tool)] = tools.items()
    if is_run:
        return tool.kvloom_found
    question = body.input if isinstance(body.input, str) else last_user_text(body.input)
    query = " ".join(question.split())[:MAX_QUERY_CHARS]
    if not query:
        return None
    search = FileSearch(query, shows_results=RESULTS in (body.include or ()))
    try:
        async with asyncio.timeout(SEARCH_SECONDS):
            found = await _found(edge, request, tool, query, f"tools[{number}]")
            found = await _screened(edge, found)
    except TimeoutError:
        search.status, search.warning = "failed", "timeout"
    except KvloomError as error:
        if error.reason in _OF_CALLER and error.field.startswith("tools["):
            raise
        search.status, search.warning = "failed", error.reason_name.lower()
    else:
        search.passages = await _fitting(edge, request, found, model)
        if found and not search.passages:
            search.status, search.warning = "incomplete", "no_room"
    return search


def search_headers(search: FileSearch | None) -> Mapping[str, str]:
    """The header that says why an answer comes without passages."""
    return {} if search is None or not search.warning else {FILE_SEARCH: search.warning}


async def _found(edge: Edge, request: web.BaseRequest, tool: FileSearchTool, query: str, at: str) -> list[FilePassage]:
    """The passages of all vector stores, the best first. Raises KvloomError."""
    link, owner = edge.orchestrator, owner_of(edge, request)
    assert link is not None
    wanted = msgspec.json.encode(
        {
            "query": query,
            "max_num_results": tool.max_num_results or DEFAULT_RESULTS,
            "filters": tool.filters,
            "ranking_options": tool.ranking_options,
        }
    )
    stores = dict.fromkeys(tool.vector_store_ids)
    passages: dict[tuple[str, str], FilePassage] = {}
    for found in await asyncio.gather(*(_search_store(link, owner, store, wanted, at) for store in stores)):
        for passage in found:
            passages.setdefault((passage.file_id, passage.text), passage)
    best = sorted(passages.values(), key=lambda passage: -passage.score)
    return best[: tool.max_num_results or DEFAULT_RESULTS]


async def _search_store(link: OrchestratorLink, owner: Owner, store: str, wanted: bytes, at: str) -> list[FilePassage]:
    """Raises KvloomError, whose field is that of the tool where the caller is at fault."""
    try:
        page = _PAGE.decode(await link.operate(owner, "searchVectorStore", [store], body=wanted))
    except KvloomError as error:
        if error.reason not in _OF_CALLER:
            raise
        name = "vector_store_ids" if error.reason == ErrorReason.ERROR_REASON_NOT_FOUND else error.field
        field = f"{at}.{name}" if name in _CALLERS_FIELDS or name.startswith("filters") else ""
        raise KvloomError(error.reason, error.message, field=field) from error
    return [
        FilePassage(
            one.file_id, one.filename, one.score, dict(one.attributes), "\n".join(part.text for part in one.content)
        )
        for one in page.data
    ]


async def _screened(edge: Edge, passages: list[FilePassage]) -> list[FilePassage]:
    """Those in which the safety policy finds nothing: one document must not have all questions about it refused. Where
    there is no answer, the passages are screened with the rest of the prompt, as the policy says."""
    if not passages:
        return passages
    try:
        answer = await edge.link.moderate(ModerateRequest(texts=[f"{one.filename}\n{one.text}" for one in passages]))
    except KvloomError:
        return passages
    return [passage for passage, result in zip(passages, answer.results, strict=True) if not result.categories]


async def _fitting(
    edge: Edge, request: web.BaseRequest, passages: list[FilePassage], model: ServedModel
) -> list[FilePassage]:
    """The passages for which there is room, the best first."""
    window, scope = edge.models.window(model.name), edge.callers.cache_scope_of(request)
    room = min(window // WINDOW_SHARE, MAX_PASSAGE_TOKENS) if window else MAX_PASSAGE_TOKENS
    kept: list[FilePassage] = []
    for passage in passages:
        size = len(await model.tokenizer.encode(f"{passage.filename}\n{passage.text}", scope=scope))
        if size <= room:
            room -= size
            kept.append(passage)
    return kept
