"""A Jinja sandbox whose templates end: in time, and with a bounded amount of memory.

Jinja's own sandbox keeps a template away from Python's internals, but `{{ 'a' * 2e9 }}` or three nested loops keep a
process busy for as long as they like. Here every iteration of a loop is counted against a budget and a deadline, and
what makes a large value from small ones at once (multiplication, padding, formatting) is checked before it runs. The
operators `+` and `~` only add up what is there, so a value can double again and again only if it is assigned or passed
on. It is checked then, which costs ordinary templates almost nothing.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

MAX_ITERATIONS: Final = 20_000_000
MAX_SECONDS: Final = 5.0
"""Rendering may take so long. A template that models come with takes milliseconds."""
MAX_TEXT_CHARS: Final = 16 * 2**20
MAX_TOTAL_CHARS: Final = 128 * 2**20
"""All texts that are multiplied, assigned, passed on or put into a list during a rendering have at most so many
characters."""
MAX_ITEMS: Final = 1_000_000
"""A list or tuple that an operator makes has at most so many items."""
MAX_INTEGER_BITS: Final = 4096
MAX_PADDING: Final = 10_000
"""The width to which a text may be padded or indented."""

_PADDING_METHODS: Final = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs"))
_WIDE_FORMAT: Final = re.compile(r"\d{5,}|\*")
"""A width or precision of five digits, or one that is an argument."""
_COUNTED: Final = "_kvloom_counted"
_CHECKED: Final = "_kvloom_checked"
_ITERATIONS_PER_CHECK: Final = 256
"""Between looks at the clock."""


class TemplateLimitError(jinja2.TemplateError):
    """The template needs more time or memory than it may."""


class _Budget(threading.local):
    """Counts what the rendering in this thread may still do."""

    iterations = MAX_ITERATIONS
    chars = MAX_TOTAL_CHARS
    next_check = 0
    """The clock is looked at when so many iterations are left."""
    deadline = float("inf")
    """It counts from the first look at the clock, which most renderings never take."""

    def check(self) -> None:
        now = time.monotonic()
        if self.iterations < 0:
            raise TemplateLimitError(f"its loops run more than {MAX_ITERATIONS} times")
        if now > self.deadline:
            raise TemplateLimitError(f"it takes longer than {MAX_SECONDS:g} s")
        if self.deadline == float("inf"):
            self.deadline = now + MAX_SECONDS
        self.next_check = max(self.iterations - _ITERATIONS_PER_CHECK, 0)


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Call `start` before each rendering. Rendering raises TemplateLimitError."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._budget = _Budget()
        self.filters[_COUNTED] = self._counted
        self.filters[_CHECKED] = self._checked
        for name, check in _FILTER_CHECKS.items():
            self.filters[name] = _after(check, self.filters[name])
        del self.globals["lipsum"]

    def start(self) -> None:
        """Give the rendering that begins now in this thread its whole budget."""
        budget = self._budget
        budget.iterations = MAX_ITERATIONS
        budget.chars = MAX_TOTAL_CHARS
        budget.next_check = MAX_ITERATIONS - _ITERATIONS_PER_CHECK
        budget.deadline = float("inf")

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """Loops count their iterations; the sizes of what is assigned or put into a list or dict are checked."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(jinja2.nodes.For):
            loop.iter = _filtered(loop.iter, _COUNTED)
        for assignment in template.find_all(jinja2.nodes.Assign):
            assignment.node = _checked_node(assignment.node)
        for literal in template.find_all((jinja2.nodes.List, jinja2.nodes.Tuple)):
            if getattr(literal, "ctx", "load") == "load":
                literal.items = [_checked_node(item) for item in literal.items]
        for pair in template.find_all(jinja2.nodes.Pair):
            pair.value = _checked_node(pair.value)
        return template

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        self._spend(1)
        _BINOP_CHECKS[operator](left, right)
        return self._checked(super().call_binop(context, operator, left, right))

    def call(self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self._spend(1)
        for value in (*args, *kwargs.values()):
            self._checked(value)
        text, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(text, str):
            _check_method(text, name, args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Called for every attribute; the result is None unless it is str.format or str.format_map."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def _spend(self, num_iterations: int) -> None:
        budget = self._budget
        budget.iterations -= num_iterations
        if budget.iterations < budget.next_check:
            budget.check()

    def _checked(self, value: Any) -> Any:
        """A value that is kept or passed on. It is at most some times as long as what was checked before."""
        if isinstance(value, str | list | tuple):
            length = len(value)
            _check_length(value, length)
            if isinstance(value, str):
                self._budget.chars -= length
                if self._budget.chars < 0:
                    raise TemplateLimitError(f"its texts have more than {MAX_TOTAL_CHARS} characters together")
        return value

    def _counted(self, items: Iterable[Any]) -> Iterable[Any]:
        """The items, each of which costs an iteration; those of a list are paid at once."""
        if not isinstance(items, list | tuple | range):
            return self._counted_one_by_one(items)
        self._spend(len(items))
        return items

    def _counted_one_by_one(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._spend(1)
            yield item


def _check_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    if name in _PADDING_METHODS and args:
        _check_padding(args[0])
    elif name == "replace" and len(args) >= 2:
        _check_replacement(text, args[0], args[1])
    elif name == "join" and args and isinstance(args[0], list | tuple):
        _check_chars(sum(len(part) + len(text) for part in args[0] if isinstance(part, str)))


def _check_product(left: Any, right: Any) -> None:
    if isinstance(right, str | list | tuple):
        left, right = right, left
    if isinstance(left, str | list | tuple) and isinstance(right, int):
        _check_length(left, len(left) * right)
    elif isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_modulo(left: Any, right: Any) -> None:  # noqa: ARG001  (all checks have one signature)
    if isinstance(left, str):
        _check_format(left)


def _check_length(of: Any, length: int) -> None:
    if isinstance(of, str):
        _check_chars(length)
    elif length > MAX_ITEMS:
        raise TemplateLimitError(f"it makes a list of more than {MAX_ITEMS} items")


def _check_chars(length: int) -> None:
    if length > MAX_TEXT_CHARS:
        raise TemplateLimitError(f"it makes a text of more than {MAX_TEXT_CHARS} characters")


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_INTEGER_BITS:
        raise TemplateLimitError(f"it makes a number of more than {MAX_INTEGER_BITS} bits")


def _check_padding(width: Any) -> None:
    if isinstance(width, str):
        width = len(width)
    if isinstance(width, int | float) and width > MAX_PADDING:
        raise TemplateLimitError(f"it pads a text to more than {MAX_PADDING} characters")


def _check_replacement(text: Any, old: Any, new: Any, *_count: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    if len(new) > len(old):
        _check_chars(len(text) + text.count(old) * (len(new) - len(old)))


def _check_format(text: Any) -> None:
    if _WIDE_FORMAT.search(str(text)):
        raise TemplateLimitError("it formats with a width of five digits or more")


def _check_formatted(text: Any, *_values: Any, **_named: Any) -> None:
    _check_format(text)


def _check_width(_text: Any, width: Any = 0, *_rest: Any, **named: Any) -> None:
    _check_padding(named.get("width", width))


def _check_fill(_items: Any, count: Any = 0, *_rest: Any, **named: Any) -> None:
    _check_padding(next(iter(named.values()), count))


_BINOP_CHECKS: Final[dict[str, Callable[[Any, Any], None]]] = {
    "*": _check_product,
    "**": _check_power,
    "%": _check_modulo,
}
_FILTER_CHECKS: Final[dict[str, Callable[..., None]]] = {
    "center": _check_width,
    "indent": _check_width,
    "format": _check_formatted,
    "batch": _check_fill,
    "slice": _check_fill,
}


def _after(check: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    return checked


def _checked_node(node: Any) -> Any:
    return node if isinstance(node, jinja2.nodes.Const) else _filtered(node, _CHECKED)


def _filtered(node: jinja2.nodes.Node, name: str) -> jinja2.nodes.Expr:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
