"""The options of a search in files, in the bodies of vector stores and of the tool `file_search`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from edge_http.openai.requests import Body


class SearchFilter(Body, kw_only=True):
    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin", "and", "or"]
    key: str | None = None
    """The attribute that is compared."""
    value: str | int | float | bool | list[str | int | float | bool] | None = None
    """The value that it is compared with; a list for in and nin."""
    filters: Annotated[list[SearchFilter], Meta(max_length=128)] | None = None
    """With and, or: the conditions that are joined."""


class HybridWeights(Body, kw_only=True):
    embedding_weight: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    """How much the ranking by vectors counts; 1 by default, 0 leaves it out."""
    text_weight: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    """How much the ranking by words counts."""


class RankingOptions(Body, kw_only=True):
    ranker: str | None = None
    """"none" compares vectors alone, and the score is their cosine; by default rankings by vectors and by words are
    fused."""
    score_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    """The least score of a result."""
    hybrid_search: HybridWeights | None = None
    """How much each of the two rankings counts."""
