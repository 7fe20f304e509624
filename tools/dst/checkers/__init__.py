"""The invariants, each a class of its own that looks on from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from router.core.actions import Action, RequestEnded, SendStep, ShardHealthChanged, SubmitAttempt
from router.core.events import ChoiceSpec, Event
from router.core.frames import Finish, Step
from tools.dst.checkers.attempts import AttemptsContinue, Fence, PlacementsFit, PrefillChunksFit, SlotsRest
from tools.dst.checkers.base import Checker
from tools.dst.checkers.deadlines import DeadlinesKept
from tools.dst.checkers.delivery import AnswersComplete, FramesInShape, TextIntact, TokensExact
from tools.dst.checkers.ends import EndsJustified, EndsOnce, MeteredIsDelivered
from tools.dst.checkers.fleet import FleetTold
from tools.dst.checkers.health import DrainedShardsEmpty, NobodyWaitsForTheHung, SuspicionBounded
from tools.dst.checkers.integrity import Integrity
from tools.dst.checkers.overload import DrainsEnd, OutagePatience, RefusalsFit, TiersKept
from tools.dst.checkers.queueing import NoIdleWait, NoStarvation, QueueBound
from tools.dst.checkers.rest import IndexExact, LoadTrue
from tools.dst.checkers.safety import SafetyKept

if TYPE_CHECKING:
    from tools.dst.nodes.client import Answer, ClientStream
    from tools.dst.nodes.router_node import RouterNode
    from tools.dst.nodes.shard import SimShard
    from tools.dst.nodes.shard_stream import ShardStream
    from tools.dst.witness.seen import SeenChoice, SeenRequest
    from tools.dst.world import World

CHECKERS: Final[tuple[type[Checker], ...]] = (
    EndsOnce,
    TokensExact,
    TextIntact,
    FramesInShape,
    AnswersComplete,
    MeteredIsDelivered,
    EndsJustified,
    Integrity,
    Fence,
    SlotsRest,
    AttemptsContinue,
    PlacementsFit,
    PrefillChunksFit,
    NoIdleWait,
    NoStarvation,
    QueueBound,
    DeadlinesKept,
    SafetyKept,
    FleetTold,
    NobodyWaitsForTheHung,
    SuspicionBounded,
    DrainedShardsEmpty,
    DrainsEnd,
    RefusalsFit,
    TiersKept,
    OutagePatience,
    IndexExact,
    LoadTrue,
)


class Checks:
    """Tells the checkers of a world what happens."""

    def __init__(self, checkers: Iterable[type[Checker]] = CHECKERS) -> None:
        made = [checker() for checker in checkers]

        def having(name: str) -> list[Callable[..., None]]:
            return [getattr(checker, name) for checker in made if hasattr(checker, name)]

        self._before_event = having("before_event")
        self._on_dispatch = having("on_dispatch")
        self._on_probe = having("on_probe")
        self._on_prefill_chunk = having("on_prefill_chunk")
        self._on_health = having("on_health")
        self._on_step = having("on_step")
        self._on_sent = having("on_sent")
        self._on_finish = having("on_finish")
        self._on_ended = having("on_ended")
        self._after_event = having("after_event")
        self._integrity = having("integrity")
        self._on_submit = having("on_submit")
        self._on_client_step = having("on_client_step")
        self._on_client_news = having("on_client_news")
        self._on_client_finish = having("on_client_finish")
        self._at_rest = having("at_rest")

    # -- a router: the witness's books are as before the thing at hand ------------------------------------------------

    def before_event(self, node: RouterNode, event: Event) -> None:
        """It is about to be handled."""
        _tell(self._before_event, node, event)

    def on_dispatch(self, node: RouterNode, seen: SeenRequest | None, attempt: SubmitAttempt) -> None:
        """A request goes to a shard."""
        _tell(self._on_dispatch, node, seen, attempt)

    def on_probe(self, node: RouterNode, attempt: SubmitAttempt) -> None:
        """A shard is asked for a token by the router itself."""
        _tell(self._on_probe, node, attempt)

    def on_prefill_chunk(self, node: RouterNode, seen: SeenRequest | None, prefill_chunk: SubmitAttempt) -> None:
        """A shard is to compute a part of a prompt, for a request that waits."""
        _tell(self._on_prefill_chunk, node, seen, prefill_chunk)

    def on_health(self, node: RouterNode, change: ShardHealthChanged) -> None:
        """A shard is suspected, probed or healthy again."""
        _tell(self._on_health, node, change)

    def on_step(self, node: RouterNode, news: SendStep) -> None:
        """A client is told something."""
        _tell(self._on_step, node, news)

    def on_sent(self, node: RouterNode, choice: SeenChoice, token_ids: Sequence[int], delta: str) -> None:
        """One entry of what a client is told."""
        _tell(self._on_sent, node, choice, token_ids, delta)

    def on_finish(self, node: RouterNode, choice: SeenChoice, finish: Finish) -> None:
        """A client is told that a choice has ended."""
        _tell(self._on_finish, node, choice, finish)

    def on_ended(self, node: RouterNode, seen: SeenRequest | None, end: RequestEnded) -> None:
        """A request is reported as ended; everything that its client was told is written down."""
        _tell(self._on_ended, node, seen, end)

    def after_event(self, node: RouterNode, event: Event, actions: Sequence[Action]) -> None:
        """It was handled, and everything is written down."""
        _tell(self._after_event, node, event, actions)

    def integrity(self, node: RouterNode) -> None:
        """A message was handled."""
        _tell(self._integrity, node)

    # -- shards and clients -------------------------------------------------------------------------------------------

    def on_submit(self, shard: SimShard, stream: ShardStream, attempt: SubmitAttempt, spec: ChoiceSpec) -> None:
        """A choice arrives at a shard."""
        _tell(self._on_submit, shard, stream, attempt, spec)

    def on_client_step(self, stream: ClientStream, step: Step) -> None:
        """A client reads a frame."""
        _tell(self._on_client_step, stream, step)

    def on_client_news(self, answer: Answer, token_ids: Sequence[int], delta: str) -> None:
        """One entry of it; `answer` is as before."""
        _tell(self._on_client_news, answer, token_ids, delta)

    def on_client_finish(self, answer: Answer, finish: Finish) -> None:
        """An end in it; `answer` is complete."""
        _tell(self._on_client_finish, answer, finish)

    def at_rest(self, world: World) -> None:
        """Nothing is under way any more, and for a while no fault has struck."""
        _tell(self._at_rest, world)


def _tell(hooks: list[Callable[..., None]], *args: Any) -> None:
    for hook in hooks:
        hook(*args)
