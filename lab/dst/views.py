"""The parts of the simulated world that checkers and nodes may see of one another.

Checkers and the nodes of the world (routers, shards, clients) refer to each other only through these protocols, so that
no module has to import a module that imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from kvloom.adapters import Adapter
from kvloom_common.discovery.records import RolloutRecord
from lab.dst.observed import ObservedHandoff, ObservedRequest, ObservedShard
from lab.dst.scenario import ShardShape
from lab.dst.tenancy.sim_limits import SimLimits
from router.core.core import CoreConfig, RouterCore
from router.core.events import ChoiceSpec, Event, Request

# -- what checkers see ------------------------------------------------------------------------------------------------


class WitnessView(Protocol):
    """The state of a router as its witness reconstructed it from events and actions."""

    shards: dict[str, ObservedShard]
    live: dict[str, ObservedRequest]
    models: set[str]
    has_served: bool
    contended: set[str]
    handed_over: list[ObservedHandoff]
    policy: tuple[bool, bool] | None
    safety_waited_for_until: float | None
    arriving: ObservedRequest | None
    dispatched: list[ObservedRequest]
    given_up: list[ObservedRequest]
    event: Event | None

    def waiting(self) -> list[ObservedRequest]: ...

    def knows(self, model: str) -> bool:
        """True when routers report the model, and it has its card."""
        ...

    def refuses(self, observed: ObservedRequest) -> bool: ...

    def is_withdrawn(self, model: str) -> bool: ...

    def keeps(self, observed: ObservedRequest) -> bool:
        """True when it waits for a later shard until its deadline."""
        ...

    def may_wait_for_start(self, model: str) -> bool: ...

    def patience_seconds(self, observed: ObservedRequest) -> float: ...

    def has_room(self, shard: ObservedShard, observed: ObservedRequest) -> bool: ...


class AnswerView(Protocol):
    """One choice as its client sees it."""

    request: Request
    spec: ChoiceSpec
    num_tokens: int
    num_chars: int
    num_starts: int
    num_logprobs: int

    @property
    def script_key(self) -> str: ...


class ClientStreamView(Protocol):
    """The stream between a client and a router."""

    client_id: str
    is_open_at_client: bool

    @property
    def open(self) -> Mapping[int, AnswerView]: ...


class BlockCacheView(Protocol):
    blocks: dict[int, Any]

    def count_overlap(self, hashes: Iterable[int]) -> int: ...


class EngineView(Protocol):
    @property
    def sequences(self) -> Collection[Any]: ...


class ShardView(Protocol):
    """A shard process."""

    shard_id: str
    shape: ShardShape
    incarnation: int
    is_up: bool
    is_hung: bool
    has_hung_engine: bool

    @property
    def cache(self) -> BlockCacheView: ...

    @property
    def engine(self) -> EngineView: ...

    @property
    def is_stuck(self) -> bool: ...


class ShardStreamView(Protocol):
    """The stream between a router and a shard."""

    is_open_at_router: bool


class SimulatedRouterView(Protocol):
    """A router process."""

    name: str
    config: CoreConfig
    core: RouterCore
    tenants: tuple[str, ...]
    holds_requests: bool
    is_draining: bool
    is_harmless: bool
    here_since: float
    limits: SimLimits | None

    @property
    def now(self) -> float: ...

    @property
    def witness(self) -> WitnessView: ...

    @property
    def clients(self) -> Mapping[str, ClientStreamView]: ...

    @property
    def streams(self) -> Mapping[str, Any]: ...

    @property
    def stuck_shard_ids(self) -> set[str]: ...


class EdgeView(Protocol):
    """A process that tells requests their version."""

    name: str
    is_harmless: bool
    rollouts: Mapping[str, RolloutRecord]
    """The rollouts that it knows, by each name that the requests may have."""

    @property
    def now(self) -> float: ...

    @property
    def connected_since(self) -> float | None:
        """Since when it has been able to reach the registry; None: it cannot."""
        ...

    def knows(self, model: str) -> bool: ...

    def versions_of(self, name: str, key: str) -> Sequence[str]: ...


class RolloutsView(Protocol):
    """The rollouts of a world."""

    @property
    def edges(self) -> Sequence[EdgeView]: ...

    @property
    def standing(self) -> Mapping[str, str]:
        """The model that stands for each name of which there was a rollout."""
        ...


class TrafficView(Protocol):
    prompts: dict[tuple[str, str, tuple[int, ...], Adapter | None], None]
    models: list[str]


class WorldView(Protocol):
    """All processes of one simulation."""

    @property
    def is_harmless(self) -> bool: ...

    @property
    def limits(self) -> SimLimits | None: ...

    @property
    def nodes(self) -> Sequence[SimulatedRouterView]: ...

    @property
    def shards(self) -> Sequence[ShardView]: ...

    @property
    def traffic(self) -> TrafficView: ...

    @property
    def rollouts(self) -> RolloutsView | None: ...

    def is_announced(self, shard: ShardView) -> bool: ...

    def named_incarnations(self) -> dict[str, str]: ...


# -- what nodes see of one another ------------------------------------------------------------------------------------


class RegistryReader(Protocol):
    """A router as the registry sees it."""

    is_alive: bool

    def post(self, callback: Callable[..., None], *args: Any) -> None: ...

    def read_registry(self) -> None: ...


class RouterProcess(Protocol):
    """A router as its streams to clients, shards and the safety service see it. The mappings hold these streams."""

    name: str
    number: int
    is_alive: bool
    safety: Any

    @property
    def clients(self) -> dict[str, Any]: ...

    @property
    def streams(self) -> dict[str, Any]: ...

    @property
    def connecting(self) -> dict[str, Any]: ...

    @property
    def is_paused(self) -> bool: ...

    def post(self, callback: Callable[..., None], *args: Any) -> None: ...

    def handle(self, event: Event) -> None: ...

    def check_integrity(self) -> None: ...

    def connect(self, shard: Any, *, replace: bool = False) -> None: ...

    def accepts(self, stream: Any, incarnation_id: str) -> bool: ...

    def reconnect_safety(self) -> None: ...


class ShardProcess(ShardView, Protocol):
    """A shard as its streams to the routers see it."""

    def accept(self, stream: Any) -> None: ...

    def lose(self, stream: Any) -> None: ...

    def receive(self, stream: Any, message: object) -> None: ...
