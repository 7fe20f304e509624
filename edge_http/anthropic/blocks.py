"""The content blocks of messages, as clients post them.

Fields that are not listed are left out: other software adds its own to what it keeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Union

import msgspec


class MessageBlock(msgspec.Struct, kw_only=True, tag_field="type"):
    """A block of a message's content."""


class TextBlock(MessageBlock, kw_only=True, tag="text"):
    text: str | None = None
    cache_control: Any = None
    """Where a client would like its prompt to be cached. It is accepted and not needed: every prefix is cached."""


class ThinkingBlock(MessageBlock, kw_only=True, tag="thinking"):
    thinking: str | None = None
    signature: str | None = None
    """Not checked: kvloom has nothing to hide from the client in it."""


class RedactedThinkingBlock(MessageBlock, kw_only=True, tag="redacted_thinking"):
    """Another service's encrypted thinking, which is left out of the prompt."""

    data: Any = None


class ToolUseBlock(MessageBlock, kw_only=True, tag="tool_use"):
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class ServerToolUseBlock(ToolUseBlock, kw_only=True, tag="server_tool_use"):
    """A call that another server answered."""


class McpToolUseBlock(ToolUseBlock, kw_only=True, tag="mcp_tool_use"):
    """A call that another server answered by a server of MCP."""


class MediaBlock(MessageBlock, kw_only=True):
    """A block that a model which reads text cannot take."""


class ImageBlock(MediaBlock, kw_only=True, tag="image"):
    source: Any = None
    """An object: `data`, a `url` or a `file_id`."""


class AudioBlock(MediaBlock, kw_only=True, tag="audio"):
    pass


class BrowserStateBlock(MediaBlock, kw_only=True, tag="browser_state"):
    pass


class ContainerUploadBlock(MediaBlock, kw_only=True, tag="container_upload"):
    pass


class DocumentSource(msgspec.Struct, kw_only=True):
    type: str | None = None
    data: str | None = None
    content: Any = None
    media_type: str | None = None
    file_id: str | None = None
    url: str | None = None


class DocumentBlock(MessageBlock, kw_only=True, tag="document"):
    """A document. Its text is what the model reads; where it is none, an orchestrator reads it."""

    source: DocumentSource | None = None
    title: str | None = None
    context: str | None = None


class SearchResultBlock(MessageBlock, kw_only=True, tag="search_result"):
    """Texts that a search has found."""

    content: list[Any] | None = None
    source: str | None = None
    title: str | None = None


class ToolReferenceBlock(MessageBlock, kw_only=True, tag="tool_reference"):
    tool_name: str | None = None
    name: str | None = None


class CompactionBlock(MessageBlock, kw_only=True, tag="compaction"):
    """The summary of an earlier part of the conversation."""

    content: str | None = None


class DirectiveBlock(msgspec.Struct, tag_field="type"):
    """A block that says something to a server, and nothing to a model."""


def _directives(*kinds: str) -> list[type]:
    """Each has a name of its own, by which the description of the API tells them apart."""
    names = [f"{kind.title().replace('_', '')}Block" for kind in kinds]
    pairs = zip(names, kinds, strict=True)
    return [msgspec.defstruct(name, [], bases=(DirectiveBlock,), tag=kind) for name, kind in pairs]


_DIRECTIVES: Final = _directives("tool_addition", "tool_removal", "fallback")


class ToolResultBlock(MessageBlock, kw_only=True, tag="tool_result"):
    tool_use_id: str | None = None
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


class ServerResultBlock(MessageBlock, kw_only=True):
    """The result of a call that another server answered."""

    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None


def _server_results(*kinds: str) -> list[type]:
    names = [f"{kind.title().replace('_', '')}Block" for kind in kinds]
    pairs = zip(names, kinds, strict=True)
    return [msgspec.defstruct(name, [], bases=(ServerResultBlock,), tag=kind, kw_only=True) for name, kind in pairs]


_SERVER_RESULTS: Final = _server_results(
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_result",
)

if TYPE_CHECKING:
    ResultBlock = TextBlock | MediaBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock
    ContentBlock = (
        ResultBlock
        | ThinkingBlock
        | RedactedThinkingBlock
        | ToolUseBlock
        | ToolResultBlock
        | ServerResultBlock
        | CompactionBlock
        | DirectiveBlock
    )
else:
    _SHARED: Final = (
        TextBlock,
        ImageBlock,
        AudioBlock,
        DocumentBlock,
        SearchResultBlock,
        ToolReferenceBlock,
        BrowserStateBlock,
    )
    ResultBlock = Union[(*_SHARED,)]
    """What the result of a tool may hold."""
    ContentBlock = Union[
        (
            *_SHARED,
            ThinkingBlock,
            RedactedThinkingBlock,
            ToolUseBlock,
            ServerToolUseBlock,
            McpToolUseBlock,
            ToolResultBlock,
            CompactionBlock,
            ContainerUploadBlock,
            *_SERVER_RESULTS,
            *_DIRECTIVES,
        )
    ]


def kind_of(block: msgspec.Struct) -> str:
    """Its type, e.g. "image"."""
    return str(block.__struct_config__.tag)
