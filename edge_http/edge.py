"""What all handlers share: configuration, the way to the router, the models, and who may come in."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from edge_http.metrics import EdgeMetrics
from edge_http.recovery.journal import new_tag
from edge_http.resume.table import ResumeTable
from edge_http.wire.body import BodyBudget
from edge_http.wire.fair_yield import FairYield
from edge_http.wire.sse import WriteCoalescer
from kvloom.config import EdgeConfig
from kvloom.errors import KvloomError
from kvloom.router_link.link import RouterLink
from kvloom.router_link.tracked_request import Attempt
from kvloom.text.tokenizer import ModelTokenizer
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import ModelInfo

if TYPE_CHECKING:
    from edge_http.recovery.response_locator import ResponseLocator

BUSY_RETRY_SECONDS: Final = 1.0
DRAINING_RETRY_SECONDS: Final = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that this edge can tokenize for."""

    name: str
    tokenizer: ModelTokenizer
    created: int
    """Unix time, for the OpenAI model object."""
    system_fingerprint: str


class LossReports(Protocol):
    """Bills of answers that change hands; see kvloom/router_link/group.py."""

    def link_ids(self) -> list[str]: ...

    def attempts(self, handle: int) -> Sequence[Attempt]: ...

    def note_lost_by(self, link_id: str, request_id: str, num_tokens: int) -> None: ...


class AdmissionPermit:
    """One of the places for running requests, given up at the end of the `with` block. Whoever sets `handed_over` has
    to give it up instead."""

    __slots__ = ("give_up", "handed_over")

    def __init__(self, give_up: Callable[[], None]) -> None:
        self.give_up = give_up
        self.handed_over = False

    def __enter__(self) -> AdmissionPermit:
        return self

    def __exit__(self, *_fault: object) -> None:
        if not self.handed_over:
            self.give_up()


class Edge:
    """State of one edge process. Lives on the event loop."""

    def __init__(self, config: EdgeConfig, link: RouterLink, models: Mapping[str, ServedModel]) -> None:
        self.config = config
        self.link = link
        self.models = models
        self.metrics = EdgeMetrics(lambda: self.num_running, lambda: self.link.connected)
        self.resume = ResumeTable(config.resume, self.metrics)
        self.tag = new_tag()
        """Of this process; part of its responses' ids."""
        self.elsewhere: ResponseLocator | None = None
        """The way to other edges' responses; None without Redis."""
        self.losses: LossReports | None = None
        """None for a router in this process: its bills end with it."""
        self.bodies = BodyBudget(config.max_pending_body_bytes)
        self.turns = FairYield()
        self.write_coalescer = WriteCoalescer()
        self.num_running = 0
        self._draining = False
        self._leaving = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def leaving(self) -> bool:
        """A successor is there for new connections: those that exist are served once more, and closed."""
        return self._leaving

    def leave(self) -> None:
        self._leaving = True

    def drain(self) -> None:
        """Take no new requests from now on; what runs goes on."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Return once no request runs."""
        await self._idle.wait()

    def admit(self) -> AdmissionPermit:
        """Holds one of the places for running requests. Raises KvloomError (DRAINING, QUEUE_FULL)."""
        if self._draining:
            raise stopping()
        self.check_room()
        self.num_running += 1
        self._idle.clear()
        return AdmissionPermit(self._give_up_place)

    def check_room(self) -> None:
        """Whoever is still sending a body takes nobody's place, and is counted once it is there. Raises KvloomError
        (QUEUE_FULL)."""
        if self.num_running - self.bodies.num_leases >= self.config.max_concurrent_requests:
            raise KvloomError(
                ErrorReason.ERROR_REASON_QUEUE_FULL,
                "This server is at its limit of concurrent requests.",
                retry_after_seconds=BUSY_RETRY_SECONDS,
            )

    def _give_up_place(self) -> None:
        self.num_running -= 1
        if not self.num_running:
            self._idle.set()

    def find_model(self, name: str) -> ServedModel:
        """Raises KvloomError (MODEL_NOT_FOUND)."""
        model = self.models.get(name)
        if model is None:
            shown = name if len(name) <= 128 else name[:128] + "…"
            raise KvloomError(
                ErrorReason.ERROR_REASON_MODEL_NOT_FOUND, f"The model '{shown}' does not exist.", field="model"
            )
        return model

    def model_info(self, name: str) -> ModelInfo | None:
        """What the router said of a model; None while it knows of no shard that serves it."""
        for model in self.link.fleet.models:
            if model.name == name:
                return model
        return None

    def window(self, name: str) -> int:
        """The longest prompt and answer of a model, in tokens; 0 while it is not known."""
        info = self.model_info(name)
        return info.max_model_len if info is not None else 0

    def not_ready_reason(self) -> str:
        """Why no request can be served now; "" when it can."""
        if self._draining or self._leaving:
            return "this edge is draining"
        if not self.link.connected:
            return "the router cannot be reached"
        if self.link.fleet.draining:
            return "the router is draining"
        if not any(model.num_ready_shards for model in self.link.fleet.models if model.name in self.models):
            return "no shard is ready"
        return ""


def stopping() -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_DRAINING,
        "This server is stopping and takes no new requests.",
        retry_after_seconds=DRAINING_RETRY_SECONDS,
    )
