"""The connected shards, and the models that are or were served."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvloom.adapters import MAX_ADAPTERS, Adapter
from router.core.events import ShardDescription, ShardLoad
from router.core.fleet.departure import Departure
from router.core.fleet.fast_path import FastPath
from router.core.fleet.shard_adapters import ShardAdapters
from router.core.fleet.shard_health import HealthState, ShardHealth
from router.core.fleet.slot_pool import SlotPool
from router.core.live import Attempt, Choice, QueueId

EMBED = "embed"
GENERATE = "generate"
"""Capabilities that decide which requests a shard can run; see ShardInfo.capabilities in shard_service.proto."""
SEEDED_RESUME = "seeded_resume"
BATCH_INVARIANT = "batch_invariant"
"""Capabilities that decide whether an answer continues on a shard with the tokens that it would have had elsewhere."""
VISION = "vision"
"""The capability to read images."""
HANDOFF_LOGPROBS = "handoff_logprobs"
"""The capability to hand over a prompt of an answer with log-probabilities."""
PREFILL, DECODE, BOTH = "prefill", "decode", "both"
"""See ShardInfo.role in shard_service.proto."""
OUTSTANDING_PER_BATCH = 2
"""A shard is sent at most this many times its batch: enough to never run dry, and little enough that requests waiting
in the router can still go to the shard where room appears first."""


class Shard:
    """A shard's stream and the slots on it."""

    __slots__ = (
        "_limit",
        "adapters",
        "attempts",
        "can_embed",
        "can_fetch",
        "can_generate",
        "choices",
        "computes_prompts",
        "departure",
        "description",
        "fast_path",
        "full",
        "hands_over",
        "health",
        "is_asleep",
        "is_draining",
        "is_withdrawn",
        "num_by_tenant",
        "queue_id",
        "shard_id",
        "slots",
        "turn",
    )

    def __init__(self, description: ShardDescription, full: set[Shard]) -> None:
        """`full` has the shard while it has no room."""
        self.full = full
        self.shard_id = description.shard_id
        self.queue_id = QueueId(description.model, description.shard_id)
        """The queue of the requests that wait for it in the router."""
        self.description = description
        self.can_embed = EMBED in description.capabilities
        self.can_generate = GENERATE in description.capabilities or not self.can_embed
        """Shards that do nothing else need not say so."""
        self.computes_prompts = description.role in (PREFILL, BOTH)
        """True when it computes prompts for other shards."""
        self.can_fetch = description.role in (DECODE, BOTH)
        """True when it answers prompts that other shards have computed."""
        self.adapters = ShardAdapters()
        self.is_draining = False
        self.is_withdrawn = False
        """True when its model is to end."""
        self.is_asleep = False
        """True when it sleeps, or is about to."""
        self.hands_over = False
        """True when it drains and its running sequences are to continue elsewhere."""
        self.departure: Departure | None = None
        """When it has to be empty; None: it need not be."""
        self.health: ShardHealth | None = None
        """None: its health is not watched."""
        self._limit = OUTSTANDING_PER_BATCH * description.max_batch
        self.turn = 0
        self.slots = SlotPool()
        self.choices: dict[int, Choice] = {}
        """By shard slot: choices whose output is wanted."""
        self.fast_path = FastPath(self.choices)
        self.attempts: dict[int, Attempt] = {}
        """By shard slot: all attempts that the shard has not ended, cancelled ones too."""
        self.num_by_tenant: dict[str, int] = {}
        """How many of them are sequences of each tenant; tenants without any are absent."""

    @property
    def has_room(self) -> bool:
        return len(self.attempts) < self._limit

    @property
    def limit(self) -> int:
        """The most sequences that it is sent. Lower while it ramps up."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        if self.has_room:
            self.full.discard(self)
        else:
            self.full.add(self)

    @property
    def is_for_prompts(self) -> bool:
        """True when it gives whole answers only where no other shard does."""
        return self.description.role == PREFILL

    def can_fetch_from(self, other: ShardDescription) -> bool:
        """True when it can continue with KV that the other shard has computed: engines of one kind and variant can, if
        their hand-offs have the same parts."""
        own = self.description
        return (
            self.can_fetch
            and self.shard_id != other.shard_id
            and (own.engine, own.variant) == (other.engine, other.variant)
            and (HANDOFF_LOGPROBS in own.capabilities) == (HANDOFF_LOGPROBS in other.capabilities)
        )

    def open_slot(self, attempt: Attempt) -> int:
        slot = self.slots.allocate()
        self.attempts[slot] = attempt
        if len(self.attempts) >= self._limit:
            self.full.add(self)
        tenant = attempt.tenant
        if tenant is not None:
            self.num_by_tenant[tenant] = self.num_by_tenant.get(tenant, 0) + 1
        return slot

    def close_slot(self, slot: int) -> Attempt | None:
        """Returns None for a slot that was not in use."""
        attempt = self.attempts.pop(slot, None)
        if attempt is None:
            return None
        self.slots.free(slot)
        if len(self.attempts) < self._limit:
            self.full.discard(self)
        tenant = attempt.tenant
        if tenant is not None:
            self.num_by_tenant[tenant] -= 1
            if not self.num_by_tenant[tenant]:
                del self.num_by_tenant[tenant]
        return attempt

    def ramp_up(self, num_started: int) -> None:
        """The shard has produced first tokens, so it may get more. As in TCP's slow start, the number of sequences
        without a first token doubles with every round of them."""
        most = OUTSTANDING_PER_BATCH * self.description.max_batch
        if self._limit < most:
            self.limit = min(self._limit + 2 * num_started, most)

    @property
    def is_suspected(self) -> bool:
        """True when it gets work only when there is no other shard."""
        return self.health is not None and self.health.is_suspected

    def detach(self, choice: Choice) -> None:
        """The choice's output is no longer wanted from this shard."""
        self.fast_path.leave(choice.shard_slot)
        del self.choices[choice.shard_slot]
        choice.shard_id = ""


class ModelIdentity(NamedTuple):
    """Identifies the files of a model. See ShardInfo in shard_service.proto."""

    version: str = ""
    checksum: str = ""
    card_checksum: str = ""


class FleetAdapter(NamedTuple):
    """An adapter of a model; see AdapterInfo in router_service.proto."""

    name: str
    checksum: str
    """That of most of the shards that have one of this name."""
    rank: int
    num_ready_shards: int


class ModelState(msgspec.Struct, frozen=True):
    """One model as clients see it: its shards, and the limits that hold on all of them."""

    name: str
    num_ready_shards: int
    max_model_len: int
    capabilities: frozenset[str]
    variants: frozenset[str] = frozenset()
    """The variants of its shards now; see ShardInfo.variant in shard_service.proto."""
    identity: ModelIdentity = ModelIdentity()
    """That of most of its shards."""
    embedding_size: int = 0
    """The dimensions of an embedding; 0: it gives none, or has no shard now."""
    image_tokens: tuple[int, int] | None = None
    """See ShardDescription: that of one of its shards, if it has the capability "vision"."""
    adapters: Sequence[FleetAdapter] = ()
    """By name."""
    is_withdrawn: bool = False
    """True when it takes no new requests, since all its shards are to end."""
    brownout_step: int = 0


class _LastKnown(NamedTuple):
    """The facts that hold for a model while it has no shard."""

    max_model_len: int
    """The shortest window."""
    capabilities: frozenset[str]
    """Those that all shards had."""
    identity: ModelIdentity
    adapters: Sequence[FleetAdapter]


class FleetChanged(msgspec.Struct, frozen=True):
    """An action: the fleet's new state, to be sent to every client."""

    models: Sequence[ModelState]
    draining: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ShardState:
    """A shard as the core knows it, for observers: the decision log, and tools."""

    description: ShardDescription
    is_draining: bool
    health: HealthState
    prefill_tokens_per_second: float
    """The speed that the shard reports; 0: not known yet. The same holds for `decode_step_seconds`."""
    decode_step_seconds: float
    prefill_seconds: Mapping[str, float]
    """The learned coefficients, by name (SpeedModel.coefficients)."""
    load: ShardLoad = dataclasses.field(default_factory=ShardLoad)
    """Its latest report."""
    is_asleep: bool = False
    is_withdrawn: bool = False
    adapters: Sequence[str] = ()


class ReadyShards(NamedTuple):
    """The shards that accept new requests for a model. Nobody changes these lists."""

    shards: list[Shard]
    preferred: list[Shard]
    """Without those that are suspected, unless all are."""
    least_window: int
    """The shortest of their windows."""
    can_generate: bool
    """True when all of them can."""

    @staticmethod
    def of(shards: list[Shard]) -> ReadyShards:
        return ReadyShards(
            shards,
            [shard for shard in shards if not shard.is_suspected] or shards,
            min((shard.description.max_model_len for shard in shards), default=0),
            all(shard.can_generate for shard in shards),
        )


class Fleet:
    """The connected shards by id, and the limits of every model that has been served."""

    def __init__(self, expected: Iterable[str] = ()) -> None:
        """`expected`: models that exist although they may have no shard."""
        self._expected = set(expected)
        self.shards: dict[str, Shard] = {}
        self.full: set[Shard] = set()
        """The shards that have no room."""
        self.block_sizes = Counter[int]()
        """How many shards have KV blocks of each size."""
        self._ready: dict[str, ReadyShards] = {}
        """By model, as far as they were asked for since they last changed."""
        self.is_draining = False
        self.has_prefill_shards = False
        """True when any shard computes prompts for others."""
        self.brownout_steps: dict[str, int] = {}
        """The models whose answers are degraded, and the steps on which they are."""
        self._models: dict[str, _LastKnown] = {}
        """The models as they were when they last had a shard. Withdrawn models are forgotten with their last shard."""
        self._has_served = False

    def add(self, description: ShardDescription) -> Shard:
        shard = self.shards[description.shard_id] = Shard(description, self.full)
        self.block_sizes[description.block_size] += 1
        self.note_readiness()
        self._has_served = True
        self.has_prefill_shards = self.has_prefill_shards or shard.computes_prompts
        return shard

    def remove(self, shard_id: str) -> Shard:
        shard = self.shards.pop(shard_id)
        self.full.discard(shard)
        self.block_sizes -= Counter([shard.description.block_size])
        self.note_readiness()
        self.has_prefill_shards = any(other.computes_prompts for other in self.shards.values())
        model = shard.description.model
        if shard.is_withdrawn and not any(other.description.model == model for other in self.shards.values()):
            self._models.pop(model, None)
            self._expected.discard(model)
        return shard

    def knows(self, model: str) -> bool:
        """True when any shard has served the model since it was last withdrawn, or it is expected. Before the first
        shard connects, any model may exist."""
        return model in self._models or model in self._expected or not self._has_served

    def is_withdrawn(self, model: str) -> bool:
        """True when the model takes no new requests, since all its shards, also those that drain, are withdrawn."""
        shards = self._of(model)
        return bool(shards) and all(shard.is_withdrawn for shard in shards)

    def is_asleep(self, model: str) -> bool:
        """True when the model takes no new requests, since all its shards sleep or are about to."""
        shards = self._of(model)
        return bool(shards) and all(shard.is_asleep for shard in shards)

    def adapters(self) -> Mapping[str, Sequence[str]]:
        """The names of the adapters of each model."""
        return {model: [adapter.name for adapter in known.adapters] for model, known in self._models.items()}

    def has_adapter(self, model: str, adapter: Adapter) -> bool:
        """True when the model has this very adapter, as far as is known: while it has no shard, any adapter may
        exist."""
        shards = self._of(model)
        return not shards or any(shard.adapters.has(adapter) for shard in shards)

    def _of(self, model: str) -> list[Shard]:
        return [shard for shard in self.shards.values() if shard.description.model == model]

    def has(self, described: ShardDescription) -> bool:
        """True when that very incarnation of the shard is connected."""
        shard = self.shards.get(described.shard_id)
        return shard is not None and shard.description.incarnation_id == described.incarnation_id

    def ready(self, model: str) -> list[Shard]:
        """Shards that accept new requests for `model`."""
        return self.ready_shards(model).shards

    def ready_shards(self, model: str) -> ReadyShards:
        """The same, with what holds for them together."""
        ready = self._ready.get(model)
        if ready is None:
            ready = ReadyShards.of(self._find_ready(model))
            if ready.shards:  # names that requests make up are not kept
                self._ready[model] = ready
        return ready

    def note_readiness(self) -> None:
        """A shard has come or gone, drains or is suspected, or no longer does or is."""
        self._ready.clear()

    def check_integrity(self) -> None:
        """Assert that what is remembered of shards is so."""
        assert self.full == {shard for shard in self.shards.values() if not shard.has_room}
        assert self.block_sizes == Counter(shard.description.block_size for shard in self.shards.values())
        for model, known in self._ready.items():
            assert known == ReadyShards.of(self._find_ready(model)), model

    def _find_ready(self, model: str) -> list[Shard]:
        return [s for s in self.shards.values() if not s.is_draining and s.description.model == model]

    def largest_window(self, model: str) -> int:
        """In tokens, among the shards that are ready; 0 if none is."""
        return max((shard.description.max_model_len for shard in self.ready(model)), default=0)

    def state(self) -> FleetChanged:
        by_model: dict[str, list[Shard]] = {}
        for shard in self.shards.values():
            by_model.setdefault(shard.description.model, []).append(shard)
        for model, shards in by_model.items():
            window = min(shard.description.max_model_len for shard in shards)
            capabilities = frozenset.intersection(*(shard.description.capabilities for shard in shards))
            self._models[model] = _LastKnown(window, capabilities, _identity(shards), _adapters(shards))
        models = [
            ModelState(
                name=model,
                num_ready_shards=sum(not shard.is_draining for shard in by_model.get(model, ())),
                max_model_len=known.max_model_len,
                capabilities=known.capabilities,
                variants=frozenset(shard.description.variant for shard in by_model.get(model, ())),
                identity=known.identity,
                embedding_size=max((shard.description.embedding_size for shard in by_model.get(model, ())), default=0),
                image_tokens=_image_tokens(by_model.get(model, ()), known.capabilities),
                adapters=known.adapters
                if model in by_model
                else [adapter._replace(num_ready_shards=0) for adapter in known.adapters],
                is_withdrawn=self.is_withdrawn(model),
                brownout_step=self.brownout_steps.get(model, 0),
            )
            for model, known in sorted(self._models.items())
        ]
        return FleetChanged(models, self.is_draining)


def _image_tokens(shards: Sequence[Shard], capabilities: frozenset[str]) -> tuple[int, int] | None:
    rules = [rule for shard in shards if (rule := shard.description.image_tokens) is not None]
    return min(rules) if rules and VISION in capabilities else None


def _identity(shards: Sequence[Shard]) -> ModelIdentity:
    """That of most of the shards; of several, the first in order, so that all routers choose the same."""
    counts = Counter(
        ModelIdentity(of.model_version, of.model_checksum, of.card_checksum)
        for of in (shard.description for shard in shards)
    )
    return min(counts, key=lambda identity: (-counts[identity], identity))


def _adapters(shards: Sequence[Shard]) -> Sequence[FleetAdapter]:
    """Returns the adapters by name. If several have one name, it is that of most shards; else the first in order."""
    counts = Counter((state.name, state.checksum, state.rank) for shard in shards for state in shard.adapters.states)
    chosen: dict[str, FleetAdapter] = {}
    for name, checksum, rank in sorted(counts, key=lambda key: (-counts[key], key)):
        if name not in chosen:
            adapter = Adapter(name, checksum)
            num_ready = sum(not shard.is_draining and shard.adapters.has(adapter) for shard in shards)
            chosen[name] = FleetAdapter(name, checksum, rank, num_ready)
    return [chosen[name] for name in sorted(chosen)][:MAX_ADAPTERS]
