"""The routes of stored objects. The id of a route is the operation of the orchestrator."""

from __future__ import annotations

from typing import Any, Final

from edge_http.openai.response_objects import ChatCompletion
from edge_http.openapi.route import Route, Success
from edge_http.state import bodies, objects
from edge_http.state.files import create_file, get_content
from edge_http.state.handler import operating
from edge_http.wire.headers import REQUEST_ID

_ERRORS: Final = (400, 404, 409, 413, 415, 429, 501, 503)
_PAGE: Final = ("after", "limit", "order")


def _route(method: str, path: str, name: str, tag: str, summary: str, answer: Any, **more: Any) -> Route:
    body, parameters = more.pop("body", None), more.pop("parameters", ())
    handler = more.pop("handler", None) or operating(name, path, body)
    return Route(
        path=path,
        method=method,
        handler=handler,
        id=name,
        tag=tag,
        summary=summary,
        description="Needs an orchestrator (`kvloom up --orchestrator`).",
        answers=(Success("The object, or a page of them.", answer, more.pop("content_type", "application/json")),),
        errors=_ERRORS,
        body=body,
        parameters=(*parameters, REQUEST_ID),
        has_head=False,
        **more,
    )


_CONVERSATIONS: Final = "/v1/conversations"
_ONE: Final = f"{_CONVERSATIONS}/{{id}}"
_ITEMS: Final = f"{_ONE}/items"
_ITEM: Final = f"{_ITEMS}/{{item_id}}"
_TAG: Final = "Conversations"
_BATCHES: Final = "/v1/batches"
_CHAT: Final = "/v1/chat/completions"
_FILES: Final = "/v1/files"
_FILE: Final = f"{_FILES}/{{id}}"
_HELLO: Final = [{"type": "message", "role": "user", "content": "Hello."}]

STATE_ROUTES: Final[tuple[Route, ...]] = (
    _route(
        "GET", _CHAT, "listChatCompletions", "Text", "List stored chat completions", objects.ItemList,
        parameters=(*_PAGE, "stored_model"),
    ),
    _route(
        "POST", f"{_CHAT}/{{id}}", "updateChatCompletion", "Text", "Change the metadata of a chat completion",
        ChatCompletion, body=bodies.ConversationBody, examples={"A topic": {"metadata": {"topic": "looms"}}},
    ),
    _route("DELETE", f"{_CHAT}/{{id}}", "deleteChatCompletion", "Text", "Delete a completion", objects.DeletedObject),
    _route(
        "GET", f"{_CHAT}/{{id}}/messages", "listChatCompletionMessages", "Text", "List what it was given",
        objects.ItemList, parameters=_PAGE,
    ),
    _route(
        "POST", _CONVERSATIONS, "createConversation", _TAG, "Begin a conversation", objects.ConversationObject,
        body=bodies.NewConversationBody, examples={"With an item": {"items": _HELLO}},
    ),
    _route("GET", _ONE, "getConversation", _TAG, "Get a conversation", objects.ConversationObject),
    _route(
        "POST", _ONE, "updateConversation", _TAG, "Change a conversation's metadata", objects.ConversationObject,
        body=bodies.ConversationBody, examples={"A title": {"metadata": {"title": "Looms"}}},
    ),
    _route("DELETE", _ONE, "deleteConversation", _TAG, "Delete a conversation", objects.DeletedObject),
    _route(
        "POST", _ITEMS, "createConversationItems", _TAG, "Add items to a conversation", objects.ItemList,
        body=bodies.NewItemsBody, examples={"A message": {"items": _HELLO}},
    ),
    _route("GET", _ITEMS, "listConversationItems", _TAG, "List items", objects.ItemList, parameters=_PAGE),
    _route("GET", _ITEM, "getConversationItem", _TAG, "Get an item", objects.ItemObject),
    _route("DELETE", _ITEM, "deleteConversationItem", _TAG, "Delete an item", objects.ConversationObject),
    _route("DELETE", "/v1/responses/{id}", "deleteResponse", "Text", "Delete a response", objects.DeletedObject),
    _route(
        "GET", "/v1/responses/{id}/input_items", "listInputItems", "Text", "List what a response was given",
        objects.ItemList, parameters=_PAGE,
    ),
    _route("POST", _FILES, "createFile", "Files", "Upload a file", objects.FileObject, handler=create_file),
    _route("GET", _FILES, "listFiles", "Files", "List files", objects.FileList, parameters=(*_PAGE, "purpose")),
    _route("GET", _FILE, "getFile", "Files", "Describe a file", objects.FileObject),
    _route("DELETE", _FILE, "deleteFile", "Files", "Delete a file", objects.DeletedObject),
    _route(
        "GET", f"{_FILE}/content", "getFileContent", "Files", "Read a file", None, handler=get_content,
        content_type="application/octet-stream",
    ),
    _route(
        "POST", _BATCHES, "createBatch", "Batches", "Have many requests answered within a day", objects.BatchObject,
        body=bodies.BatchBody,
        examples={
            "Chat": {
                "input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h",
            }
        },
    ),
    _route("GET", _BATCHES, "listBatches", "Batches", "List batches", objects.BatchList, parameters=_PAGE),
    _route("GET", f"{_BATCHES}/{{id}}", "getBatch", "Batches", "Get a batch", objects.BatchObject),
    _route("POST", f"{_BATCHES}/{{id}}/cancel", "cancelBatch", "Batches", "Cancel a batch", objects.BatchObject),
)  # fmt: skip
