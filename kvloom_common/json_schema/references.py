"""Finds what a reference names, within one schema. Other documents are never fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote, urljoin

MAX_NODES: Final = 20_000
"""Parts of a schema that are searched for names."""


class References:
    """The names in a schema: `$id`s, of which each begins a document of its own, and `$anchor`s."""

    def __init__(self, root: Any) -> None:
        self._documents: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._bases: dict[int, str] = {}
        """By the identity of a part: the name of its document. Only of parts that are not the root's own."""
        self._root = root
        self._index(root)

    def base(self, part: Any) -> str:
        """The name of the document that a part stands in."""
        return self._bases.get(id(part), "")

    def target(self, reference: str, part: Any) -> Any:
        """Returns what `reference`, which stands in `part`, names. Raises LookupError if nothing in the schema has that
        name."""
        document, _, fragment = reference.partition("#")
        base = self.base(part)
        name = urljoin(base, document) if document else base
        if name not in self._documents:
            raise LookupError(reference)
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchors[name, fragment]
        found = self._documents[name]
        for piece in fragment.split("/")[1:]:
            key = piece.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(key)] if key.isdecimal() and int(key) < len(found) else _missing(reference)
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                _missing(reference)
        return found

    def _index(self, root: Any) -> None:
        waiting: list[tuple[Any, str]] = [(root, "")]
        for _ in range(MAX_NODES):
            if not waiting:
                return
            part, base = waiting.pop()
            if isinstance(part, list):
                waiting += [(child, base) for child in part]
                continue
            if not isinstance(part, Mapping):
                continue
            given = part.get("$id", part.get("id") if "$id" not in part else None)
            if isinstance(given, str) and given and not given.startswith("#"):
                base = urljoin(base, given.split("#", 1)[0])
                self._documents.setdefault(base, part)
            elif isinstance(given, str) and given.startswith("#"):  # as drafts 4 to 7 write an anchor
                self._anchors.setdefault((base, given[1:]), part)
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(part.get(key), str):
                    self._anchors.setdefault((base, part[key]), part)
            if base:
                self._bases[id(part)] = base
            waiting += [(child, base) for key, child in part.items() if key not in ("enum", "const")]


def _missing(reference: str) -> Any:
    raise LookupError(reference)
