"""The content blocks of messages, as clients post them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, Union

import msgspec


class CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    """Where a client would like its prompt to be cached. It is accepted and not needed: every prefix is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """A block of a message's content."""

    cache_control: CacheControl | None = None


class TextBlock(Block, kw_only=True, tag="text"):
    text: str
    citations: list[Any] | None = None
    """Clients return what an answer of another service had; it is ignored."""


class ThinkingBlock(Block, kw_only=True, tag="thinking"):
    thinking: str
    signature: str = ""
    """Not checked: kvloom has nothing to hide from the client in it."""


class RedactedThinkingBlock(Block, kw_only=True, tag="redacted_thinking"):
    """Another service's encrypted thinking, which is left out of the prompt."""

    data: str = ""


class ToolUseBlock(Block, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw
    caller: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """Who called; ignored."""
    toolset_name: str | None = None
    """Ignored: kvloom refuses toolsets."""


class ToolResultBlock(Block, kw_only=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None
    toolset_name: str | None = None
    """Ignored: kvloom refuses toolsets."""


class RefusedBlock(msgspec.Struct, tag_field="type"):
    """A block of a kind that kvloom does not support, whatever it has."""

    @classmethod
    def kind(cls) -> str:
        """Its type, e.g. "image"."""
        return str(cls.__struct_config__.tag)


def _refused(*kinds: str) -> list[type]:
    """Each has a name of its own, by which the description of the API tells them apart."""
    names = [f"Refused{kind.title().replace('_', '')}Block" for kind in kinds]
    pairs = zip(names, kinds, strict=True)
    return [msgspec.defstruct(name, [], bases=(RefusedBlock,), tag=kind) for name, kind in pairs]


_REFUSED_RESULTS: Final = _refused("image", "document", "search_result", "tool_reference", "browser_state")
_REFUSED: Final = _refused(
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "container_upload",
    "compaction",
    "fallback",
)

if TYPE_CHECKING:
    ResultBlock = TextBlock | RefusedBlock
    ContentBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | RefusedBlock
else:
    ResultBlock = Union[(TextBlock, *_REFUSED_RESULTS)]
    """What the result of a tool may hold."""
    ContentBlock = Union[
        (
            TextBlock,
            ThinkingBlock,
            RedactedThinkingBlock,
            ToolUseBlock,
            ToolResultBlock,
            *_REFUSED_RESULTS,
            *_REFUSED,
        )
    ]
