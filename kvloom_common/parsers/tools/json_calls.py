"""The families whose calls are JSON. Each class says what the model writes, and where that is documented."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Final

from kvloom_common.parsers.core.json_call import MAX_NAME_CHARS, JsonCallParser
from kvloom_common.parsers.core.text_input import Malformed, Markers, Steps

_PYTHON_TAG: Final = Markers("<|python_tag|>")
_TOOL_CALLS: Final = Markers("[TOOL_CALLS]")
_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]+")


class PlainJsonParser(JsonCallParser):
    """JSON without markers, as models write it that are told to, and as demanded calls come out of a guide:

        {"name": "get_weather", "arguments": {"city": "Paris"}}
        [{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "get_time", "parameters": {}}]

    Calls stand at the beginning of the output; what follows the object or array is text.
    """

    markers: ClassVar[tuple[str, ...]] = ()

    def grammar(self) -> Steps[None]:
        self.hold()
        yield from self.attempt(self._calls())
        yield from self.pass_text()

    def _calls(self) -> Steps[None]:
        yield from self.calls()


class DemandedCallParser(PlainJsonParser):
    """Parses an answer that has room for calls only. A call that is cut off before it has begun is no text: the caller
    has asked for none, and would take the beginning of the JSON for the answer."""

    _reads_calls = True

    def _calls(self) -> Steps[None]:
        try:
            yield from super()._calls()
        except Malformed:
            self._reads_calls = False
            raise
        self._reads_calls = False

    def _release_rest(self) -> None:
        if self._reads_calls:
            self.drop()
            self.position = len(self.text)
        super()._release_rest()


class _MarkedJsonParser(JsonCallParser):
    """The base of families that write one call, or an array of them, behind a marker."""

    begins: ClassVar[Markers]
    ends: ClassVar[Mapping[str, Markers]]
    """By marker, what ends its calls. Others have no end."""

    def grammar(self) -> Steps[None]:
        while True:
            marker = yield from self.text_until(self.begins)
            yield from self.attempt(self._calls(self.ends.get(marker)))

    def _calls(self, end: Markers | None) -> Steps[None]:
        if (yield from self.calls(end)) is None and end is not None:
            yield from self.accept(*end.strings)


class GraniteParser(_MarkedJsonParser):
    """Granite 3.0 to 3.3:

        <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]
        <tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]

    Granite 3.1 writes the second marker. (Granite 4 writes the form of `hermes`, which is accepted here, too.) Sources:
    the chat templates of ibm-granite/granite-3.0-8b-instruct, -3.1- and -3.3-.
    """

    markers: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<tool_call>", "</tool_call>")
    begins: ClassVar[Markers] = Markers("<|tool_call|>", "<tool_call>")
    ends: ClassVar[Mapping[str, Markers]] = {"<tool_call>": Markers("</tool_call>")}


class Phi4Parser(_MarkedJsonParser):
    """Phi-4-mini:

        functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]
        <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>

    The model card shows the second form, the model mostly writes the first. Source: the model card and tokenizer of
    microsoft/Phi-4-mini-instruct.
    """

    markers: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<|/tool_call|>")
    begins: ClassVar[Markers] = Markers("functools", "<|tool_call|>")
    ends: ClassVar[Mapping[str, Markers]] = {"<|tool_call|>": Markers("<|/tool_call|>")}


class HermesParser(_MarkedJsonParser):
    """Hermes 2 Pro and 3, Qwen 2.5 and 3, Granite 4 and many others:

        <tool_call>
        {"name": "get_weather", "arguments": {"city": "Paris"}}
        </tool_call>

    One object per pair of markers. Sources: the chat templates of NousResearch/Hermes-3-Llama-3.1-8B and
    Qwen/Qwen2.5-7B-Instruct; https://github.com/NousResearch/Hermes-Function-Calling.
    """

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    begins: ClassVar[Markers] = Markers("<tool_call>")
    ends: ClassVar[Mapping[str, Markers]] = {"<tool_call>": Markers("</tool_call>")}

    def calls(self, end: Markers | None = None) -> Steps[str | None]:
        return self.call_object(end)


class Llama3JsonParser(JsonCallParser):
    """Llama 3.1 to 3.3:

        {"name": "get_weather", "parameters": {"city": "Paris"}}
        <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}

    The whole output is the call, or what follows `<|python_tag|>` is. "arguments" is accepted, too. Several calls are
    separated by semicolons, commas or lines. Source:
    https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/.
    """

    markers: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)

    def grammar(self) -> Steps[None]:
        self.hold()
        yield from self.attempt(self._calls())
        while True:
            yield from self.text_until(_PYTHON_TAG)
            yield from self.attempt(self._calls())

    def _calls(self) -> Steps[None]:
        while True:
            yield from self.call_object()
            if (yield from self.accept(";", ",")) is not None:
                self.hold()


class MistralParser(JsonCallParser):
    """Mistral's models, in the form of tokenizers up to v7, and in the later one:

        [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "aBcDeFgH1"}]
        [TOOL_CALLS]get_weather[CALL_ID]aBcDeFgH1[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}

    `[CALL_ID]` and its id, and even `[ARGS]`, may be missing. Sources: https://github.com/mistralai/mistral-common and
    the chat templates of mistralai/Mistral-7B-Instruct-v0.3 and mistralai/Mistral-Small-3.2-24B-Instruct-2506.
    """

    markers: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def grammar(self) -> Steps[None]:
        while True:
            yield from self.text_until(_TOOL_CALLS)
            yield from self.attempt(self._calls())

    def _calls(self) -> Steps[None]:
        yield from self.skip_space()
        if (yield from self.peek()) in "[{":
            yield from self.calls()
            return
        name = yield from self.run_of(_NAME, MAX_NAME_CHARS)
        self.check_name(name)
        if (yield from self.accept("[ARGS]", "[CALL_ID]")) == "[CALL_ID]":
            yield from self.run_of(_NAME, MAX_NAME_CHARS)
            yield from self.expect("[ARGS]")
        yield from self.arguments(name)
