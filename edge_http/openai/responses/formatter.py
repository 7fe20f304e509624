"""The format of responses, streamed and complete.

An event's `sequence_number` is the number of events before it. The state of a formatter follows from the output alone,
however it was split: another edge that has seen the same output continues with the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from edge_http.formatting.client_tools import ClientTool, client_tools_of
from edge_http.formatting.collected_choice import CollectedChoice, PartKind
from edge_http.formatting.error_formats import RESPONSES_ERRORS
from edge_http.formatting.json_bytes import Buffer, Json, encode_json
from edge_http.formatting.response_formatter import ChoiceFinish, Envelope, ResponseFormatter
from edge_http.formatting.usage import Usage
from edge_http.openai.logprobs import chat_logprobs, cut_chat_logprobs
from edge_http.openai.responses.file_search import ShownSearch, search_of
from edge_http.openai.responses.output_items import WHITE_SPACE, OutputItem, collected_items, items_json
from edge_http.openai.responses.response_object import ResponseObject, status_of
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import TokenLogprobs
from kvloom_common.parsers.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom_common.text.tokenizer import ModelTokenizer


def _head(name: str) -> bytes:
    """The bytes of an event before its number."""
    return b'event: %b\ndata: {"type":"%b","sequence_number":' % (name.encode(), name.encode())


_CREATED: Final = _head("response.created")
_IN_PROGRESS: Final = _head("response.in_progress")
_ITEM_ADDED: Final = _head("response.output_item.added")
_ITEM_DONE: Final = _head("response.output_item.done")
_COMPACTING: Final = _head("response.compaction.compacting")
LEADING: Final = "leading"
"""The option with the items, all of them compactions, that the output begins with."""
_PART_ADDED: Final = _head("response.content_part.added")
_PART_DONE: Final = _head("response.content_part.done")
_ENDINGS: Final = {status: _head(f"response.{status}") for status in ("completed", "incomplete", "failed")}
_DELTA: Final = {
    PartKind.TEXT: _head("response.output_text.delta"),
    PartKind.REASONING: _head("response.reasoning_text.delta"),
    PartKind.TOOL_CALL: _head("response.function_call_arguments.delta"),
}
_DONE: Final = {
    PartKind.TEXT: _head("response.output_text.done"),
    PartKind.REASONING: _head("response.reasoning_text.done"),
    PartKind.TOOL_CALL: _head("response.function_call_arguments.done"),
}
_SEARCH_IN_PROGRESS: Final = _head("response.file_search_call.in_progress")
_SEARCHING: Final = _head("response.file_search_call.searching")
_SEARCHED: Final = _head("response.file_search_call.completed")
_CITED: Final = _head("response.output_text.annotation.added")
_CUSTOM_DELTA: Final = _head("response.custom_tool_call_input.delta")
_CUSTOM_DONE: Final = _head("response.custom_tool_call_input.done")
_DELTA_TAIL: Final = {PartKind.TEXT: b',"logprobs":[]}', PartKind.REASONING: b"}", PartKind.TOOL_CALL: b"}"}


class ResponsesFormatter(ResponseFormatter):
    """Formats the one choice of a response."""

    __slots__ = (
        "_client_tools",
        "_finish_reason",
        "_has_all_logprobs",
        "_held",
        "_held_logprobs",
        "_items",
        "_leading",
        "_number",
        "_object",
        "_search",
        "_tokenizer",
    )

    def __init__(self, envelope: Envelope, tokenizer: ModelTokenizer, options: Mapping[str, Any]) -> None:
        """`options` has `echo`, see ResponseObject, what client_tools.py and file_search.py say, and maybe LEADING."""
        super().__init__(envelope)
        self._leading: Sequence[Json] = options.get(LEADING, ())
        self._client_tools = client_tools_of(options)
        self._tokenizer = tokenizer
        self._object = ResponseObject(envelope, options["echo"])
        self._search = search_of(envelope.id, options)
        """It comes before the output."""
        self._items: list[OutputItem] = []
        """The last one is open."""
        self._held = ""
        """White space that may belong to no message."""
        self._held_logprobs: list[bytes] = []
        self._has_all_logprobs = True
        """They are repeated at the end of a text, except those that another edge has sent: they are not kept."""
        self._finish_reason = ""
        self._number = 0
        """The next event's."""

    def opening(self, index: int, num_cached_tokens: int) -> Sequence[bytes]:  # noqa: ARG002
        begun = b',"response":%b}' % self._object.begun()
        chunks = [self._event(_CREATED, begun), self._event(_IN_PROGRESS, begun)]
        for place, item in enumerate(self._leading):
            added = encode_json({**item, "encrypted_content": ""})
            chunks.append(self._event(_ITEM_ADDED, b',"output_index":%d,"item":%b}' % (place, added)))
            where = b',"item_id":%b,"output_index":%d}' % (encode_json(item["id"]), place)
            chunks.append(self._event(_COMPACTING, where))
            chunks.append(self._event(_ITEM_DONE, b',"output_index":%d,"item":%b}' % (place, encode_json(item))))
        return chunks if self._search is None else [*chunks, *self._searched(self._search, len(self._leading))]

    def _searched(self, search: ShownSearch, number: int) -> list[bytes]:
        """The events of a search, which is over by now. `number`: its place in the output."""
        place = b',"item_id":"%b","output_index":%d}' % (search.id.encode(), number)
        heads = [_SEARCH_IN_PROGRESS, _SEARCHING, *([_SEARCHED] if search.status == "completed" else [])]
        return [
            self._event(_ITEM_ADDED, b',"output_index":%d,"item":%b}' % (number, search.json("in_progress"))),
            *(self._event(head, place) for head in heads),
            self._event(_ITEM_DONE, b',"output_index":%d,"item":%b}' % (number, search.json())),
        ]

    def output(self, index: int, events: Sequence[Event]) -> Sequence[bytes]:  # noqa: ARG002
        return self._output(events, b"")

    def output_with_logprobs(self, index: int, events: Sequence[Event], logprobs: Sequence[bytes]) -> Sequence[bytes]:  # noqa: ARG002
        """Tokens belong to the text that their output ends with. If it has not come out yet, they belong to the text
        that is open, or to the one that the output begins with."""
        [entries] = logprobs
        if events or not entries:
            return self._output(events, entries)
        if self._items and self._items[-1].kind is PartKind.TEXT:
            chunks: list[bytes] = []
            self._add_delta(chunks, self._items[-1], "", entries)
            return chunks
        if self._held or not self._items:
            self._held_logprobs.append(entries)
        return ()

    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Sequence[bytes]:  # noqa: ARG002
        return (chat_logprobs(self._tokenizer, token_ids, entries),)

    def cut_logprobs(self, logprobs: Sequence[bytes], num_bytes: int) -> Sequence[bytes]:
        [content] = logprobs
        return (cut_chat_logprobs(content, num_bytes),)

    def skip(self, index: int, token_ids: Sequence[int]) -> None:  # noqa: ARG002
        if token_ids:
            self._has_all_logprobs = False

    def restore(self, num_events: int) -> None:
        self._number = num_events

    def finish(self, index: int, finish: ChoiceFinish, details: Json | None) -> Sequence[bytes]:  # noqa: ARG002
        self._finish_reason = finish.reason
        chunks: list[bytes] = []
        if not self._items:
            self._begin(PartKind.TEXT, chunks)
            if self._held:
                self._add_held_delta(chunks, "", b"")
        self._close(finish.reason, chunks)
        return chunks

    def ending(self, usage: Callable[[], Usage], details: Json | None) -> Sequence[bytes]:
        output = [*self._before(), *items_json(self._items, self._finish_reason)]
        if not self._items:  # nothing was generated
            output = output[:-1]
        ended = self._object.ended(self._finish_reason, output, usage(), details, self.moderation)
        return (self._event(_ENDINGS[status_of(self._finish_reason)], b',"response":', *ended, b"}"),)

    def error(self, error: KvloomError) -> bytes:
        if error.reason == ErrorReason.ERROR_REASON_CLIENT_TOO_SLOW:  # it will not read a long event
            return RESPONSES_ERRORS.event(error, self._number)
        output: list[Buffer] = self._before()[:-1]
        for item in self._items:
            output += [b","] if output else []
            output += item.json("incomplete" if item is self._items[-1] else "completed")
        return self._event(_ENDINGS["failed"], b',"response":%b}' % self._object.failed(error, output))

    def body(self, choices: Sequence[CollectedChoice], usage: Usage, details: Json | None) -> list[Buffer]:
        [choice] = choices
        items = collected_items(self._envelope.id, choice, self._client_tools, self._num_before)
        if self._search is not None:
            for item in items:
                if item.kind is PartKind.TEXT:
                    self._search.cite(item)
        output = [*self._before(), *items_json(items, choice.finish_reason)]
        return self._object.ended(choice.finish_reason, output, usage, details, self.moderation)

    @property
    def may_end(self) -> bool:
        return not self._items or self._items[-1].kind is not PartKind.TOOL_CALL

    @property
    def _num_before(self) -> int:
        """The items before the output."""
        return len(self._leading) + int(self._search is not None)

    def _before(self) -> list[Buffer]:
        """Their JSON, with a comma behind each."""
        before = [*map(encode_json, self._leading), *([] if self._search is None else [self._search.json()])]
        return [piece for item in before for piece in (item, b",")]

    def _output(self, events: Sequence[Event], logprobs: bytes) -> Sequence[bytes]:
        chunks: list[bytes] = []
        for event in events:
            match event:
                case TextDelta():
                    self._text(event.text, logprobs if event is events[-1] else b"", chunks)
                case ReasoningDelta():
                    self._reasoning(event.text, chunks)
                case ToolCallStart():
                    self._begin(PartKind.TOOL_CALL, chunks, event.name, self.call_id(0, event.index))
                case ToolCallArguments():
                    self._arguments(self._items[-1], event.text, chunks)
                case _:  # a call is closed by what follows it: only the end of the output tells if it was cut off
                    pass
        return chunks

    def _arguments(self, item: OutputItem, text: str, chunks: list[bytes]) -> None:
        if item.tool.is_custom:  # its text is sent when it is whole
            item.content += encode_json(text)[1:-1]
        else:
            self._add_delta(chunks, item, text)

    def _text(self, text: str, logprobs: bytes, chunks: list[bytes]) -> None:
        if self._items and self._items[-1].kind is PartKind.TEXT:
            self._add_delta(chunks, self._items[-1], text, logprobs)
        elif not text.strip(WHITE_SPACE):
            self._held += text
            self._held_logprobs += [logprobs] if logprobs else []
        else:
            self._begin(PartKind.TEXT, chunks)
            self._add_held_delta(chunks, text, logprobs)

    def _reasoning(self, text: str, chunks: list[bytes]) -> None:
        if self._items and self._items[-1].kind is PartKind.REASONING:
            self._drop_held()
        else:
            self._begin(PartKind.REASONING, chunks)
        self._add_delta(chunks, self._items[-1], text)

    def _add_held_delta(self, chunks: list[bytes], text: str, logprobs: bytes) -> None:
        """The first delta of a message."""
        text = self._held + text
        logprobs = b",".join([*self._held_logprobs, logprobs] if logprobs else self._held_logprobs)
        self._drop_held()
        self._add_delta(chunks, self._items[-1], text, logprobs)

    def _drop_held(self) -> None:
        self._held = ""
        self._held_logprobs = []

    def _begin(self, kind: PartKind, chunks: list[bytes], name: str = "", call_id: str = "") -> None:
        if kind is not PartKind.TEXT:
            self._drop_held()
        if self._items:
            self._close("", chunks)
        tool = self._client_tools.get(name) or ClientTool(name)
        item = OutputItem(self._envelope.id, self._num_before + len(self._items), kind, tool, call_id)
        self._items.append(item)
        added = b',"output_index":%d,"item":' % item.index
        chunks.append(self._event(_ITEM_ADDED, added, *item.json("in_progress", is_added=True), b"}"))
        if kind is not PartKind.TOOL_CALL:
            chunks.append(self._event(_PART_ADDED, _place(item), b',"part":', *item.part(is_added=True), b"}"))
        item.delta_frame = _place(item) + b',"delta":'

    def _close(self, finish_reason: str, chunks: list[bytes]) -> None:
        """End the open item. The output ended for this reason; "" if another item follows."""
        item = self._items[-1]
        place, done = _place(item), _DONE[item.kind]
        match item.kind:
            case PartKind.TOOL_CALL if item.tool.is_custom:
                text = encode_json(item.input())
                chunks.append(self._event(_CUSTOM_DELTA, place, b',"delta":', text, b"}"))
                chunks.append(self._event(_CUSTOM_DONE, place, b',"input":', text, b"}"))
            case PartKind.TOOL_CALL:
                chunks.append(self._event(done, place, b',"arguments":"', item.content, b'"}'))
            case PartKind.REASONING:
                chunks.append(self._event(done, place, b',"text":"', item.content, b'"}'))
            case PartKind.TEXT:
                if self._search is not None:
                    self._cite(self._search, item, place, chunks)
                text = (b',"text":"', item.content, b'","logprobs":[', item.logprobs, b"]}")
                chunks.append(self._event(done, place, *text))
        if item.kind is not PartKind.TOOL_CALL:
            chunks.append(self._event(_PART_DONE, place, b',"part":', *item.part(), b"}"))
        status = item.final_status(finish_reason, is_last=True)
        ended = b',"output_index":%d,"item":' % item.index
        chunks.append(self._event(_ITEM_DONE, ended, *item.json(status), b"}"))

    def _cite(self, search: ShownSearch, item: OutputItem, place: bytes, chunks: list[bytes]) -> None:
        for number, annotation in enumerate(search.cite(item)):
            chunks.append(self._event(_CITED, place, b',"annotation_index":%d,"annotation":%b}' % (number, annotation)))

    def _add_delta(self, chunks: list[bytes], item: OutputItem, text: str, logprobs: bytes = b"") -> None:
        chunks.append(self._delta(item, text, logprobs))

    def _delta(self, item: OutputItem, text: str, logprobs: bytes = b"") -> bytes:
        """The hot path."""
        number = self._number
        self._number = number + 1
        encoded = encode_json(text)
        item.content += encoded[1:-1]
        tail = _DELTA_TAIL[item.kind]
        if logprobs:
            tail = b',"logprobs":[%b]}' % logprobs
            if self._has_all_logprobs:
                item.logprobs += b"," + logprobs if item.logprobs else logprobs
        return b"%b%d%b%b%b" % (_DELTA[item.kind], number, item.delta_frame, encoded, tail)

    def _event(self, head: bytes, *pieces: Buffer) -> bytes:
        number = self._number
        self._number = number + 1
        return b"".join((head, b"%d" % number, *pieces))


def _place(item: OutputItem) -> bytes:
    """The fields that say to which item and part an event belongs."""
    index = b"" if item.kind is PartKind.TOOL_CALL else b',"content_index":0'
    return b',"item_id":"%b","output_index":%d%b' % (item.id.encode(), item.index, index)
