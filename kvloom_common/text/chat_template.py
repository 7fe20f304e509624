"""Chat templates: they render a conversation as the text that the model was trained on.

Templates come with the model (Jinja, Hugging Face's conventions) and run in a bounded sandbox. They see
`messages`, `tools` (None if there are none), `add_generation_prompt`, the request's own options such as
`enable_thinking`, the special tokens by name (`bos_token`, ...), `raise_exception`, `strftime_now` and `tojson`;
`documents` is None.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from kvloom.errors import KvloomError, invalid_argument
from kvloom.text.chat_message import ChatMessage
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.text.bounded_template import BoundedEnvironment, TemplateLimitError

MAX_RENDERED_CHARS: Final = 16 * 2**20
_MAX_INDENT: Final = 16
_MAX_REASON_CHARS: Final = 500
_ROLE: Final = re.compile(r"[a-z][a-z_]{0,31}")
_NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TemplateRejectionError(KvloomError):
    """A template does not take the messages; told in another way, it may."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote, for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2.ext.Extension declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template, compiled once."""

    def __init__(self, source: str, named_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        """`named_tokens`: the special tokens by name, e.g. {"bos_token": "<s>"}. `tool_source`: another template for
        conversations with tools. Raises ValueError when a source is not a template."""
        self.source = tool_source or source
        """The template's text, by which the model's way of writing calls is recognised."""
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        functions: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        environment.globals |= functions
        try:
            self._template = self._tool_template = _compiled(environment, source)
            if tool_source is not None:
                self._tool_template = _compiled(environment, tool_source)
            self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(self.source))
            """True when the template shows tools to the model."""
        except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, OverflowError) as error:
            raise ValueError(f"The chat template does not compile: {str(error)[:_MAX_REASON_CHARS]}") from error
        self._start = environment.start
        self._named_tokens = dict(named_tokens)

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate | None:
        """Load the template from chat_template.jinja, otherwise from tokenizer_config.json. None when the model has no
        template. Raises ValueError."""
        config = read_json(model_dir / "tokenizer_config.json")
        separate = model_dir / "chat_template.jinja"
        path = separate if separate.is_file() else model_dir / "tokenizer_config.json"
        try:
            source = separate.read_text("utf-8") if path is separate else config.get("chat_template")
            default = _named_template(source, "default")
            return cls(default, named_tokens(config), _tool_template(source)) if default else None
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def render(self, messages: Sequence[ChatMessage], *, max_chars: int = MAX_RENDERED_CHARS) -> str:
        """The prompt, up to where the assistant's answer begins. Raises KvloomError (INVALID_ARGUMENT) when the
        template rejects the messages."""
        return self.render_variables(message_variables(messages), max_chars=max_chars)

    def render_variables(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        *,
        max_chars: int = MAX_RENDERED_CHARS,
        add_generation_prompt: bool = True,
    ) -> str:
        """Renders as `render` does, for messages and tools in the form in which templates see them. `options`:
        further variables of the request. `add_generation_prompt`: the prompt ends with the beginning of an
        assistant's message."""
        if not messages:
            raise invalid_argument("messages must hold at least one message.", "messages")
        for i, message in enumerate(messages):
            if not _ROLE.fullmatch(message["role"]):
                raise invalid_argument(f"messages[{i}].role is not a valid role name.", f"messages[{i}].role")
        variables: dict[str, Any] = {
            **(options or {}),
            **self._named_tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools or None,
            "documents": None,
        }
        self._start()
        try:
            return self._render_bounded(self._tool_template if tools else self._template, variables, max_chars)
        except KvloomError:
            raise
        except TemplateLimitError as error:
            message = f"The model's chat template cannot be rendered with these messages: {error}."
            raise invalid_argument(message, "messages") from error
        except jinja2.TemplateError as error:
            reason = str(error)[:_MAX_REASON_CHARS]
            message = f"The model's chat template rejects these messages: {reason}"
            raise TemplateRejectionError(
                ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, field="messages"
            ) from error
        except Exception as error:
            # A template may do anything with its input, so any other exception is caused by the messages.
            raise invalid_argument("The model's chat template cannot render these messages.", "messages") from error

    @staticmethod
    def _render_bounded(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> str:
        pieces: list[str] = []
        num_chars = 0
        for piece in template.root_render_func(template.new_context(variables)):
            num_chars += len(piece)
            if num_chars > max_chars:
                raise invalid_argument(f"The rendered messages are longer than {max_chars} characters.", "messages")
            pieces.append(piece)
        return "".join(pieces)


def _named_template(value: Any, name: str) -> str | None:
    """The template in tokenizer_config.json: a text, or the one of several that has this name. Raises ValueError."""
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == name]
        value = named[-1].get("template") if named else None
    if value is not None and not isinstance(value, str):
        raise ValueError("chat_template is no text.")
    return value


def _tool_template(value: Any) -> str | None:
    """The template for conversations with tools, where there is one beside the default."""
    return _named_template(value, "tool_use") if isinstance(value, list) else None


class JsonObject(dict[str, Any]):
    """The arguments of a call. Some templates write them with `tojson`, others as if they were text already."""

    def __str__(self) -> str:
        return _to_json(self)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def message_variables(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as templates see them."""
    return [
        _full_variables(message)
        if message.tool_calls or message.tool_call_id or message.name or message.reasoning
        else {"role": message.role, "content": message.content}
        for message in messages
    ]


def _full_variables(message: ChatMessage) -> dict[str, Any]:
    variables: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        variables["reasoning_content"] = message.reasoning
    if message.tool_calls:
        variables["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": JsonObject(json.loads(call.arguments))},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        variables["tool_call_id"] = message.tool_call_id
    if message.name:
        variables["name"] = message.name
    return variables


def _compiled(environment: BoundedEnvironment, source: str) -> jinja2.Template:
    template = environment.from_string(source)
    # Jinja's own globals are a chain of maps, which each rendering would walk through to copy them.
    template.globals = dict(template.globals)
    return template


def named_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that tokenizer_config.json names, e.g. {"eos_token": "</s>"}."""
    found: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        value = tokenizer_config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} when there is no such file. Raises ValueError that names the file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: The file is not a JSON object.")  # noqa: TRY004  (the file's content is wrong)
    return value


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes <, > and & for HTML. Models were not trained on that.
    return json.dumps(value, ensure_ascii=False, indent=None if indent is None else min(indent, _MAX_INDENT))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_string: str) -> str:
    return datetime.datetime.now().strftime(format_string)
