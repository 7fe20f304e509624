"""Plays goose, which no package registry has: sends what goose sends, as its published source makes it
(block/goose, `crates/goose/src/providers/formats/openai.rs` and its developer extension), and does what its model says.

`python tests/clients/goose_player.py URL FOLDER TASK`; the session is kept in FOLDER's `.goose.json`, and taken up
again if it is there. Standard library only: this is a client.

What is goose's own: results of tools with an image say that it follows, and a message of the user with the image
follows; a call whose arguments can't be read has a result that says so, and keeps its name without arguments; content
is null beside calls; thoughts go back as `reasoning_content`; a session is named by a request without tools.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_TURNS = 20
SYSTEM = """You are a general-purpose AI agent called goose, created by Block, the parent company of Square.

goose uses LLM providers with tool calling capability. You can be used with different language models.

# Extensions

## developer

### Instructions
The developer extension gives you the capabilities to edit code files and run shell commands.
"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "developer__shell",
            "description": "Execute a command in the shell.",
            "parameters": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "title": "ShellParams",
                "type": "object",
                "required": ["command"],
                "properties": {"command": {"description": "The command string to execute", "type": "string"}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "developer__text_editor",
            "description": "Perform text editing operations on files.",
            "parameters": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "title": "TextEditorParams",
                "type": "object",
                "required": ["path", "command"],
                "properties": {
                    "path": {"type": "string"},
                    "command": {"description": "view, write, str_replace, insert, undo_edit", "type": "string"},
                    "old_str": {"type": ["string", "null"]},
                    "new_str": {"type": ["string", "null"]},
                    "insert_line": {"format": "int64", "type": ["integer", "null"]},
                    "view_range": {
                        "items": {"format": "int64", "type": "integer"},
                        "maxItems": 2,
                        "minItems": 2,
                        "type": ["array", "null"],
                    },
                },
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "platform__manage_schedule",
            "description": "Manage scheduled recipe execution for this goose instance.",
            "parameters": {"properties": {}, "required": [], "type": "object"},
        },
    },
]


def asked(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer none"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield json.loads(data)


def answered(url: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": "tiny", "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    text, reasoning, has_usage = "", "", False
    calls: dict[int, dict[str, Any]] = {}
    for chunk in asked(url, body | ({"tools": tools} if tools else {})):
        has_usage = has_usage or chunk.get("usage") is not None
        for choice in chunk["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] not in calls:
                    calls[call["index"]] = {
                        "id": call["id"],
                        "type": "function",
                        "function": {"name": call["function"]["name"], "arguments": ""},
                    }
                calls[call["index"]]["function"]["arguments"] += call["function"].get("arguments") or ""
    assert has_usage
    message: dict[str, Any] = {"role": "assistant"}
    if text:
        message["content"] = text
    if calls:
        message["tool_calls"] = list(calls.values())
        message.setdefault("content", None)
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def done(call: dict[str, Any]) -> list[dict[str, Any]]:
    """Carry out a call; the messages with its result."""
    name, given = call["function"]["name"], call["function"]["arguments"]
    try:
        arguments = json.loads(given or "{}")
    except ValueError as error:
        problem = f"Could not interpret tool use parameters for id {call['id']}: {error}. Raw arguments: '{given}'"
        call["function"]["arguments"] = "{}"
        return [{"role": "tool", "content": f"Error: -32602: {problem}", "tool_call_id": call["id"]}]
    image = None
    if name == "developer__shell":
        ran = subprocess.run(arguments["command"], shell=True, capture_output=True, text=True, timeout=30, check=False)
        content = ran.stdout + ran.stderr
    else:
        content, image = edited(Path(arguments["path"]), arguments)
    result = [{"role": "tool", "content": content, "tool_call_id": call["id"]}]
    if image is not None:
        result.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]})
    return result


def edited(path: Path, arguments: dict[str, Any]) -> tuple[str, str | None]:
    if arguments["command"] == "str_replace":
        path.write_text(path.read_text().replace(arguments["old_str"], arguments["new_str"], 1))
        return "The file has been edited, and the section now reads: ...", None
    if path.suffix == ".png":
        encoded = base64.b64encode(path.read_bytes()).decode()
        placeholder = "This tool result included an image that is uploaded in the next message."
        return placeholder, f"data:image/png;base64,{encoded}"
    return f"### {path}\n```\n{path.read_text()}```", None


def main(url: str, folder: str, task: str) -> None:
    kept = Path(folder) / ".goose.json"
    messages = json.loads(kept.read_text()) if kept.exists() else [{"role": "system", "content": SYSTEM}]
    if len(messages) == 1:
        naming = "Based on the conversation so far, provide a concise description of this session in 4 words or less."
        answered(url, [{"role": "system", "content": naming}, {"role": "user", "content": task}], [])
    messages.append({"role": "user", "content": task})
    for _ in range(MAX_TURNS):
        message = answered(url, messages, TOOLS)
        messages.append(message)
        calls = message.get("tool_calls")
        if not calls:
            # As when an answer was cut off in the middle of a call: the user says so, and goose asks again.
            if (message.get("content") or "").startswith("Let me"):
                messages.append({"role": "user", "content": "continue"})
                continue
            break
        for call in calls:
            messages += done(call)
    kept.write_text(json.dumps(messages))
    sys.stdout.write(f"{messages[-1].get('content')}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
