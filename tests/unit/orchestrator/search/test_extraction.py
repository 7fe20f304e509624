"""What is read of files of each type, and what is said of those that cannot be read."""

from __future__ import annotations

import io
import json

import pytest
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from orchestrator.search.extraction import INVALID, UNSUPPORTED, UnreadableError, decoded, kind_of, parsed, text_of


def pdf_of(text: str) -> bytes:
    """A PDF with a page that has this text."""
    writer = PdfWriter()
    page = writer.add_blank_page(300, 300)
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    page[NameObject("/Resources")] = DictionaryObject(
        {NameObject("/Font"): DictionaryObject({NameObject("/F1"): writer._add_object(font)})}
    )
    stream = DecodedStreamObject()
    stream.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode())
    page[NameObject("/Contents")] = writer._add_object(stream)
    written = io.BytesIO()
    writer.write(written)
    return written.getvalue()


HTML = b"""<!DOCTYPE html><html><head><title>Looms</title><style>p {}</style></head><body><script>evil()</script>
<h1>Jacquard</h1><p>A loom with <b>punched</b> cards.</p><ul><li>warp</li><li>weft</li></ul></body></html>"""


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.pdf", b"", "pdf"),
        ("a.bin", b"%PDF-1.7", "pdf"),
        ("a", b" <!DOCTYPE HTML>", "html"),
        ("a.HTM", b"", "html"),
        ("a.csv", b"", "csv"),
        ("a.json", b"", "json"),
        ("a.jsonl", b"", "text"),
        ("a.md", b"# x", "text"),
        ("a.py", b"", "text"),
    ],
)
def test_types_are_told_by_name_and_beginning(name: str, content: bytes, kind: str) -> None:
    assert kind_of(name, content) == kind


def test_each_type_is_read() -> None:
    """Scripts and styles are no text; words of different blocks are not joined, those of one are not torn."""
    text = parsed("html", HTML).decode()
    assert "evil" not in text
    assert "p {}" not in text
    assert text.split() == ["Looms", "Jacquard", "A", "loom", "with", "punched", "cards.", "warp", "weft"]
    assert "warp\n" in text
    assert parsed("pdf", pdf_of("The shuttle flies")).decode().strip() == "The shuttle flies"
    assert parsed("csv", b"name,year\nloom,1804\nmill,1900\n") == b"name: loom, year: 1804\nname: mill, year: 1900\n"
    assert parsed("csv", b"name;year\nloom;1804\n") == b"name: loom, year: 1804\n"
    assert json.loads(parsed("json", b'{"a": ["\\u00e9"]}')) == {"a": ["é"]}
    assert "é".encode() in parsed("json", b'{"a": ["\\u00e9"]}')
    assert decoded("\ufeffé".encode()) == "é"
    assert decoded("é".encode("utf-16")) == "é"


@pytest.mark.parametrize(
    ("kind", "content", "code"),
    [
        ("pdf", b"%PDF-1.7 no more", INVALID),
        ("pdf", b"", INVALID),
        ("json", b"{", INVALID),
        ("json", b"[" * 100_000, INVALID),
        ("csv", b"\xff\xfe\xff", UNSUPPORTED),
    ],
)
def test_what_cannot_be_read_is_said(kind: str, content: bytes, code: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        parsed(kind, content)
    assert caught.value.code == code


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\0\0", b"\xff\xfe\xfa\xd8", b"a\0b"])
def test_binary_data_is_no_text(content: bytes) -> None:
    with pytest.raises(UnreadableError) as caught:
        decoded(content)
    assert caught.value.code == UNSUPPORTED


async def test_a_document_is_parsed_in_a_process_that_is_limited() -> None:
    """A bomb takes that process along, and not the orchestrator."""
    assert "punched cards" in await text_of("a.html", HTML)
    with pytest.raises(UnreadableError, match="damaged") as caught:
        await text_of("a.pdf", b"%PDF-1.7 no more")
    assert caught.value.code == INVALID
    with pytest.raises(UnreadableError, match="too long"):
        await text_of("a.pdf", pdf_of("x"), max_seconds=0.0)
