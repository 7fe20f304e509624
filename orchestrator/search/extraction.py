"""The text of a file. What must be parsed is parsed in a process of its own, whose memory and time are limited: files
are untrusted, and a document of a few kilobytes may ask for gigabytes.

That process is `python -m orchestrator.search.extraction KIND`: it reads the file from its standard input and writes
the text."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import csv
import io
import json
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Final

UNSUPPORTED: Final = "unsupported_file"
INVALID: Final = "invalid_file"
MAX_TEXT_BYTES: Final = 64 * 2**20
"""The most that the text of a file may have."""
MAX_MEMORY_BYTES: Final = 2 * 2**30
MAX_CPU_SECONDS: Final = 60
MAX_SECONDS: Final = 180.0
_REFUSED: Final = 3
"""The status of the process if it says why there is no text."""
_KINDS: Final[Mapping[str, str]] = {
    "pdf": "pdf",
    "htm": "html",
    "html": "html",
    "xhtml": "html",
    "csv": "csv",
    "tsv": "csv",
    "json": "json",
}
_NOT_READ: Final = ("script", "style", "noscript", "template", "svg", "head", "iframe")
_BLOCKS: Final = frozenset(
    [
        "address",
        "article",
        "aside",
        "blockquote",
        "br",
        "caption",
        "dd",
        "div",
        "dl",
        "dt",
        "figcaption",
        "footer",
        "form",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "header",
        "hr",
        "li",
        "main",
        "nav",
        "ol",
        "p",
        "pre",
        "section",
        "table",
        "td",
        "th",
        "tr",
        "ul",
    ]
)


_HEADINGS: Final = frozenset(["h1", "h2", "h3", "h4", "h5", "h6"])
_SPACE: Final = re.compile(r"\s+")


class UnreadableError(Exception):
    """A file has no text that can be read. `code`: OpenAI's word for why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def kind_of(name: str, content: bytes) -> str:
    """The kind of a file: "pdf", "html", "csv" and "json" must be parsed, and all others are "text"."""
    begin = content[:1024].lstrip().lower()
    if begin.startswith(b"%pdf-"):
        return "pdf"
    if begin.startswith((b"<!doctype html", b"<html")):
        return "html"
    return _KINDS.get(name.rpartition(".")[2].lower(), "text")


def is_markdown(name: str) -> bool:
    return name.lower().endswith((".md", ".markdown"))


async def text_of(name: str, content: bytes, max_seconds: float = MAX_SECONDS) -> str:
    """Raises UnreadableError."""
    kind = kind_of(name, content)
    if kind == "text":
        return await asyncio.to_thread(decoded, content)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "orchestrator.search.extraction", kind),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(max_seconds):
            text, _ = await process.communicate(content)
    except TimeoutError as error:
        raise UnreadableError(INVALID, "The file takes too long to read.") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode == _REFUSED:
        code, _, message = text.decode().partition("\n")
        raise UnreadableError(code, message)
    if process.returncode:
        raise UnreadableError(INVALID, f"The file could not be read as {kind}: it needs too much memory or time.")
    return text.decode()


def decoded(content: bytes) -> str:
    """The text of a file that is text. Raises UnreadableError."""
    encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        raise UnreadableError(UNSUPPORTED, "The file is neither text in UTF-8 nor of a type that is known.") from error
    if "\0" in text:
        raise UnreadableError(UNSUPPORTED, "The file has binary data, and is of no type that is known.")
    return text


def _pdf(content: bytes) -> Iterator[str]:
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    try:
        reader = PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            raise UnreadableError(INVALID, "The PDF is encrypted.")
        for page in reader.pages:
            yield page.extract_text() + "\n\n"
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UnreadableError(INVALID, f"The PDF is damaged: {type(error).__name__}.") from error


def _html(content: bytes) -> Iterator[str]:
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(content)
    title = tree.css_first("title")
    if title is not None and title.text(strip=True):
        yield title.text(strip=True) + "\n\n"
    tree.strip_tags(list(_NOT_READ), recursive=True)
    body = tree.body
    if body is None:
        return
    for node in body.traverse(include_text=True):
        if node.tag == "-text":
            yield _SPACE.sub(" ", node.text_content or "")
        elif node.tag in _BLOCKS:
            yield "\n\n" if node.tag in _HEADINGS else "\n"


def _csv(content: bytes) -> Iterator[str]:
    """A row with the names of its columns, so that it can be read alone."""
    text = decoded(content)
    try:
        dialect: type[csv.Dialect] | str = csv.Sniffer().sniff(text[:8192], delimiters=",;\t|")
    except csv.Error:
        dialect = "excel"
    csv.field_size_limit(MAX_TEXT_BYTES)
    try:
        rows = csv.reader(io.StringIO(text, newline=""), dialect)
        names = next(rows, [])
        for row in rows:
            cells = (f"{name}: {cell}" if name else cell for name, cell in zip(names, row, strict=False) if cell)
            more = row[len(names) :]
            yield ", ".join((*cells, *more)) + "\n"
    except csv.Error as error:
        raise UnreadableError(INVALID, f"The table is damaged: {error}.") from error


def _json(content: bytes) -> Iterator[str]:
    try:
        yield json.dumps(json.loads(decoded(content)), ensure_ascii=False, indent=1)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(INVALID, "The file is not valid JSON.") from error


_PARSERS: Final[Mapping[str, Callable[[bytes], Iterator[str]]]] = {
    "pdf": _pdf,
    "html": _html,
    "csv": _csv,
    "json": _json,
}


def parsed(kind: str, content: bytes) -> bytes:
    """The text of a file of a kind that must be parsed. Raises UnreadableError."""
    pieces = bytearray()
    for piece in _PARSERS[kind](content):
        pieces += piece.replace("\0", "").encode("utf-8", "replace")
        if len(pieces) > MAX_TEXT_BYTES:
            raise UnreadableError(INVALID, f"The file has more than {MAX_TEXT_BYTES} bytes of text.")
    return bytes(pieces)


def main(kind: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
    try:
        text = parsed(kind, sys.stdin.buffer.read())
    except UnreadableError as error:
        sys.stdout.write(f"{error.code}\n{error}")
        sys.exit(_REFUSED)
    sys.stdout.buffer.write(text)


if __name__ == "__main__":
    main(sys.argv[1])
