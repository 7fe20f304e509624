"""Calls as a Python list, which is the whole output (`pythonic`), and Llama 4, which may mark it (`llama4_pythonic`):

    [get_weather(city="Paris"), get_time()]
    <|python_start|>[get_weather(city="Paris")]<|python_end|>

Sources: https://www.llama.com/docs/model-cards-and-prompt-formats/llama4/ and .../llama3_2/.
"""

from __future__ import annotations

from typing import ClassVar, Final

from kvloom_common.parsers.core.python_call import PythonCallParser
from kvloom_common.parsers.core.text_input import Markers, Steps

_START: Final = Markers("<|python_start|>")


class PythonicParser(PythonCallParser):
    markers: ClassVar[tuple[str, ...]] = ()

    def grammar(self) -> Steps[None]:
        self.hold()
        yield from self.attempt(self.call_list())
        yield from self.pass_text()


class Llama4PythonicParser(PythonCallParser):
    markers: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")

    def grammar(self) -> Steps[None]:
        self.hold()
        yield from self.attempt(self._calls())
        while True:
            yield from self.text_until(_START)
            yield from self.attempt(self._calls())

    def _calls(self) -> Steps[None]:
        yield from self.call_list()
        yield from self.accept("<|python_end|>")
