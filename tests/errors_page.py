"""Writes the tables of docs/reference/errors.md from the catalogue of errors and the comments of its proto file.

It is called as `python -m tests.errors_page`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from edge_http.formatting.error_formats import ANTHROPIC_ERRORS
from kvloom.errors import CATALOGUE, KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason

_REPOSITORY: Final = Path(__file__).parents[1]
PAGE: Final = _REPOSITORY / "docs" / "reference" / "errors.md"
MARKER: Final = "<!-- derived: errors -->\n"
_PROTO: Final = _REPOSITORY / "protos" / "kvloom" / "v1" / "error_reason.proto"
_VALUE: Final = re.compile(r"((?:  // .*\n)+)  ERROR_REASON_(\w+) = (\d+);")
_GROUP: Final = re.compile(r"\n  // \d+ to \d+: (.*)\n")
_LINKED: Final = re.compile(r"\(docs/([\w/-]+)\.md\)")
_HEADS: Final = "| reason | when | gRPC | HTTP | OpenAI's code | Anthropic's type |\n|---|---|---|---|---|---|"


def page_with_tables(page: str) -> str:
    """The page with everything below its marker written anew."""
    head, found, _ = page.partition(MARKER)
    assert found, f"docs/reference/errors.md has no {MARKER}"
    parts = _GROUP.split(_PROTO.read_text())[1:]
    tables = [_table(group, values) for group, values in zip(parts[::2], parts[1::2], strict=True)]
    return f"{head}{MARKER}\n" + "\n\n".join(tables) + "\n"


def _table(group: str, values: str) -> str:
    rows = [_row(name, int(number), comment) for comment, name, number in _VALUE.findall(values)]
    return "\n".join([f"## {group.rstrip('.').partition('. ')[0]}\n\n{_HEADS}", *rows])


def _row(name: str, number: int, comment: str) -> str:
    kind = CATALOGUE[number]
    when = _LINKED.sub(_link, re.sub(r"\s*// ?", " ", comment).strip())
    error = KvloomError(ErrorReason.ValueType(number), "")
    anthropic = f"{ANTHROPIC_ERRORS.status(error)} `{ANTHROPIC_ERRORS.body(error)['error']['type']}`"
    code = f"`{kind.openai_code}`" if kind.openai_code else f"– (`{kind.openai_type}`)"
    return f"| `{name}` | {when} | {kind.grpc_code} | {kind.http_status} | {code} | {anthropic} |"


def _link(found: re.Match[str]) -> str:
    return f"([{found[1].rpartition('/')[2]}.md](../{found[1]}.md))"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text()))
