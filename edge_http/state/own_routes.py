"""The routes of stored objects that OpenAI's API does not have. They stand below a prefix of their own."""

from __future__ import annotations

from typing import Final

from edge_http.openapi.route import Route
from edge_http.state import bodies, objects
from edge_http.state.erased_tenant import erased_tenant
from edge_http.state.handler import JSON_LINES, exporting, operating
from edge_http.state.state_route import PAGE
from edge_http.state.state_route import state_route as route

PREFIX: Final = "/kvloom/v1"
_PROMPTS: Final = f"{PREFIX}/prompts"
_PROMPT: Final = f"{_PROMPTS}/{{id}}"
_TEMPLATE: Final = {"instructions": "Answer in {{language}}."}
_CONVERSATIONS: Final = f"{PREFIX}/conversations"
_ONE: Final = f"{_CONVERSATIONS}/{{id}}"
_TAG: Final = "Conversations"
_RESPONSES: Final = f"{PREFIX}/responses"
_FEEDBACK: Final = f"{_RESPONSES}/{{id}}/feedback"
_RETENTION: Final = f"{PREFIX}/retention"
_ERASURES: Final = f"{PREFIX}/erasures"


def _export(path: str, name: str, tag: str, summary: str, parameters: tuple[str, ...] = ()) -> Route:
    return route(
        "GET", path, name, tag, summary, None, handler=exporting(name, path), content_type=JSON_LINES,
        parameters=parameters,
    )  # fmt: skip


OWN_ROUTES: Final[tuple[Route, ...]] = (
    route(
        "GET", _CONVERSATIONS, "listConversations", _TAG, "List or search conversations", objects.HistoryList,
        parameters=(*PAGE, "search", "deleted"),
    ),
    route(
        "POST", _ONE, "titleConversation", _TAG, "Give a conversation a title", objects.HistoryObject,
        body=bodies.TitleBody, examples={"A title": {"title": "Looms"}},
    ),
    route(
        "DELETE", _ONE, "removeConversation", _TAG, "Delete a conversation for a while", objects.RemovedObject
    ),
    route("POST", f"{_ONE}/restore", "restoreConversation", _TAG, "Restore a conversation", objects.HistoryObject),
    _export(f"{_ONE}/export", "exportConversation", _TAG, "Export a conversation"),
    _export(f"{_CONVERSATIONS}/export", "exportConversations", _TAG, "Export all conversations"),
    route(
        "POST", _FEEDBACK, "giveFeedback", "Feedback", "Give feedback on a response", objects.FeedbackObject,
        body=bodies.FeedbackBody, examples={"A thumb": {"rating": "up", "text": "Just what I wanted."}},
    ),
    route("GET", _FEEDBACK, "getFeedback", "Feedback", "Get the feedback on a response", objects.FeedbackObject),
    route("DELETE", _FEEDBACK, "deleteFeedback", "Feedback", "Delete the feedback", objects.DeletedObject),
    route(
        "GET", f"{PREFIX}/feedback", "listFeedback", "Feedback", "List feedback", objects.FeedbackList,
        parameters=(*PAGE, "rating"),
    ),
    _export(
        f"{_RESPONSES}/export", "exportResponses", "Feedback", "Export responses with their feedback", ("feedback",)
    ),
    route(
        "POST", _PROMPTS, "createPrompt", "Prompts", "Make a prompt", objects.PromptObject,
        body=bodies.NewPromptBody, examples={"With a variable": {"name": "translator", **_TEMPLATE}},
    ),
    route("GET", _PROMPTS, "listPrompts", "Prompts", "List prompts", objects.PromptList, parameters=PAGE),
    route(
        "GET", _PROMPT, "getPrompt", "Prompts", "Get a prompt", objects.PromptObject, parameters=("prompt_version",)
    ),
    route("DELETE", _PROMPT, "deletePrompt", "Prompts", "Delete a prompt with its versions", objects.DeletedObject),
    route(
        "POST", f"{_PROMPT}/versions", "createPromptVersion", "Prompts", "Give a prompt a further version",
        objects.PromptObject, body=bodies.PromptVersionBody, examples={"With a variable": _TEMPLATE},
    ),
    route(
        "GET", _RETENTION, "getRetention", "Retention", "Get how long contents are kept", objects.RetentionObject,
        scope="admin",
    ),
    route(
        "POST", _RETENTION, "setRetention", "Retention", "Set how long contents are kept", objects.RetentionObject,
        body=bodies.RetentionBody, examples={"A week": {"days": 7}}, scope="admin",
    ),
    route(
        "POST", _ERASURES, "createErasure", "Retention", "Erase a user's objects, or all", objects.ErasureObject,
        body=bodies.ErasureBody, examples={"A user": {"safety_identifier": "user-17"}}, scope="admin",
        handler=operating("createErasure", _ERASURES, bodies.ErasureBody, erased_tenant),
    ),
    route(
        "GET", _ERASURES, "listErasures", "Retention", "List erasures", objects.ErasureList, parameters=PAGE,
        scope="admin",
    ),
    route(
        "GET", f"{_ERASURES}/{{id}}", "getErasure", "Retention", "Get an erasure", objects.ErasureObject, scope="admin"
    ),
)  # fmt: skip
