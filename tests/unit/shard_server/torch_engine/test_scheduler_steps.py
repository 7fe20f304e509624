"""The step loop on a fake model whose logits betray every wrong KV block: the same tokens however work is cut up."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from kvloom_common.kv_share import KvShare
from kvloom_common.text.block_hash import root_hash
from shard_server.engines.base import EngineRequest, Sampling, SequenceFinishReason
from shard_server.engines.torch_engine.model_runner import ScheduledSequence
from shard_server.engines.torch_engine.scheduler import MIN_PREFILL_TOKENS_PER_STEP
from tests.fakes.fake_model_runner import VOCAB_SIZE, FakeDeviceRunner, FakeModelRunner, logits_of
from tests.step_bench import Answer, StepBench, same

BLOCK_SIZE = 4


class Bench(StepBench):
    def __init__(
        self, *, num_blocks: int = 128, max_batch: int = 16, budget: int = 512, overlaps: bool = False
    ) -> None:
        make = FakeDeviceRunner if overlaps else FakeModelRunner
        self.runner = make(block_size=BLOCK_SIZE, num_blocks=num_blocks)
        super().__init__(self.runner, block_size=BLOCK_SIZE, num_blocks=num_blocks, max_batch=max_batch, budget=budget)


def make_request(name: str, prompt: list[int], max_tokens: int = 12, **changes: object) -> EngineRequest:
    request = EngineRequest(name, prompt, Sampling(temperature=0.0), max_tokens, root_hash=root_hash("m"))
    return dataclasses.replace(request, **changes)


def various_requests(count: int, seed: int = 1) -> list[EngineRequest]:
    """Ragged prompts, half of them with a common beginning, under all kinds of sampling."""
    rng = random.Random(seed)
    common = [rng.randrange(1, VOCAB_SIZE) for _ in range(21)]
    requests: list[EngineRequest] = []
    for index in range(count):
        prompt = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randrange(1, 30))]
        sampling = Sampling(
            temperature=rng.choice([0.0, 0.7, 1.2]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 10]),
            seed=rng.randrange(2**64),
            presence_penalty=rng.choice([0.0, 0.8]),
            frequency_penalty=rng.choice([0.0, -0.3]),
            num_logprobs=rng.choice([None, 0, 3]),
        )
        prompt = common[: rng.randrange(22)] + prompt if index % 2 else prompt
        requests.append(make_request(f"r{index}", prompt, rng.randrange(1, 25), sampling=sampling))
    return requests


def alone(request: EngineRequest) -> Answer:
    return Bench().run(request)[request.request_id]


@pytest.mark.parametrize(
    ("num_blocks", "max_batch", "budget"),
    [
        pytest.param(256, 32, 512, id="batched"),
        pytest.param(256, 32, 5, id="chunked"),
        pytest.param(256, 3, 1, id="chunks-of-one"),
        pytest.param(24, 16, 512, id="preempted"),
        pytest.param(21, 16, 3, id="preempted-and-chunked"),
    ],
)
@pytest.mark.parametrize("overlaps", [False, True], ids=["in-turn", "overlapped"])
def test_tokens_and_logprobs_do_not_depend_on_how_work_is_cut_up(
    num_blocks: int, max_batch: int, budget: int, overlaps: bool
) -> None:
    """Batch invariance of everything above the model: batching, chunking, reuse, preemption, overlapped steps."""
    requests = various_requests(24)
    bench = Bench(num_blocks=num_blocks, max_batch=max_batch, budget=budget, overlaps=overlaps)
    answers = bench.run(*requests)
    for request in requests:
        assert same(answers[request.request_id], alone(request)), request.request_id
    assert (bench.scheduler.num_preemptions > 0) == (num_blocks < 30)
    assert bench.replayed == bench.pool.cached_hashes
    assert bench.pool.num_available == num_blocks


@pytest.mark.parametrize(
    ("token_seconds", "chunk"), [(0.025, 40), (0.2, MIN_PREFILL_TOKENS_PER_STEP), (0.001, 200)], ids=str
)
def test_no_step_takes_much_longer_than_a_second(token_seconds: float, chunk: int) -> None:
    """On a slow machine 512 tokens took 13 seconds, in which no other stream went on, and routers took the shard for
    stalled. What the engine measures before the first request is what bounds the first chunk, and what it tells."""
    bench = Bench(num_blocks=256, budget=200)

    def take_time(batch: list[ScheduledSequence]) -> None:
        bench.clock += token_seconds * sum(len(one.token_ids) for one in batch)

    bench.runner.before_run = take_time
    speed = bench.loop.warm_up(199)
    assert speed.prefill_tokens_per_second == pytest.approx(1 / token_seconds, rel=0.1)
    assert speed.decode_step_seconds == pytest.approx(token_seconds + 0.01)
    bench.runner.batches.clear()
    bench.run(make_request("a", list(range(1, 60)) * 10, max_tokens=2))
    chunks = [len(batch[0].token_ids) for batch in bench.runner.batches]
    assert max(chunks) == pytest.approx(chunk, rel=0.1)
    assert sum(chunks) == 590 + 1


def test_a_prompt_behind_cached_tokens_is_computed_before_the_first_request() -> None:
    """On a GPU its kernels were compiled for the second request of a shard, which waited four seconds."""
    bench = Bench(num_blocks=256, budget=200)
    bench.loop.warm_up(199)
    [last] = bench.runner.batches[-1]
    assert last.num_computed_tokens >= bench.pool.block_size
    assert len(last.token_ids) > 1


@pytest.mark.parametrize("overlaps", [False, True], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize("has_shares", [False, True], ids=["common", "shares"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))])
def test_arrivals_and_cancels_at_any_time(seed: int, has_shares: bool, overlaps: bool) -> None:
    """Whatever comes and goes in between, with too few blocks: integrity after each step, no sequence starves, tokens
    are those of an undisturbed run or the beginning of them. Guaranteed shares, some of them smaller than a sequence,
    change nothing of that."""
    rng = random.Random(seed)
    requests = various_requests(30, seed)
    if has_shares:
        shares = (None, None, KvShare(1, 20), KvShare(2, 70))
        requests = [dataclasses.replace(request, kv_share=rng.choice(shares)) for request in requests]
    sizes = {"num_blocks": rng.randrange(20, 40), "max_batch": rng.randrange(1, 9), "budget": rng.randrange(1, 40)}
    bench = Bench(overlaps=overlaps, **sizes)
    todo = list(requests)
    cancelled: set[str] = set()
    for _ in range(3000):
        if not todo and not bench.loop.has_work:
            break
        if todo and rng.random() < 0.4:
            bench.add(todo.pop())
        if rng.random() < 0.1:
            victim = rng.choice(requests).request_id
            bench.loop.cancel(victim)
            cancelled.add(victim)
        bench.step()
    for request in requests:
        answer, expected = bench.answers[request.request_id], alone(request)
        if answer.reason is SequenceFinishReason.CANCELLED:
            assert request.request_id in cancelled
            assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
        else:
            assert same(answer, expected)
    assert bench.pool.num_available == bench.pool.num_blocks
    assert bench.replayed == bench.pool.cached_hashes


@pytest.mark.parametrize("num_emitted", [1, 3, 4, 11])
def test_a_resumed_sequence_continues_identically(num_emitted: int) -> None:
    """Failover: another engine, given prompt + emitted tokens, emits exactly the rest."""
    for request in various_requests(12, seed=5):
        request = dataclasses.replace(request, max_tokens=12)
        whole = alone(request)
        emitted = whole.token_ids[:num_emitted]
        rest = alone(dataclasses.replace(request, output_token_ids=emitted))
        assert rest.token_ids == whole.token_ids[num_emitted:]
        assert rest.logprobs == whole.logprobs[num_emitted:]
        assert rest.reason == whole.reason


def test_a_resumed_sequence_that_had_ended_ends_at_once() -> None:
    """The shard died between the last token and the report of the end: no token may be added."""
    request = make_request("a", [1, 2, 3], max_tokens=5)
    whole = alone(request)
    assert alone(dataclasses.replace(request, output_token_ids=whole.token_ids)) == Answer(
        reason=SequenceFinishReason.LENGTH
    )
    stopped = dataclasses.replace(
        request, output_token_ids=whole.token_ids[:2], stop_token_ids=frozenset({whole.token_ids[1]})
    )
    assert alone(stopped) == Answer(reason=SequenceFinishReason.STOP)


def test_the_stop_token_is_emitted_and_ends_the_sequence() -> None:
    """vLLM's convention, on which usage counts rest."""
    request = make_request("a", [5, 6, 7], max_tokens=20)
    tokens = alone(request).token_ids
    stop = next(token for index, token in enumerate(tokens) if index > 2 and token not in tokens[:index])
    answer = alone(dataclasses.replace(request, stop_token_ids=frozenset({stop})))
    assert answer.token_ids == tokens[: tokens.index(stop) + 1]
    assert answer.reason is SequenceFinishReason.STOP


@pytest.mark.parametrize("max_tokens", [1, 4, 13])
def test_max_tokens_ends_with_length(max_tokens: int) -> None:
    """Exactly so many tokens, also at a block's edge."""
    answer = alone(make_request("a", [5, 6, 7], max_tokens=max_tokens))
    assert len(answer.token_ids) == max_tokens
    assert answer.reason is SequenceFinishReason.LENGTH


def test_a_sequence_that_fills_every_block_runs() -> None:
    """The engine's window is what the pool holds: the longest sequence it accepts must not deadlock."""
    bench = Bench(num_blocks=5)
    answers = bench.run(make_request("a", list(range(1, 9)), max_tokens=12), make_request("b", [9] * 10, max_tokens=10))
    assert [len(answer.token_ids) for answer in answers.values()] == [12, 10]


def test_cancel_frees_blocks_and_ends_in_the_next_output() -> None:
    """Running or waiting, the client's leaving must give the memory back at once."""
    bench = Bench(max_batch=1)
    bench.add(make_request("running", [1] * 9, max_tokens=100), make_request("waiting", [2] * 9, max_tokens=100))
    bench.step()
    bench.loop.cancel("running")
    bench.loop.cancel("waiting")
    bench.loop.cancel("unknown")
    output = bench.step()
    assert output is not None
    assert {(end.request_id, end.reason) for end in output.ends} == {
        ("running", SequenceFinishReason.CANCELLED),
        ("waiting", SequenceFinishReason.CANCELLED),
    }
    assert not bench.loop.has_work
    assert bench.pool.num_available == bench.pool.num_blocks


def test_a_second_turn_reuses_prompt_and_answer() -> None:
    """Generated tokens' blocks are cached too, so a conversation is prefilled only where it is new."""
    bench = Bench()
    first = bench.run(make_request("turn1", list(range(1, 11)), max_tokens=11))["turn1"]
    prompt = [*range(1, 11), *first.token_ids, 50, 51]
    second = bench.run(make_request("turn2", prompt, max_tokens=3))["turn2"]
    assert second.start is not None
    assert second.start.num_cached_tokens == 20  # 5 full blocks of the 20 tokens that were computed
    assert same(second, alone(make_request("turn2", prompt, max_tokens=3)))


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    """Its logits are needed: at least one token is computed, in a block of its own."""
    bench = Bench()
    prompt = list(range(1, 13))
    first = bench.run(make_request("a", prompt))["a"]
    computed = bench.runner.num_tokens_computed
    second = bench.run(make_request("b", prompt, max_tokens=1))["b"]
    assert second.start is not None
    assert second.start.num_cached_tokens == 8
    assert bench.runner.num_tokens_computed == computed + 4
    assert second.token_ids == first.token_ids[:1]


def test_another_tenants_prefix_is_not_reused() -> None:
    """The root hash separates tenants in the cache."""
    bench = Bench()
    bench.run(make_request("a", list(range(1, 13))))
    other = bench.run(make_request("b", list(range(1, 13)), root_hash=root_hash("m", cache_salt="other")))["b"]
    assert other.start is not None
    assert other.start.num_cached_tokens == 0


@pytest.mark.parametrize("budget", [6, 16, 512])
def test_choices_of_one_prompt_compute_it_once(budget: int) -> None:
    """n > 1: the others wait for the first one's prefill and share its blocks, and lose no step by it."""
    prompt = [i % 60 + 1 for i in range(33)]
    bench = Bench(budget=budget)
    choices = [make_request(f"c{i}", prompt, sampling=Sampling(seed=i), max_tokens=4) for i in range(4)]
    other = make_request("other", [59, 58, 57, 56, 55], max_tokens=4)
    bench.add(*choices, other)
    steps_to_first = 0
    while bench.answers["c3"].start is None:
        bench.step()
        steps_to_first += 1
    assert bench.runner.num_tokens_computed <= 33 + 3 * 1 + 5 + 3 * (3 + 1 + 1)  # decode tokens included
    assert steps_to_first <= -(-33 // budget) + 1
    assert [bench.answers[f"c{i}"].start.num_cached_tokens for i in range(4)] == [0, 32, 32, 32]
    answers = bench.run()
    for request in (*choices, other):
        assert same(answers[request.request_id], alone(request))


def test_waiting_for_a_shared_prefix_ends_with_the_prefill_that_was_waited_for() -> None:
    """When the one that computes is cancelled half-way, the next in the queue computes; no sequence waits for ever."""
    prompt = [i % 60 + 1 for i in range(40)]
    bench = Bench(budget=8)
    bench.add(*[make_request(f"c{i}", prompt, max_tokens=3) for i in range(3)])
    bench.step()
    bench.step()
    bench.loop.cancel("c0")
    answers = bench.run()
    assert answers["c0"].token_ids == []
    assert answers["c1"].token_ids == answers["c2"].token_ids == alone(make_request("x", prompt, 3)).token_ids
    assert bench.runner.num_tokens_computed <= 40 + 8 + 2 * 3


def test_prefill_does_not_stall_decoding() -> None:
    """Chunked prefill: every decoding sequence gets its token in every step while a long prompt comes in."""
    bench = Bench(budget=8)
    bench.add(make_request("decoding", [1, 2, 3], max_tokens=40))
    bench.step()
    bench.add(make_request("long", [4] * 80, max_tokens=2))
    for _ in range(10):
        output = bench.step()
        assert output is not None
        assert "decoding" in output.request_ids
        assert sum(len(s.token_ids) for s in bench.runner.batches[-1]) <= 8 + 1
    assert bench.answers["long"].start is not None


def test_first_come_first_served() -> None:
    """A later, shorter prompt does not overtake when there is no room."""
    bench = Bench(max_batch=1)
    order: list[str] = []
    bench.add(*[make_request(f"r{i}", [i + 1] * (20 - i), max_tokens=2) for i in range(5)])
    while bench.loop.has_work:
        output = bench.step()
        order += [start.request_id for start in output.starts] if output else []
    assert order == [f"r{i}" for i in range(5)]


def test_the_newest_is_preempted_and_resumes_first() -> None:
    """The oldest always continues, and no sequence overtakes a preempted one: that is why preemption cannot
    livelock."""
    bench = Bench(num_blocks=12, max_batch=4)
    requests = [make_request(f"r{i}", [i + 1] * 7, max_tokens=24) for i in range(6)]
    bench.add(*requests)
    ends: list[str] = []
    while bench.loop.has_work:
        output = bench.step()
        ends += [end.request_id for end in output.ends] if output else []
    assert bench.scheduler.num_preemptions > 0
    assert ends == [request.request_id for request in requests]
    for answer in bench.answers.values():
        assert answer.start is not None
        assert answer.start.num_cached_tokens == 0  # what is reused after a preemption is not the client's saving


def test_a_newcomer_is_not_admitted_to_be_preempted_at_once() -> None:
    """Its prefill would be thrown away as soon as those that run need their next blocks."""
    bench = Bench(num_blocks=12)
    bench.add(make_request("running", [1] * 7, max_tokens=10))
    bench.step()
    answers = bench.run(make_request("newcomer", [2] * 40, max_tokens=2))
    assert len(answers["newcomer"].token_ids) == 2
    assert bench.scheduler.num_preemptions == 0


def test_penalties_count_every_output_token() -> None:
    """Also those of earlier attempts, and none of the prompt."""
    prompt, resumed = [1, 2, 3], [7, 7, 9]
    tokens = [*prompt, *resumed]
    for _ in range(30):
        logits = logits_of(tokens)
        for token_id in range(VOCAB_SIZE):
            if count := tokens[len(prompt) :].count(token_id):
                logits[token_id] -= 0.5 + 1.0 * count
        tokens.append(int(logits.argmax()))
    sampling = Sampling(temperature=0.0, presence_penalty=0.5, frequency_penalty=1.0)
    answer = alone(make_request("a", prompt, 33, sampling=sampling, output_token_ids=resumed))
    assert answer.token_ids == tokens[6:]


def test_blocks_are_stored_only_once_computed() -> None:
    """A router that learned of it too early would send others after KV that is not there."""
    bench = Bench(budget=6)
    bench.add(make_request("a", list(range(1, 21)), max_tokens=5))
    for num_full in (1, 3, 4):
        bench.step()
        assert len(bench.replayed) == num_full


def test_out_of_memory_fails_the_newest_sequence_only() -> None:
    """One oversized step must not take the engine down."""
    bench = Bench()
    bench.add(make_request("old", [1, 2, 3]))
    bench.step()
    bench.add(make_request("new", [4, 5, 6]))

    def refuse(batch: list[object]) -> None:
        if len(batch) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    bench.runner.before_run = refuse
    answers = bench.run()
    assert answers["new"].reason is SequenceFinishReason.ERROR
    assert "memory" in answers["new"].error
    assert same(answers["old"], alone(make_request("old", [1, 2, 3])))
    assert bench.pool.num_available == bench.pool.num_blocks


def test_logits_that_are_not_finite_end_their_sequence() -> None:
    """It fails clearly; its neighbour continues."""
    bench = Bench()
    run = bench.runner.run

    def poisoned(batch: list) -> torch.Tensor:
        logits = run(batch)
        for row, scheduled in enumerate(batch):
            if scheduled.token_ids[0] == 9:
                logits[row] = torch.nan
        return logits

    bench.runner.run = poisoned
    answers = bench.run(make_request("bad", [9, 9]), make_request("good", [1, 2]))
    assert answers["bad"].reason is SequenceFinishReason.ERROR
    assert answers["bad"].token_ids == []
    assert same(answers["good"], alone(make_request("good", [1, 2])))


def test_load_says_what_is_queued_and_how_fast_it_goes() -> None:
    """The router places by these numbers."""
    bench = Bench(budget=8, max_batch=2)
    bench.add(*[make_request(f"r{i}", [i + 1] * 20, max_tokens=8) for i in range(3)])
    output = bench.step()
    assert output is not None
    load = output.load
    assert (load.num_running, load.num_waiting) == (1, 2)
    assert load.num_queued_prefill_tokens == 12 + 20 + 20
    assert load.num_available_blocks == 128 - 5
    assert load.prefill_tokens_per_second == pytest.approx(8 / 0.01)
    last = output
    while bench.loop.has_work:
        last = bench.step() or last
    assert last.load.num_running == last.load.num_queued_prefill_tokens == last.load.num_decode_context_tokens == 0
    assert last.load.decode_step_seconds == pytest.approx(0.01)
    assert last.load.num_available_blocks == 128
