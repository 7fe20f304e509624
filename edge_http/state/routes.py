"""The routes of stored objects. The id of a route is the operation of the orchestrator."""

from __future__ import annotations

from typing import Final

from edge_http.openai.response_objects import ChatCompletion
from edge_http.openapi.route import Route
from edge_http.state import bodies, objects
from edge_http.state.files import create_file, get_content
from edge_http.state.state_route import state_route
from edge_http.state.vector_routes import VECTOR_ROUTES

_PAGE: Final = ("after", "limit", "order")
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
    state_route(
        "GET", _CHAT, "listChatCompletions", "Text", "List stored chat completions", objects.ItemList,
        parameters=(*_PAGE, "stored_model"),
    ),
    state_route(
        "POST", f"{_CHAT}/{{id}}", "updateChatCompletion", "Text", "Change the metadata of a chat completion",
        ChatCompletion, body=bodies.ConversationBody, examples={"A topic": {"metadata": {"topic": "looms"}}},
    ),
    state_route(
        "DELETE", f"{_CHAT}/{{id}}", "deleteChatCompletion", "Text", "Delete a completion", objects.DeletedObject
    ),
    state_route(
        "GET", f"{_CHAT}/{{id}}/messages", "listChatCompletionMessages", "Text", "List what it was given",
        objects.ItemList, parameters=_PAGE,
    ),
    state_route(
        "POST", _CONVERSATIONS, "createConversation", _TAG, "Begin a conversation", objects.ConversationObject,
        body=bodies.NewConversationBody, examples={"With an item": {"items": _HELLO}},
    ),
    state_route("GET", _ONE, "getConversation", _TAG, "Get a conversation", objects.ConversationObject),
    state_route(
        "POST", _ONE, "updateConversation", _TAG, "Change a conversation's metadata", objects.ConversationObject,
        body=bodies.ConversationBody, examples={"A title": {"metadata": {"title": "Looms"}}},
    ),
    state_route("DELETE", _ONE, "deleteConversation", _TAG, "Delete a conversation", objects.DeletedObject),
    state_route(
        "POST", _ITEMS, "createConversationItems", _TAG, "Add items to a conversation", objects.ItemList,
        body=bodies.NewItemsBody, examples={"A message": {"items": _HELLO}},
    ),
    state_route("GET", _ITEMS, "listConversationItems", _TAG, "List items", objects.ItemList, parameters=_PAGE),
    state_route("GET", _ITEM, "getConversationItem", _TAG, "Get an item", objects.ItemObject),
    state_route("DELETE", _ITEM, "deleteConversationItem", _TAG, "Delete an item", objects.ConversationObject),
    state_route("DELETE", "/v1/responses/{id}", "deleteResponse", "Text", "Delete a response", objects.DeletedObject),
    state_route(
        "GET", "/v1/responses/{id}/input_items", "listInputItems", "Text", "List what a response was given",
        objects.ItemList, parameters=_PAGE,
    ),
    state_route("POST", _FILES, "createFile", "Files", "Upload a file", objects.FileObject, handler=create_file),
    state_route("GET", _FILES, "listFiles", "Files", "List files", objects.FileList, parameters=(*_PAGE, "purpose")),
    state_route("GET", _FILE, "getFile", "Files", "Describe a file", objects.FileObject),
    state_route("DELETE", _FILE, "deleteFile", "Files", "Delete a file", objects.DeletedObject),
    state_route(
        "GET", f"{_FILE}/content", "getFileContent", "Files", "Read a file", None, handler=get_content,
        content_type="application/octet-stream",
    ),
    state_route(
        "POST", _BATCHES, "createBatch", "Batches", "Have many requests answered within a day", objects.BatchObject,
        body=bodies.BatchBody,
        examples={
            "Chat": {
                "input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h",
            }
        },
    ),
    state_route("GET", _BATCHES, "listBatches", "Batches", "List batches", objects.BatchList, parameters=_PAGE),
    state_route("GET", f"{_BATCHES}/{{id}}", "getBatch", "Batches", "Get a batch", objects.BatchObject),
    state_route("POST", f"{_BATCHES}/{{id}}/cancel", "cancelBatch", "Batches", "Cancel a batch", objects.BatchObject),
    *VECTOR_ROUTES,
)  # fmt: skip
