"""All shadow traffic of a router: it follows the sampled answers on their way to clients, and sends those that have
ended to the candidates.

It stands between the core and the clients only while there are shadows. A client gets the same bytes as without: the
log-probabilities that the shadow has asked for are taken out of its steps.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

import structlog
from prometheus_client import CollectorRegistry

from kvloom.v1.generation_pb2 import FINISH_REASON_CANCELLED, SamplingParams, TokenLogprobs
from kvloom_common.config import ShadowConfig, with_constants
from kvloom_common.discovery.records import RolloutRecord
from kvloom_common.models.served_model import ServedModel
from router.core.actions import FleetChanged, RequestEnded
from router.core.events import OWN_CLIENT_IDS, SHADOW_CLIENT_ID, Request, RequestArrived, SlotsCancelled
from router.core.fleet.slot_pool import SlotPool
from router.core.frames import Finish, Step
from router.core.placement.plan import PlacementPlan
from router.core_driver import CoreDriver
from router.features.shadow.metrics import ShadowMetrics
from router.features.shadow.pair import GOOD_ENDS, Pair, Running, ShadowSettings, Skip, SpareRoom
from router.features.shadow.sampling import (
    Sample,
    check_shadows,
    generating_request,
    is_sampled,
    reading_callers_cache,
    scoring_request,
    with_logprobs,
)

log = structlog.get_logger()

MAX_FOLLOWED: Final = 4096
"""The most answers that are followed at a time."""
CHECK_SECONDS: Final = 0.25
"""How often a candidate is looked at while something waits for it or is under way there."""
LOGPROBS: Final = "logprobs"
PROMPT_LOGPROBS: Final = "prompt_logprobs"


class ShadowCore(SpareRoom, Protocol):
    """The part of `RouterCore` that is asked for the candidates' state."""

    @property
    def fleet(self) -> FleetChanged: ...

    def num_waiting(self, model: str) -> int: ...

    def plan(self, request: Request, now: float) -> PlacementPlan: ...


@dataclasses.dataclass(slots=True)
class FollowedAnswer:
    """A sampled answer on its way to its client."""

    request: Request
    pairs: Sequence[Pair]
    takes_logprobs: bool
    """True when its logprobs are wanted for a score."""
    hides_logprobs: bool
    """True when its client has not asked for them."""
    max_tokens: int
    """The longest answer that is followed; beyond that it is skipped."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    surprisal: float = 0.0
    num_logprobs: int = 0


class ShadowTraffic:
    """A tap of the core driver. `set_shadows` may be called at any time, and `close` once."""

    def __init__(
        self, driver: CoreDriver, core: ShadowCore, models: Mapping[str, ServedModel], registry: CollectorRegistry
    ) -> None:
        """`models`: by name and alias; they may come and go."""
        self._driver = driver
        self._core = core
        self._models = models
        self._metrics = ShadowMetrics(registry)
        self._configured: Sequence[ShadowConfig] = ()
        self._pairs: Sequence[Pair] = ()
        self._by_model: dict[str, list[Pair]] = {}
        self._followed: dict[str, dict[int, FollowedAnswer]] = {}
        """By client and its slot."""
        self._num_followed = 0
        self._running: dict[int, Running] = {}
        """By slot of the shadow's own stream."""
        self._slots = SlotPool()
        self._num_sent = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_in_flight(self) -> int:
        """The number of its own requests in flight."""
        return len(self._running)

    @property
    def shadows(self) -> Sequence[ShadowConfig]:
        return [pair.config for pair in self._pairs]

    def set_shadows(self, shadows: Sequence[ShadowConfig]) -> None:
        """Sample for these pairs from now on, and for no others. Raises ConfigError."""
        settings = [with_constants(shadow, ShadowSettings) for shadow in shadows]
        check_shadows(settings)
        before = self._pairs
        same = {(pair.config.model, pair.config.candidate): pair for pair in before if pair.config in settings}
        self._pairs = [same.get((shadow.model, shadow.candidate)) or Pair(shadow, self._metrics) for shadow in settings]
        self._by_model = {}
        for pair in self._pairs:
            self._by_model.setdefault(pair.config.model, []).append(pair)
        for pair in (pair for pair in before if pair not in self._pairs):
            pair.close()
            self._cancel(pair)
        if self._pairs:
            self._driver.add_tap(self)
        else:
            self._end_if_done()

    def configure(self, shadows: Sequence[ShadowConfig]) -> None:
        """Does what `set_shadows` does for those in the configuration, which hold beside those of rollouts."""
        self._configured = tuple(shadows)
        self.set_shadows(self._configured)

    def follow_rollouts(self, rollouts: Iterable[RolloutRecord]) -> None:
        """The new versions of these rollouts, and no others, score answers of the old ones."""
        wanted = {(shadow.model, shadow.candidate): shadow for shadow in self._configured}
        for rollout in rollouts:
            if rollout.scored_share and rollout.old != rollout.new:
                shadow = ShadowConfig(model=rollout.old, candidate=rollout.new, share=rollout.scored_share)
                wanted.setdefault((rollout.old, rollout.new), shadow)
        self.set_shadows(list(wanted.values()))

    def close(self) -> None:
        """Sample no more, and cancel what is under way."""
        self.set_shadows(())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- AnswerObserver -----------------------------------------------------------------------------------------------

    def arrived(self, event: RequestArrived) -> Request:
        request = event.request
        pairs = self._by_model.get(request.model)
        if pairs is None or event.cached or request.client_id in OWN_CLIENT_IDS:
            return request
        if request.pooling is not None or request.images:  # nothing to compare, or seen by few models
            return request
        wanted = [pair for pair in pairs if is_sampled(request.request_id, pair.config)]
        able = [pair for pair in wanted if self._can_compare(request, pair)]
        if not able:
            return request
        slot = request.choices[0].slot
        of_client = self._followed.setdefault(request.client_id, {})
        if slot in of_client:  # The core refuses such a request.
            return request
        takes_logprobs = any(pair.scores for pair in able)
        hides_logprobs = takes_logprobs and not _has_logprobs(request)
        most = max(pair.config.max_tokens for pair in able) - len(request.prompt_token_ids)
        of_client[slot] = FollowedAnswer(request, able, takes_logprobs, hides_logprobs, most)
        self._num_followed += 1
        return with_logprobs(request) if hides_logprobs else request

    def stepped(self, client_id: str, step: Step) -> None:
        if client_id == SHADOW_CLIENT_ID:
            self._on_own_step(step)
            return
        followed = self._followed.get(client_id)
        if not followed:
            return
        _collect(step, followed)
        for finish in step.finishes:
            answer = followed.get(finish.slot)
            if answer is not None:
                self._on_answer(answer, finish)
                self._forget(client_id, finish.slot)

    def ended(self, ended: RequestEnded) -> bool:
        if ended.client_id == SHADOW_CLIENT_ID:
            return True
        if ended.reason == FINISH_REASON_CANCELLED and ended.client_id in self._followed:
            # Its client may be gone, and then no step comes.
            for slot, answer in list(self._followed[ended.client_id].items()):
                if answer.request.request_id == ended.request_id:
                    self._skip_all(answer.pairs, Skip.UNFINISHED)
                    self._forget(ended.client_id, slot)
        return False

    def is_own(self, request: Request) -> bool:
        return request.client_id == SHADOW_CLIENT_ID

    # -- answers of the model -----------------------------------------------------------------------------------------

    def _can_compare(self, request: Request, pair: Pair) -> bool:
        reason = self._obstacle(request, pair)
        if reason is not None:
            pair.skip(reason)
        return reason is None

    def _obstacle(self, request: Request, pair: Pair) -> Skip | None:
        """The reason why the request's answer cannot be compared."""
        choices = request.choices
        if len(choices) != 1 or choices[0].output_token_ids or not request.prompt_token_ids:
            return Skip.CHOICES
        if request.adapter is not None:
            return Skip.ADAPTER
        if self._num_followed >= MAX_FOLLOWED:
            return Skip.QUEUE_FULL
        states = {state.name: state for state in self._core.fleet.models}
        state, candidate = states.get(request.model), states.get(pair.config.candidate)
        if candidate is None or not candidate.num_ready_shards:
            return Skip.NO_CANDIDATE
        if len(request.prompt_token_ids) >= min(pair.config.max_tokens, candidate.max_model_len - 1):
            return Skip.TOO_LONG
        mine, other = self._models.get(request.model), self._models.get(pair.config.candidate)
        if mine is None or other is None or not mine.has_tokens_of(other):
            return Skip.TOKENIZER
        if pair.scores and (
            state is None or LOGPROBS not in state.capabilities or PROMPT_LOGPROBS not in candidate.capabilities
        ):
            return Skip.ENGINE
        return None

    def _on_answer(self, answer: FollowedAnswer, finish: Finish) -> None:
        if finish.reason not in GOOD_ENDS or not answer.token_ids:
            self._skip_all(answer.pairs, Skip.UNFINISHED)
            return
        has_all_logprobs = answer.num_logprobs == len(answer.token_ids) and math.isfinite(answer.surprisal)
        sample = Sample(answer.request, answer.token_ids, answer.surprisal, self._driver.now())
        for pair in answer.pairs:
            if len(answer.token_ids) > answer.max_tokens or sample.num_tokens >= self._window(pair):
                pair.skip(Skip.TOO_LONG)
            elif pair.scores and not has_all_logprobs:
                pair.skip(Skip.LOGPROBS)
            else:
                pair.offer(sample)
        self._send_waiting()

    def _window(self, pair: Pair) -> int:
        """The candidate's, in tokens."""
        return next(
            (state.max_model_len for state in self._core.fleet.models if state.name == pair.config.candidate), 0
        )

    def _skip_all(self, pairs: Sequence[Pair], reason: Skip) -> None:
        for pair in pairs:
            if not pair.is_closed:
                pair.skip(reason)

    def _forget(self, client_id: str, slot: int) -> None:
        of_client = self._followed[client_id]
        del of_client[slot]
        self._num_followed -= 1
        if not of_client:
            del self._followed[client_id]
        self._end_if_done()

    # -- requests of its own ------------------------------------------------------------------------------------------

    def _send_waiting(self) -> None:
        for pair in self._pairs:
            while (sample := pair.take(self._core)) is not None:
                self._send(pair, sample)
        if self._timer is None and (self._running or any(pair.waiting for pair in self._pairs)):
            self._timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check)

    def _send(self, pair: Pair, sample: Sample) -> None:
        slot = self._slots.allocate()
        self._num_sent += 1
        candidate = pair.config.candidate
        if pair.scores:
            request = self._scoring_request(sample, candidate, slot)
        else:
            most = min(pair.config.max_tokens, self._window(pair))
            request = generating_request(sample, candidate, most, self._num_sent, slot)
        self._running[slot] = Running(pair, sample, self._driver.now())
        pair.num_running += 1
        self._dispatch(RequestArrived(request))

    def _scoring_request(self, sample: Sample, candidate: str, slot: int) -> Request:
        """Earlier scores may have left blocks of the prompt at the candidate, and so may the caller's own requests if
        the candidate serves them: the more are used."""
        request = scoring_request(sample, candidate, self._num_sent, slot)
        reading = reading_callers_cache(sample, request)
        num_found = self._num_cached_tokens(reading)
        return reading if num_found and num_found >= self._num_cached_tokens(request) else request

    def _num_cached_tokens(self, request: Request) -> int:
        """Returns the cached tokens of its prompt, at the shard that has the most."""
        plan = self._core.plan(request, self._driver.now())
        return max((shard.num_overlap_tokens for shard in plan.shards), default=0)

    def _on_own_step(self, step: Step) -> None:
        for start in step.starts:
            running = self._running.get(start.slot)
            if running is not None:
                running.prompt_logprobs = start.prompt_logprobs
        for finish in step.finishes:
            running = self._running.pop(finish.slot, None)
            if running is not None:
                self._slots.free(finish.slot)
                running.pair.num_running -= 1
                running.pair.finished(running, finish, self._driver.now())
        self._send_waiting()
        self._end_if_done()

    def _check(self) -> None:
        """Give way where clients' requests wait, and try again where there was no room."""
        self._timer = None
        for pair in self._pairs:
            pair.drop_old(self._driver.now())
            if pair.num_running and self._core.num_waiting(pair.config.candidate):
                self._cancel(pair)
        self._send_waiting()

    def _cancel(self, pair: Pair) -> None:
        slots = [slot for slot, running in self._running.items() if running.pair is pair]
        if slots:
            self._dispatch(SlotsCancelled(SHADOW_CLIENT_ID, slots))

    def _dispatch(self, event: RequestArrived | SlotsCancelled) -> None:
        try:
            self._driver.dispatch(event)
        except Exception:
            log.exception("shadow_request_failed")

    def _end_if_done(self) -> None:
        """Without shadows, the driver is left alone once no client's step has to be changed any more."""
        if not (self._pairs or self._followed or self._running):
            self._driver.remove_tap(self)


def _has_logprobs(request: Request) -> bool:
    return isinstance(request.sampling, SamplingParams) and request.sampling.HasField("logprobs")


def _collect(step: Step, followed: Mapping[int, FollowedAnswer]) -> None:
    """Take the tokens and logprobs of followed answers, and those logprobs out of the step that no client wants."""
    position = 0
    for index, slot in enumerate(step.slots):
        count = step.num_tokens[index] if step.num_tokens else 1
        answer = followed.get(slot)
        if answer is not None and len(answer.token_ids) <= answer.max_tokens:
            answer.token_ids.extend(step.token_ids[position : position + count])
        position += count
    if not step.logprobs:
        return
    hides_any = False
    for slot, entry in step.logprobs:
        answer = followed.get(slot)
        if answer is not None and answer.takes_logprobs and isinstance(entry, TokenLogprobs):
            answer.surprisal -= entry.logprob
            answer.num_logprobs += 1
            hides_any = hides_any or answer.hides_logprobs
    if hides_any:
        step.logprobs = [(slot, entry) for slot, entry in step.logprobs if not _is_hidden(followed.get(slot))]


def _is_hidden(answer: FollowedAnswer | None) -> bool:
    return answer is not None and answer.hides_logprobs
