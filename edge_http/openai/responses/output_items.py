"""The output of a model as items. A stream and a body have the same ones, however the output was split:

- Text, reasoning and calls become messages, reasoning items and function calls, in the order of the output.
- White space between two items of other kinds, which models write as a matter of form, becomes no message.
- There is at least one item: an empty message, if there was no output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from edge_http.formatting.client_tools import NO_CLIENT_TOOLS, ClientTool, custom_input
from edge_http.formatting.collected_choice import CollectedChoice, Part, PartKind
from edge_http.formatting.json_bytes import Buffer, encode_json
from kvloom_common.conversation.model_output import tool_call_id

WHITE_SPACE: Final = " \n\r\t"
_BLANK: Final = re.compile(rb"(?: |\\[nrt])*")
"""White space as the content of a JSON string."""
_ID_PREFIXES: Final = {PartKind.TEXT: "msg_", PartKind.REASONING: "rs_", PartKind.TOOL_CALL: "fc_"}


class OutputItem:
    """One item, complete or not."""

    __slots__ = ("annotations", "call_id", "content", "delta_frame", "id", "index", "kind", "logprobs", "tool")

    def __init__(
        self, response_id: str, index: int, kind: PartKind, tool: ClientTool | None = None, call_id: str = ""
    ) -> None:
        """`tool`: of a call, as the client knows it."""
        self.index = index
        self.kind = kind
        self.tool = tool or _NO_TOOL
        prefix = "ctc_" if self.tool.is_custom else _ID_PREFIXES[kind]
        self.id = tool_call_id(response_id, 0, index, prefix)
        self.call_id = call_id
        self.content: Buffer = bytearray()
        """The content of a JSON string: of a text, or of a call's arguments."""
        self.logprobs: Buffer = bytearray()
        """The content of a JSON array."""
        self.annotations = b""
        """The content of a JSON array."""
        self.delta_frame = b""
        """For the formatter: the bytes of a delta between its number and its text."""

    def part(self, *, is_added: bool = False) -> list[Buffer]:
        """The pieces of the JSON of the item's content part; when it is added it is empty."""
        text, logprobs, annotations = (b"", b"", b"") if is_added else (self.content, self.logprobs, self.annotations)
        if self.kind is PartKind.REASONING:
            return [b'{"type":"reasoning_text","text":"', text, b'"}']
        head = b'{"type":"output_text","annotations":[%b],"logprobs":[' % annotations
        return [head, logprobs, b'],"text":"', text, b'"}']

    def json(self, status: str, *, is_added: bool = False) -> list[Buffer]:
        """The pieces of the item's JSON; when it is added it has no content."""
        head = b'{"id":"%b","status":"%b",' % (self.id.encode(), status.encode())
        if self.kind is PartKind.TOOL_CALL:
            return self._call(head, is_added=is_added)
        head += b'"type":"reasoning","summary":[],' if self.kind is PartKind.REASONING else _MESSAGE
        return [head + b'"content":[', *([] if is_added else self.part()), b"]}"]

    def _call(self, head: bytes, *, is_added: bool) -> list[Buffer]:
        kind = b"custom_tool_call" if self.tool.is_custom else b"function_call"
        head += b'"type":"%b","call_id":"%b","name":' % (kind, self.call_id.encode()) + encode_json(self.tool.name)
        if self.tool.namespace:
            head += b',"namespace":' + encode_json(self.tool.namespace)
        if self.tool.is_custom:
            return [head, b',"input":', encode_json("" if is_added else self.input()), b"}"]
        return [head, b',"arguments":"', b"" if is_added else self.content, b'"}']

    def input(self) -> str:
        """The text that a tool which takes text is given."""
        return custom_input(self.content)

    def final_status(self, finish_reason: str, *, is_last: bool) -> str:
        """The output ended for this reason: what was cut off is the last item, unless it is a call that is complete."""
        if not is_last or finish_reason not in ("length", "content_filter", "steered"):
            return "completed"
        return "completed" if self.kind is PartKind.TOOL_CALL and _is_object(self.content) else "incomplete"


_NO_TOOL: Final = ClientTool("")
_MESSAGE: Final = b'"type":"message","role":"assistant",'


def collected_items(
    response_id: str,
    choice: CollectedChoice,
    client_tools: Mapping[str, ClientTool] = NO_CLIENT_TOOLS,
    first: int = 0,
) -> list[OutputItem]:
    """The items of an output that is complete. `first`: how many items are before them."""
    items: list[OutputItem] = []
    for number, part in enumerate(choice.parts):
        if part.kind is PartKind.TEXT and _BLANK.fullmatch(part.content):
            continue
        if part.kind is PartKind.REASONING and items and items[-1].kind is PartKind.REASONING:
            items[-1].content += part.content
            continue
        items.append(_item(response_id, first + len(items), choice, number, part, client_tools))
    if items:
        return items
    for number, part in enumerate(choice.parts):  # nothing but white space
        return [_item(response_id, first, choice, number, part, client_tools)]
    return [OutputItem(response_id, first, PartKind.TEXT)]


def items_json(items: Sequence[OutputItem], finish_reason: str) -> list[Buffer]:
    """The pieces of the JSON of a complete output, without the brackets around it."""
    pieces: list[Buffer] = []
    for item in items:
        pieces += [b","] if pieces else []
        pieces += item.json(item.final_status(finish_reason, is_last=item is items[-1]))
    return pieces


def _item(
    response_id: str,
    index: int,
    choice: CollectedChoice,
    number: int,
    part: Part,
    client_tools: Mapping[str, ClientTool],
) -> OutputItem:
    tool = client_tools.get(part.name) or ClientTool(part.name)
    item = OutputItem(response_id, index, part.kind, tool, part.call_id)
    item.content = part.content
    if choice.logprobs and part.kind is PartKind.TEXT:
        item.logprobs = choice.logprobs_of(number)
    return item


def _is_object(content: Buffer) -> bool:
    try:
        value: Any = msgspec.json.decode(msgspec.json.decode(b'"%b"' % content, type=str))
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(value, dict)
