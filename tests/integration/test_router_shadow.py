"""Shadow traffic over real sockets: clients must not notice it, and it must give way, be bounded and be counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvloom.router_link.link import GrpcRouterLink
from kvloom.v1.generation_pb2 import (
    FINISH_REASON_LENGTH,
    RESULT_CACHE_USE_HIT,
    RESULT_CACHE_USE_MISS,
    SamplingParams,
    StopConditions,
)
from kvloom.v1.router_service_pb2 import GenerateRequest, TokenIds
from kvloom_common.config import ShadowConfig
from kvloom_common.discovery.records import RolloutRecord
from kvloom_common.models.likelihood_gap import GapSums
from kvloom_common.text.tokenizer import ModelTokenizer
from router.features.shadow.sampling import is_sampled
from shard_server.engines.sim_sequence import CHOSEN_LOGPROB
from tests.fakes.router_world import Answer, link_request
from tests.fakes.shadow_world import CANDIDATE, MODEL, PAIR, ShadowWorld, shadow_world
from tests.fakes.tiny_tokenizer import model_tokenizer
from tests.fakes.word_tokenizer import word_tokenizer
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

NUM_TOKENS = 8
PROMPT = [5, 6, 7]


@pytest.fixture
async def shadowed(router_redis_url: str) -> AsyncIterator[ShadowWorld]:
    async with shadow_world(router_redis_url, model_tokenizer()) as world:
        yield world


async def serve(world: ShadowWorld, *models: str, max_batch: int = 8) -> GrpcRouterLink:
    """Returns a client of a router that knows the models' shards."""
    for name in models:
        await world.add_model(name, max_batch=max_batch)
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, len(models))
    return link


async def ask(world: ShadowWorld, link: GrpcRouterLink, number: int = 0, **fields: object) -> Answer:
    sampling = fields.pop("sampling", SamplingParams(seed=number))
    max_tokens = fields.pop("max_tokens", NUM_TOKENS)
    return await world.ask(link, PROMPT, max_tokens, model=MODEL, sampling=sampling, **fields)


def content(answer: Answer) -> object:
    finish = answer.finish
    return answer.token_ids, answer.texts, answer.logprobs, finish.reason, finish.num_output_tokens


def use_of(answer: Answer) -> int:
    """What the result cache had to do with it."""
    (start,) = answer.starts
    assert start is not None
    return start.result_cache


async def test_answers_are_scored_and_nobody_notices(shadowed: ShadowWorld) -> None:
    """The whole point: the candidate's likelihood is known, while clients get the same answers as without a shadow, and
    no request, token or time is counted but theirs."""
    link = await serve(shadowed, MODEL, CANDIDATE)
    before = [content(await ask(shadowed, link, number)) for number in range(5)]
    shadowed.shadow()
    after = [content(await ask(shadowed, link, number)) for number in range(5)]
    assert after == before
    await eventually(lambda: shadowed.sums.num_answers == 5, "the scores")
    assert shadowed.sums == GapSums(5, 5 * NUM_TOKENS, 0, 5 * NUM_TOKENS**2, 0, 0)
    surprisal = shadowed.metric("kvloom_router_shadow_surprisal_nats_total", **PAIR, under="candidate")
    assert surprisal == pytest.approx(-5 * NUM_TOKENS * CHOSEN_LOGPROB)
    counted = {"outcome": "length", "error_type": ""}
    assert shadowed.metric("kvloom_router_requests_total", model=MODEL, **counted) == 10
    assert shadowed.metric("kvloom_router_requests_total", model=CANDIDATE, **counted) == 0
    assert shadowed.metric("kvloom_router_time_to_first_token_seconds_count", model=CANDIDATE) == 0
    assert shadowed.metric("kvloom_router_tokens_total", model=CANDIDATE, token_type="input") == 0
    assert shadowed.metric("kvloom_router_requests_live") == 0
    assert shadowed.metric("kvloom_router_clients_connected") == 1


@pytest.fixture
async def with_words(router_redis_url: str, model_dir: Path) -> AsyncIterator[ShadowWorld]:
    """The tokenizer has the words of the simulated engine, so that its answers can be parts of prompts."""
    async with shadow_world(router_redis_url, ModelTokenizer.load(model_dir)) as world:
        yield world


async def test_a_score_uses_cached_prompts_and_no_caller_notices(with_words: ShadowWorld) -> None:
    """What the candidate has computed of a prompt is not computed again, whether that was for an earlier score or for
    the caller. What is computed for a score is never found by the caller."""
    world = with_words
    await world.add_model(MODEL)
    candidate = await world.add_model(CANDIDATE)
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 2)
    world.shadow()
    of_scores, of_caller = [5] * 40, [6] * 40

    def num_hits() -> float:
        samples = (sample for family in candidate.collect() for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == "vllm:prefix_cache_hits_total")

    async def score(prompt: list[int], number: int) -> tuple[float, Answer]:
        """Returns how many tokens were cached at the candidate, and the answer that was scored."""
        before = num_hits()
        answer = await world.ask(link, prompt, 40, model=MODEL, sampling=SamplingParams(seed=number))
        await eventually(lambda: world.sums.num_answers == number, "the score")
        return num_hits() - before, answer

    async def num_found(prompt: list[int], answer: Answer) -> int:
        """By a request of the caller to the candidate that continues the conversation."""
        continued = await world.ask(link, [*prompt, *answer.token_ids[0], 7], 1, model=CANDIDATE)
        assert continued.finish.reason == FINISH_REASON_LENGTH
        return continued.finish.num_cached_tokens

    assert (await score(of_scores, 1))[0] == 0
    num_cached, answer = await score(of_scores, 2)
    assert num_cached == 32
    assert await num_found(of_scores, answer) == 0
    await world.ask(link, of_caller, 1, model=CANDIDATE)
    num_cached, answer = await score(of_caller, 3)
    assert num_cached == 32
    assert await num_found(of_caller, answer) == 32


async def test_an_answer_over_grpc_is_the_same_too(shadowed: ShadowWorld) -> None:
    """Clients without an edge have no other place where logprobs could be taken out."""
    await serve(shadowed, MODEL, CANDIDATE)
    wanted = GenerateRequest(
        model=MODEL,
        token_ids=TokenIds(ids=PROMPT),
        sampling=SamplingParams(seed=1),
        stop=StopConditions(max_tokens=NUM_TOKENS),
    )
    seen: list[list[object]] = []
    for shadows in (False, True):
        if shadows:
            shadowed.shadow()
        call = (await shadowed.stub()).Generate(wanted)
        deltas = [delta async for response in call for delta in response.deltas]
        text, token_ids = "".join(delta.text for delta in deltas), [one for delta in deltas for one in delta.token_ids]
        seen.append([text, token_ids, [delta.logprobs[:] for delta in deltas if delta.logprobs]])
    assert seen[0] == seen[1]
    await eventually(lambda: shadowed.sums.num_answers == 1, "the score")


async def test_logprobs_that_a_client_has_asked_for_stay(shadowed: ShadowWorld) -> None:
    """Only what the shadow itself has asked for is taken out."""
    link = await serve(shadowed, MODEL, CANDIDATE)
    shadowed.shadow()
    wanting, other = await asyncio.gather(
        ask(shadowed, link, sampling=SamplingParams(seed=1, logprobs=2)), ask(shadowed, link)
    )
    assert wanting.logprobs == [[CHOSEN_LOGPROB] * NUM_TOKENS]
    assert other.logprobs == [[]]
    await eventually(lambda: shadowed.sums.num_answers == 2, "the scores")


async def test_a_share_is_sampled_by_the_requests_name(shadowed: ShadowWorld) -> None:
    """All routers, and a repetition, sample the same requests."""
    link = await serve(shadowed, MODEL, CANDIDATE)
    shadow = shadowed.shadow(share=0.5)
    await asyncio.gather(*(ask(shadowed, link, request_id=f"r{number}") for number in range(40)))
    wanted = sum(is_sampled(f"r{number}", shadow) for number in range(40))
    assert 10 < wanted < 30
    await eventually(lambda: shadowed.sums.num_answers + shadowed.skipped("queue_full") == wanted, "the scores")


async def test_what_cannot_be_compared_is_skipped_with_a_reason(shadowed: ShadowWorld) -> None:
    """A gap that misses a kind of answers must say so; requests are served all the same."""
    link = await serve(shadowed, MODEL)
    shadowed.shadow(max_tokens=16)
    await ask(shadowed, link)
    assert shadowed.skipped("no_candidate") == 1
    await shadowed.add_model(CANDIDATE)
    await shadowed.wait_for_shards(link, 2)
    await ask(shadowed, link, n=2)
    assert shadowed.skipped("choices") == 1
    await ask(shadowed, link, max_tokens=20)
    assert shadowed.skipped("too_long") == 1
    shadowed.shadow(max_tokens=2000)
    answer = Answer()
    handle = link.submit(link_request(PROMPT, 2000, model=MODEL), answer)  # it does not end before it is cancelled
    await eventually(lambda: answer.token_ids[0], "the first token")
    link.cancel(handle)
    await eventually(lambda: shadowed.skipped("unfinished"), "the skip of a cancelled answer")
    assert shadowed.sums.num_answers == 0
    assert shadowed.server.features.shadows.num_in_flight == 0


async def test_models_with_other_tokens_are_not_scored(router_redis_url: str) -> None:
    """The ids of one would mean something else to the other."""
    async with shadow_world(router_redis_url, model_tokenizer(), [ModelTokenizer(word_tokenizer())]) as world:
        link = await serve(world, MODEL, CANDIDATE)
        world.shadow()
        await ask(world, link)
        assert world.skipped("tokenizer") == 1


async def test_what_waits_for_a_busy_candidate_is_bounded(shadowed: ShadowWorld) -> None:
    """Clients of the candidate go first, and what they leave no room for is kept in a queue that ends."""
    link = await serve(shadowed, MODEL, CANDIDATE, max_batch=2)
    shadowed.shadow(max_queued=2)
    users = [Answer(), Answer()]
    handles = [link.submit(link_request(PROMPT, 4000, model=CANDIDATE), user) for user in users]
    await eventually(lambda: all(user.token_ids[0] for user in users), "the clients' first tokens")
    for number in range(5):
        await ask(shadowed, link, number)
    assert shadowed.skipped("queue_full") == 3
    assert shadowed.server.features.shadows.num_in_flight == 0
    for handle in handles:
        link.cancel(handle)
    await eventually(lambda: shadowed.sums.num_answers == 2, "the scores of those that waited")


async def test_work_for_a_candidate_is_given_up_when_clients_wait(shadowed: ShadowWorld) -> None:
    """A shadow must not keep a client waiting, not even one that came later."""
    link = await serve(shadowed, MODEL, CANDIDATE, max_batch=1)
    shadowed.shadow(mode="generate")
    await ask(shadowed, link, max_tokens=1000)
    await eventually(lambda: shadowed.server.features.shadows.num_in_flight, "a request at the candidate")
    users = [Answer() for _ in range(3)]
    for user in users:
        link.submit(link_request(PROMPT, NUM_TOKENS, model=CANDIDATE), user)
    await eventually(lambda: all(user.done for user in users), "the clients' answers")
    assert {user.finish.reason for user in users} == {FINISH_REASON_LENGTH}
    assert shadowed.skipped("busy") == 1


async def test_a_candidate_may_answer_itself(shadowed: ShadowWorld) -> None:
    """Lengths, ends and times of its answers are known before it has any client."""
    link = await serve(shadowed, MODEL, CANDIDATE)
    shadowed.shadow(mode="generate")
    answer = await ask(shadowed, link)
    assert answer.logprobs == [[]]

    def generated() -> float:
        return shadowed.metric("kvloom_router_shadow_generated_answers_total", **PAIR, outcome="length")

    await eventually(lambda: generated() == 1, "the candidate's answer")
    for by in ("model", "candidate"):
        assert shadowed.metric("kvloom_router_shadow_generated_tokens_total", **PAIR, by=by) == NUM_TOKENS
    assert shadowed.metric("kvloom_router_shadow_duration_seconds_count", **PAIR) == 1


async def test_shadows_end_in_the_middle_of_answers(shadowed: ShadowWorld) -> None:
    """A rollout switches them on and off: clients of answers that run then must not be shown logprobs either."""
    link = await serve(shadowed, MODEL, CANDIDATE)
    shadowed.shadow()
    answer = Answer()
    link.submit(link_request(PROMPT, 200, model=MODEL), answer)
    await eventually(lambda: answer.token_ids[0], "the first token")
    shadowed.server.features.shadows.set_shadows(())
    await eventually(lambda: answer.done, "the answer's end")
    assert answer.logprobs == [[]]
    await ask(shadowed, link)
    assert shadowed.sums == GapSums()


async def test_a_rollout_has_its_new_version_score_answers(shadowed: ShadowWorld) -> None:
    """So it can be taken back for what it would answer; shadows of the configuration stay as they are."""
    link = await serve(shadowed, MODEL, CANDIDATE)
    shadows = shadowed.server.features.shadows
    shadows.configure([ShadowConfig(model=CANDIDATE, candidate=MODEL)])
    record = RolloutRecord(MODEL, (MODEL,), MODEL, CANDIDATE, 0.0, "supervisor", "i", scored_share=1.0)
    shadows.follow_rollouts([record])
    await ask(shadowed, link)
    await eventually(lambda: shadowed.metric("kvloom_router_shadow_scored_answers_total", **PAIR), "a score")
    shadows.follow_rollouts([])
    assert [shadow.candidate for shadow in shadows.shadows] == [MODEL]


async def test_the_shadow_of_a_caller_is_cached_apart_and_not_screened(shadowed: ShadowWorld) -> None:
    """What a candidate caches of one caller's prompt must not be found by another's, and the safety service has nothing
    to judge in what nobody sees."""
    safety = await shadowed.start_safety(screens_answers=True)
    await shadowed.start_shard("shard-0", model=MODEL)
    candidate = await shadowed.start_shard("shard-1", model=CANDIDATE)
    await shadowed.start_router()
    link = await shadowed.connect()
    await shadowed.wait_for_shards(link, 2)
    shadowed.shadow(mode="generate")
    for tenant in ("a", "b"):
        await ask(shadowed, link, prompt_text="text", tenant=tenant)
    await eventually(lambda: len(candidate.submits) == 2, "the candidate's requests")
    salts = {submit.cache_salt for submit in candidate.submits}
    assert len(salts) == 2
    assert not salts & {"", "a", "b"}
    assert len(safety.prompts) == 2


async def test_the_result_cache_serves_answers_that_are_sampled(with_words: ShadowWorld) -> None:
    """It was silently off for them: the log-probabilities that a score needs made each request one that is neither
    answered from the cache nor kept there. What the cache answers is not sampled, since no model computes it."""
    world = with_words
    world.config.router.result_cache.enabled = True
    world.shard_tokenizer = world.tokenizer
    link = await serve(world, MODEL, CANDIDATE)
    world.shadow()
    greedy = SamplingParams(temperature=0.0)
    first, second = [await ask(world, link, sampling=greedy) for _ in range(2)]
    assert (use_of(first), use_of(second)) == (RESULT_CACHE_USE_MISS, RESULT_CACHE_USE_HIT)
    assert (second.token_ids, second.texts, second.logprobs) == (first.token_ids, first.texts, first.logprobs)
    await eventually(lambda: world.sums.num_answers == 1, "the score")
    world.server.features.shadows.set_shadows(())
    assert use_of(await ask(world, link, sampling=greedy)) == RESULT_CACHE_USE_HIT, "shadows are in no key"
