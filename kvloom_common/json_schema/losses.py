"""Losses names what a guide cannot follow of a schema, by path and keyword."""

from __future__ import annotations

from typing import NamedTuple


class Loss(NamedTuple):
    """A keyword that a guide does not follow."""

    path: str
    """Where the keyword stands, from the schema's root: ".properties.ids", or "" for the root."""
    keyword: str
    reason: str


class UnfollowableSchema(Exception):  # noqa: N818  (a verdict about a schema)
    """A schema that must be followed as a whole has something that a guide cannot follow."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(f"{loss.path.lstrip('.') or 'the root'}: {loss.keyword!r} {loss.reason}")
        self.loss = loss


class Losses:
    """Collects what is dropped of a schema, or raises UnfollowableSchema at the first if nothing may be."""

    def __init__(self, *, is_lenient: bool) -> None:
        self.is_lenient = is_lenient
        self.found: list[Loss] = []

    def add(self, path: str, keyword: str, reason: str = "cannot be enforced while a model writes") -> None:
        loss = Loss(path, keyword[:64], reason)
        if not self.is_lenient:
            raise UnfollowableSchema(loss)
        self.found.append(loss)
