"""Which answers are kept, and for whom."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import pytest

from kvloom.adapters import Adapter
from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, SamplingParams, StopConditions
from kvloom_common.access.kv_shares import CacheSalts
from kvloom_common.config import ResultCacheConfig
from router.core.actions import AnswerCompleted, CompletedChoice
from router.core.events import ChoiceSpec, Request, RequestArrived, ShardDescription
from router.core.frames import Finish
from router.features.fingerprints import fingerprints
from router.features.result_cache.cache import ResultCache
from router.features.result_cache.pieces import pieces_of
from router.features.result_recorder import ResultRecorder
from tests.fakes.tiny_tokenizer import model_tokenizer

TOKENIZER = model_tokenizer()
SHARD = ShardDescription("s0", "i0", "m", 16, 100, 8, 512, variant="v", model_checksum="sum", card_checksum="card")
REQUEST = Request(
    "r", "c", "m", [1, 2, 3], "text", [ChoiceSpec(0, 0)], max_tokens=9, tenant="a/b", is_cacheable=True,
    sampling=SamplingParams(temperature=0, seed=11), stop=StopConditions(),
)  # fmt: skip
TEXT = "the quick brown fox"


class World:
    """A router, as far as its result cache needs one."""

    def __init__(self, scope_of: Callable[[Request], str] = lambda request: request.tenant) -> None:
        self.revision: str | None = "policy-1"
        self.now = 100.0
        config = ResultCacheConfig(enabled=True, ttl_seconds=60.0)
        pieces = functools.partial(pieces_of, TOKENIZER)
        self.cache = ResultCache(config, b"k" * 32, pieces, scope_of, max_answer_tokens=20)
        self.keeper = ResultRecorder(self.cache, None, lambda: self.revision, lambda: self.now)
        self.keeper.fleet_changed([SHARD])

    def arrived(self, request: Request) -> RequestArrived:
        event = self.keeper.arrived(request)
        assert event is not None
        return event

    def ticket(self, request: Request = REQUEST) -> Any:
        return self.arrived(request).ticket

    def keep(self, request: Request = REQUEST, ticket: Any = None, **changes: Any) -> None:
        self.keeper.completed(completed(request, ticket or self.ticket(request), **changes))

    def finds(self, request: Request = REQUEST) -> bool:
        return bool(self.arrived(request).cached)


def completed(request: Request, ticket: Any, **changes: Any) -> AnswerCompleted:
    ids = list(TOKENIZER.encode_now(TEXT))
    choices = [
        CompletedChoice(spec.index, ids, len(TEXT), Finish(spec.slot, FINISH_REASON_LENGTH, 3, 0, len(ids)))
        for spec in request.choices
    ]
    fields = {
        "choices": choices,
        "shard_id": "s0",
        "is_result_cache_hit": False,
        "is_exact": True,
        "is_screened": True,
        **changes,
    }
    return AnswerCompleted(ticket=ticket, request=request, **fields)


def replaced(**changes: Any) -> Request:
    return msgspec.structs.replace(REQUEST, **changes)


def test_the_same_request_gets_the_same_tokens_and_text() -> None:
    """The purpose of it all; a drawn seed, the ids of the request and its stream do not matter."""
    world = World()
    world.keep()
    again = replaced(
        request_id="r2", client_id="c2", choices=[ChoiceSpec(7, 0)], sampling=SamplingParams(temperature=0, seed=12)
    )
    (choice,) = world.arrived(again).cached
    assert "".join(choice.deltas) == TEXT
    assert list(choice.token_ids) == list(TOKENIZER.encode_now(TEXT))
    assert len(choice.deltas) == len(choice.token_ids)
    assert choice.finish.reason == FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant": "a/c"},
        {"prompt_token_ids": [1, 2]},
        {"prompt_text": "other"},
        {"max_tokens": 8},
        {"max_tokens": None},
        {"choices": [ChoiceSpec(0, 0), ChoiceSpec(1, 1)]},
        {"choices": [ChoiceSpec(0, 1)]},
        {"stop": StopConditions(stop=["x"])},
        {"stop": StopConditions(ignore_eos=True)},
        {"sampling": SamplingParams(temperature=0, presence_penalty=1.0)},
        {"sampling": SamplingParams(temperature=0.5, seed=11)},
        {"sampling": SamplingParams(temperature=0, logit_bias={5: 1.0})},
        {"adapter": Adapter("lora", "sum")},
    ],
)
def test_whatever_the_answer_depends_on_is_in_the_key(changes: dict[str, Any]) -> None:
    """A wrong answer is worse than none, and one of another tenant is a leak."""
    world = World()
    world.keep()
    assert world.finds()
    assert not world.finds(replaced(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"variant": "w"},
        {"model_checksum": "other"},
        {"card_checksum": "other"},
        {"max_model_len": 256},
        {"model_version": "2"},
    ],
)
def test_a_changed_model_invalidates_without_being_told(changes: dict[str, Any]) -> None:
    """Nobody clears a cache when a model is replaced, so its key has to do it."""
    world = World()
    world.keep()
    world.keeper.fleet_changed([msgspec.structs.replace(SHARD, **changes)])
    assert not world.finds()
    world.keeper.fleet_changed([SHARD])
    assert world.finds()


def test_shards_that_differ_or_promise_nothing_have_no_answers_to_reuse() -> None:
    """Which of the shards has answered is chance, and so would the cached answer be."""
    others = [msgspec.structs.replace(SHARD, shard_id="s1", variant=variant) for variant in ("", "w")]
    for other in others:
        assert fingerprints([SHARD, other]) == {}
    assert fingerprints([others[0]]) == {}
    assert set(fingerprints([SHARD, msgspec.structs.replace(SHARD, shard_id="s1", incarnation_id="i9")])) == {"m"}


def test_files_without_a_checksum_count_as_new_with_every_process() -> None:
    """They may have been replaced before the shard was restarted."""
    plain = msgspec.structs.replace(SHARD, model_checksum="")
    restarted = msgspec.structs.replace(plain, incarnation_id="i1")
    assert fingerprints([plain]) != fingerprints([restarted])


def test_the_policy_in_force_is_part_of_the_key() -> None:
    """An answer that an older policy allowed was not judged by this one."""
    world = World()
    ticket = world.ticket()
    world.keep(ticket=ticket)
    world.revision = "policy-2"
    assert not world.finds()
    world.keep(ticket=ticket)  # screened by policy-1
    assert not world.finds()
    world.revision = None
    assert world.ticket() is None


@pytest.mark.parametrize("changes", [{"is_exact": False}, {"is_screened": False}, {"is_result_cache_hit": True}])
def test_what_may_not_be_reused_is_not_kept(changes: dict[str, Any]) -> None:
    """The core knows what was not screened; and a hit must not prolong its own life for ever."""
    world = World()
    world.keep(**changes)
    assert not world.finds()


def test_long_answers_are_not_kept() -> None:
    """They would be sent at once, and fill the buffers of their client."""
    world = World()
    end = Finish(0, FINISH_REASON_STOP)
    world.keep(choices=[CompletedChoice(0, [5] * 21, 21, end)])
    assert not world.finds()


def test_a_clearing_also_concerns_answers_that_are_being_generated() -> None:
    """Otherwise what was to be forgotten would be back a moment later."""
    world = World()
    ticket = world.ticket()
    world.cache.clear({"a/b"})
    world.keep(ticket=ticket)
    assert not world.finds()


def test_answers_expire() -> None:
    """See test_result_memory; here for the time that the configuration names."""
    world = World()
    world.keep()
    world.now += 59.0
    assert world.finds()
    world.now += 1.0
    assert not world.finds()


def test_a_tokenizer_that_reads_the_tokens_differently_makes_a_miss() -> None:
    """The text was not kept, so a router with other files would send another text."""
    world = World()
    world.keep(choices=[CompletedChoice(0, list(TOKENIZER.encode_now(TEXT)), 5, Finish(0, FINISH_REASON_LENGTH))])
    assert not world.finds()
    assert world.cache.num_hits == 0


class Shared:
    """SharedResults whose answers the test gives."""

    is_asked = True

    def __init__(self) -> None:
        self.stored: dict[bytes, bytes] = {}
        self.asked: list[tuple[bytes, Any]] = []

    def look_up(self, key: bytes, scope: str, on_found: Any) -> None:
        assert scope
        self.asked.append((key, on_found))

    def store(self, key: bytes, answer: bytes, scope: str, seconds: float) -> None:
        assert scope
        assert seconds > 0
        self.stored[key] = answer


def shared_world() -> tuple[World, Shared, list[RequestArrived]]:
    world, shared, passed = World(), Shared(), []
    world.keeper.share(shared, passed.append)
    return world, shared, passed


def test_another_routers_answer_is_used() -> None:
    """Clients reach any of the routers, so what one of them knows should serve all."""
    first, shared, passed = shared_world()
    assert first.keeper.arrived(REQUEST) is None
    key, on_found = shared.asked.pop()
    on_found(None)
    (event,) = passed
    first.keeper.completed(completed(REQUEST, event.ticket))
    second, others, passed = shared_world()
    assert second.keeper.arrived(REQUEST) is None
    assert others.asked[0][0] == key
    others.asked.pop()[1](shared.stored[key])
    assert "".join(passed[0].cached[0].deltas) == TEXT
    assert second.arrived(REQUEST).cached, "the next time it is in this router's own memory"


def test_a_held_request_is_passed_on_once_and_before_its_cancellation() -> None:
    """A cancellation that overtook its request would leave it running for nobody."""
    world, shared, passed = shared_world()
    world.keeper.arrived(REQUEST)
    world.keeper.release()
    assert [event.request for event in passed] == [REQUEST]
    key, on_found = shared.asked.pop()
    on_found(b"late")
    assert len(passed) == 1
    assert not world.cache.has(key, world.now)


def test_an_unusable_shared_answer_is_a_miss() -> None:
    """What is in Redis may be of another version, or garbage."""
    world, shared, passed = shared_world()
    world.keeper.arrived(REQUEST)
    shared.asked.pop()[1](b"garbage")
    assert not passed[0].cached


class FakeSharedResults:
    """What routers share, which answers at once."""

    is_asked = True

    def __init__(self) -> None:
        self.answers: dict[tuple[str, bytes], bytes] = {}

    def look_up(self, key: bytes, scope: str, on_found: Callable[[bytes | None], None]) -> None:
        on_found(self.answers.get((scope, key)))

    def store(self, key: bytes, answer: bytes, scope: str, seconds: float) -> None:
        self.answers[scope, key] = answer

    def clear(self, scopes: Collection[str]) -> None:
        self.answers = {name: answer for name, answer in self.answers.items() if name[0] not in scopes}


class TwoRouters:
    """They share their answers. `scopes`: the cache scopes of tenants."""

    def __init__(self, scopes: dict[str, str]) -> None:
        self.salts = CacheSalts(b"k" * 32, lambda tenant: scopes.get(tenant, ""))
        self.shared = FakeSharedResults()
        self.first, self.second = (World(lambda request: self.salts.of(request.tenant)) for _ in range(2))
        self._passed: list[RequestArrived] = []
        for world in (self.first, self.second):
            world.keeper.share(self.shared, self._passed.append)

    def finds(self, world: World, tenant: str) -> bool:
        event = world.keeper.arrived(replaced(tenant=tenant)) or self._passed.pop()
        return bool(event.cached)

    def answer(self, world: World, tenant: str) -> None:
        """A shard of this router answers the tenant's request."""
        request = replaced(tenant=tenant)
        event = world.keeper.arrived(request) or self._passed.pop()
        world.keep(request, event.ticket)

    def clear(self, tenant: str) -> None:
        """As `kvloom cache clear --tenant` does in every router."""
        scopes = self.salts.of_all_times(tenant)
        for world in (self.first, self.second):
            world.keeper.clear(scopes)
        self.shared.clear(scopes)


def test_without_a_scope_only_the_same_tenant_gets_an_answer_wherever_it_is_kept() -> None:
    """Whether an answer was kept tells what was asked, so sharing needs a decision of the operator."""
    routers = TwoRouters({})
    routers.answer(routers.first, "a/b")
    assert routers.finds(routers.second, "a/b")
    for world in (routers.first, routers.second):
        assert not routers.finds(world, "a/c")


def test_tenants_with_one_cache_scope_get_one_anothers_answers_from_all_routers() -> None:
    """A scope must mean the same in a router's memory and in Redis; and it ends when the operator ends it."""
    scopes = {"a/b": "a", "a/c": "a", "a/e": "other"}
    routers = TwoRouters(scopes)
    routers.answer(routers.first, "a/b")
    assert routers.finds(routers.second, "a/c")
    assert not any(routers.finds(routers.second, tenant) for tenant in ("a/d", "a/e"))
    del scopes["a/c"]
    assert not any(routers.finds(world, "a/c") for world in (routers.first, routers.second))
    assert routers.finds(routers.second, "a/b")


def test_clearing_a_tenant_clears_what_it_can_get() -> None:
    """What a tenant must not get any more may have been made for another one of its scope, or before it had one."""
    scopes = {"a/b": "a", "a/c": "a"}
    routers = TwoRouters(scopes)
    routers.answer(routers.first, "a/b")
    routers.answer(routers.first, "x/y")
    del scopes["a/c"]
    routers.answer(routers.first, "a/c")
    scopes["a/c"] = "a"
    routers.clear("a/c")
    del scopes["a/c"]
    for tenant in ("a/b", "a/c"):
        assert not any(routers.finds(world, tenant) for world in (routers.first, routers.second))
    assert routers.finds(routers.second, "x/y")
