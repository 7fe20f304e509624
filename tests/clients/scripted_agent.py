"""A model that works as that of a coding agent: it reads a file and an image, edits the file, runs a
command, and ends with a text. Once it is cut off in the middle of a call.

It knows the tools of the agents that are checked by their names. What it does next follows from the calls in the
prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvloom.conversation.earlier import omitted

BEFORE, AFTER = "the quick fox", "the slow fox"
NOTE, IMAGE = "note.txt", "pixel.png"
RAN = "ran-42"
COMMAND: Final = "echo ran-$((6*7))"
DONE: Final = "All is done."
IMAGE_SEEN: Final = "image/png"
_CALL: Final = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_TOOLS: Final = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_PATCH: Final = f"*** Begin Patch\n*** Update File: {NOTE}\n@@\n-{BEFORE}\n+{AFTER}\n*** End Patch"

_IMAGE_NOTES: Final = (omitted("image"), IMAGE_SEEN)
READS: Final[Mapping[str, tuple[str, ...]]] = {
    "developer__text_editor": ("path",),
    "Read": ("file_path", "filepath", "path"),
    "read": ("filePath", "path"),
    "read_file": ("path", "file_path"),
    "read_files": ("paths",),
    "view_image": ("path",),
}
"""By the name of a tool: how its argument that names the file may be called."""
EDITS: Final[Mapping[str, tuple[str, str, str]]] = {
    "developer__text_editor": ("path", "old_str", "new_str"),
    "Edit": ("file_path", "old_string", "new_string"),
    "edit": ("filePath", "oldString", "newString"),
    "replace_in_file": ("path", "old_text", "new_text"),
    "editor": ("path", "old_text", "new_text"),
}
SHELLS: Final = (
    "developer__shell",
    "Bash",
    "bash",
    "exec_command",
    "shell_command",
    "shell",
    "execute_command",
    "run_commands",
)
END: Final = "submit_and_exit"
"""Cline asks on until this tool is called."""
_COMMAND_NAMES: Final = ("command", "cmd", "commands")


class Said(NamedTuple):
    """An answer of the model."""

    text: str
    is_cut_off: bool = False
    """It ends as if there were no room for more tokens."""


class ScriptedAgent:
    """The model of one agent's session, in a folder that has the file and the image."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.was_cut_off = False
        self.num_ended = 0
        """How often the work has ended, or would have."""
        self.seen: set[str] = set()
        """Of "read", "image" and "run": what has come back of the calls."""

    def state(self) -> dict[str, Any]:
        """What has come of the session so far."""
        return {"seen": sorted(self.seen), "was_cut_off": self.was_cut_off, "num_ended": self.num_ended}

    def reply(self, prompt: str) -> Said:
        """What the model says to a prompt with all its special tokens."""
        described = _TOOLS.search(prompt)
        self._look(prompt)
        if described is None:
            return self._said_without_tools(prompt)
        tools = {
            tool["function"]["name"]: tool["function"]["parameters"]
            for tool in map(json.loads, described[1].split("\n"))
        }
        steps = self._steps(tools)
        calls = [_read(text) for text in _CALL.findall(prompt[described.end() :])]
        step = next((step for step in steps if not any(_is_call(call, *step) for call in calls)), None)
        if step is None:
            self.num_ended += 1
            return Said(DONE)
        self.num_ended += step[0] == END
        call = json.dumps({"name": step[0], "arguments": step[1]})
        text = f"Let me see.\n<tool_call>\n{call}"
        if step is steps[1] and not self.was_cut_off:
            self.was_cut_off = True
            return Said(text[:-5], is_cut_off=True)
        return Said(f"{text}\n</tool_call>")

    def _look(self, prompt: str) -> None:
        results = prompt.rpartition("</tools>")[2]
        marks = {"read": BEFORE in results, "run": RAN in results}
        marks["image"] = any(note in results for note in _IMAGE_NOTES)
        self.seen |= {name for name, is_there in marks.items() if is_there}

    def _said_without_tools(self, prompt: str) -> Said:
        """A title, a summary and the like, or an agent that edits by its answers' text."""
        if "whole edit format" not in prompt and "*file listing*" not in prompt:
            return Said("A title")
        self.num_ended += 1
        return Said(f"{NOTE}\n```\n{AFTER}\n```\n")

    def _steps(self, tools: Mapping[str, Any]) -> Sequence[tuple[str, Mapping[str, Any]]]:
        reads = next((name for name in READS if name in tools and name != "view_image"), None)
        shell = next((name for name in SHELLS if name in tools), "")
        steps: list[tuple[str, Mapping[str, Any]]] = []
        image = "view_image" if "view_image" in tools else reads
        for name, file in ((reads, NOTE), (image, IMAGE)):
            if name is not None:
                field = _field(tools[name], READS[name])
                path = str(self._folder / file)
                view = {"command": "view"} if name == "developer__text_editor" else {}
                steps.append((name, {field: [path] if field == "paths" else path, **view}))
            elif file == NOTE:
                steps.append((shell, _command(tools[shell], f"cat {NOTE}")))
        edit = next((name for name in EDITS if name in tools), None)
        if edit is not None:
            replace = {"command": "str_replace"} if edit == "developer__text_editor" else {}
            given = dict(zip(EDITS[edit], (str(self._folder / NOTE), BEFORE, AFTER), strict=True))
            steps.append((edit, given | replace))
        elif "apply_patch" in tools:
            steps.append(("apply_patch", {"input": _PATCH}))
        else:
            steps.append((shell, _command(tools[shell], f"sed -i 's/{BEFORE}/{AFTER}/' {NOTE}")))
        steps.append((shell, _command(tools[shell], COMMAND)))
        if END in tools:
            steps.append((END, _with_required({}, tools[END])))
        return steps


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _is_call(call: Any, name: str, arguments: Mapping[str, Any]) -> bool:
    """Agents add arguments with their defaults."""
    return isinstance(call, dict) and call["name"] == name and arguments.items() <= call["arguments"].items()


def _field(schema: Mapping[str, Any], names: Sequence[str]) -> str:
    return next((name for name in names if name in schema.get("properties", {})), names[0])


def _command(schema: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    field = _field(schema, _COMMAND_NAMES)
    given: dict[str, Any] = {field: text}
    if schema["properties"].get(field, {}).get("type") == "array":
        given = {field: [text] if field == "commands" else ["bash", "-lc", text]}
    return _with_required(given, schema)


def _with_required(given: dict[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in schema.get("required", ()):
        given.setdefault(name, True if schema["properties"][name].get("type") == "boolean" else DONE)
    return given
