"""A call of an operation, and the table of operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.config import OrchestratorConfig
from kvloom_common.database.database import Database
from kvloom_common.trust.state_seal import StateSealer
from orchestrator.files.sealed import TenantContents
from orchestrator.search.file_texts import FileTexts
from orchestrator.search.searcher import Searcher

if TYPE_CHECKING:
    from orchestrator.store.hot_items import HotItems


@dataclasses.dataclass(frozen=True, slots=True)
class OperationCall:
    """`now` is in seconds since 1970."""

    database: Database
    contents: TenantContents
    searcher: Searcher
    texts: FileTexts
    settings: OrchestratorConfig
    sealer: StateSealer
    tenant: str
    key_id: str
    now: float
    ids: Sequence[str] = ()
    query: Mapping[str, str] = dataclasses.field(default_factory=dict)
    body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    hot_items: HotItems | None = None
    """None where there are no copies of conversations."""

    @property
    def expires_at(self) -> float:
        """When a response expires that is made now."""
        return self.now + self.settings.response_days * 86_400


Operation = Callable[[OperationCall], Coroutine[Any, Any, Any]]
OPERATIONS: Final[dict[str, Operation]] = {}
"""By their ids. They return what becomes the JSON of the answer, and raise KvloomError."""


def operation(name: str) -> Callable[[Operation], Operation]:
    def add(do: Operation) -> Operation:
        OPERATIONS[name] = do
        return do

    return add


def quota_reached(message: str) -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_FAILED_PRECONDITION, message)
