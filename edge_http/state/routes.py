"""The routes of stored objects. The id of a route is the operation of the orchestrator."""

from __future__ import annotations

from typing import Final

from edge_http.openai.response_objects import ChatCompletion
from edge_http.openapi.route import Route
from edge_http.state import bodies, objects
from edge_http.state.files import create_file, create_part, get_content, in_either_shape
from edge_http.state.handler import operating
from edge_http.state.own_routes import OWN_ROUTES
from edge_http.state.state_route import PAGE
from edge_http.state.state_route import state_route as route
from edge_http.state.vector_routes import VECTOR_ROUTES

_CONVERSATIONS: Final = "/v1/conversations"
_ONE: Final = f"{_CONVERSATIONS}/{{id}}"
_ITEMS: Final = f"{_ONE}/items"
_ITEM: Final = f"{_ITEMS}/{{item_id}}"
_TAG: Final = "Conversations"
_BATCHES: Final = "/v1/batches"
_CHAT: Final = "/v1/chat/completions"
_FILES: Final = "/v1/files"
_FILE: Final = f"{_FILES}/{{id}}"
_UPLOADS: Final = "/v1/uploads"
COMPLETE_SECONDS: Final = 310.0
"""For the parts of an upload to be put together."""
_HOOKS: Final = "/v1/webhook_endpoints"
_HOOK: Final = f"{_HOOKS}/{{id}}"
_HELLO: Final = [{"type": "message", "role": "user", "content": "Hello."}]

STATE_ROUTES: Final[tuple[Route, ...]] = (
    route(
        "GET", _CHAT, "listChatCompletions", "Text", "List stored chat completions", objects.ItemList,
        parameters=(*PAGE, "stored_model"),
    ),
    route(
        "POST", f"{_CHAT}/{{id}}", "updateChatCompletion", "Text", "Change the metadata of a chat completion",
        ChatCompletion, body=bodies.ConversationBody, examples={"A topic": {"metadata": {"topic": "looms"}}},
    ),
    route("DELETE", f"{_CHAT}/{{id}}", "deleteChatCompletion", "Text", "Delete a completion", objects.DeletedObject),
    route(
        "GET", f"{_CHAT}/{{id}}/messages", "listChatCompletionMessages", "Text", "List what it was given",
        objects.ItemList, parameters=PAGE,
    ),
    route(
        "POST", _CONVERSATIONS, "createConversation", _TAG, "Begin a conversation", objects.ConversationObject,
        body=bodies.NewConversationBody, examples={"With an item": {"items": _HELLO}},
    ),
    route("GET", _ONE, "getConversation", _TAG, "Get a conversation", objects.ConversationObject),
    route(
        "POST", _ONE, "updateConversation", _TAG, "Change a conversation's metadata", objects.ConversationObject,
        body=bodies.ConversationBody, examples={"A title": {"metadata": {"title": "Looms"}}},
    ),
    route("DELETE", _ONE, "deleteConversation", _TAG, "Delete a conversation", objects.DeletedObject),
    route(
        "POST", _ITEMS, "createConversationItems", _TAG, "Add items to a conversation", objects.ItemList,
        body=bodies.NewItemsBody, examples={"A message": {"items": _HELLO}},
    ),
    route("GET", _ITEMS, "listConversationItems", _TAG, "List items", objects.ItemList, parameters=PAGE),
    route("GET", _ITEM, "getConversationItem", _TAG, "Get an item", objects.ItemObject),
    route("DELETE", _ITEM, "deleteConversationItem", _TAG, "Delete an item", objects.ConversationObject),
    route("DELETE", "/v1/responses/{id}", "deleteResponse", "Text", "Delete a response", objects.DeletedObject),
    route(
        "GET", "/v1/responses/{id}/input_items", "listInputItems", "Text", "List what a response was given",
        objects.ItemList, parameters=PAGE,
    ),
    route("POST", _FILES, "createFile", "Files", "Upload a file", objects.FileObject, handler=create_file),
    route(
        "GET", _FILES, "listFiles", "Files", "List files", objects.FileList, parameters=(*PAGE, "purpose"),
        handler=in_either_shape("listFiles", "listAnthropicFiles", _FILES),
    ),
    route(
        "GET", _FILE, "getFile", "Files", "Describe a file", objects.FileObject,
        handler=in_either_shape("getFile", "getAnthropicFile", _FILE),
    ),
    route(
        "DELETE", _FILE, "deleteFile", "Files", "Delete a file", objects.DeletedObject,
        handler=in_either_shape("deleteFile", "deleteAnthropicFile", _FILE),
    ),
    route(
        "GET", f"{_FILE}/content", "getFileContent", "Files", "Read a file", None, handler=get_content,
        content_type="application/octet-stream",
    ),
    route(
        "POST", _UPLOADS, "createUpload", "Files", "Begin to upload a file in parts", objects.UploadObject,
        body=bodies.UploadBody,
        examples={
            "A text": {"filename": "looms.txt", "purpose": "user_data", "bytes": 11, "mime_type": "text/plain"}
        },
    ),
    route(
        "POST", f"{_UPLOADS}/{{id}}/parts", "createUploadPart", "Files", "Upload a part", objects.UploadPartObject,
        handler=create_part,
    ),
    route(
        "POST", f"{_UPLOADS}/{{id}}/complete", "completeUpload", "Files", "Make a file of the parts",
        objects.UploadObject, body=bodies.CompleteUploadBody,
        examples={"Two parts": {"part_ids": ["part_1", "part_2"]}},
        handler=operating(
            "completeUpload", f"{_UPLOADS}/{{id}}/complete", bodies.CompleteUploadBody, seconds=COMPLETE_SECONDS
        ),
    ),
    route("POST", f"{_UPLOADS}/{{id}}/cancel", "cancelUpload", "Files", "Cancel an upload", objects.UploadObject),
    route(
        "POST", _BATCHES, "createBatch", "Batches", "Have many requests answered within a day", objects.BatchObject,
        body=bodies.BatchBody,
        examples={
            "Chat": {
                "input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h",
            }
        },
    ),
    route("GET", _BATCHES, "listBatches", "Batches", "List batches", objects.BatchList, parameters=PAGE),
    route("GET", f"{_BATCHES}/{{id}}", "getBatch", "Batches", "Get a batch", objects.BatchObject),
    route("POST", f"{_BATCHES}/{{id}}/cancel", "cancelBatch", "Batches", "Cancel a batch", objects.BatchObject),
    route(
        "POST", _HOOKS, "createWebhookEndpoint", "Webhooks", "Make a webhook endpoint", objects.WebhookEndpointObject,
        body=bodies.NewWebhookBody,
        examples={
            "Responses": {
                "name": "app", "url": "https://app.example.com/hooks", "event_types": ["response.completed"],
            }
        },
    ),
    route(
        "GET", _HOOKS, "listWebhookEndpoints", "Webhooks", "List webhook endpoints", objects.WebhookEndpointList,
        parameters=PAGE,
    ),
    route("GET", _HOOK, "getWebhookEndpoint", "Webhooks", "Get a webhook endpoint", objects.WebhookEndpointObject),
    route(
        "POST", _HOOK, "updateWebhookEndpoint", "Webhooks", "Change a webhook endpoint", objects.WebhookEndpointObject,
        body=bodies.WebhookBody, examples={"A name": {"name": "app 2"}},
    ),
    route("DELETE", _HOOK, "deleteWebhookEndpoint", "Webhooks", "Delete an endpoint", objects.DeletedObject),
    route(
        "POST", f"{_HOOK}/rotate_secret", "rotateWebhookSecret", "Webhooks", "Give an endpoint another secret",
        objects.WebhookEndpointObject, body=bodies.RotateSecretBody,
        examples={"With the old one for a day": {"keep_old_secret_active_for_24_hours": True}},
    ),
    route(
        "POST", f"{_HOOK}/test", "testWebhookEndpoint", "Webhooks", "Send a message as a test",
        objects.WebhookTestObject, body=bodies.WebhookTestBody,
        examples={"A response": {"event_type": "response.completed"}},
    ),
    route(
        "GET", "/v1/webhook_event_types", "listWebhookEventTypes", "Webhooks", "List what can be told of",
        objects.EventTypeList,
    ),
    *VECTOR_ROUTES,
    *OWN_ROUTES,
)  # fmt: skip
