"""The checks of `kvloom doctor engine`, in the order in which they run. Each docstring states what it proves."""

from __future__ import annotations

import json
import math
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from kvloom_common.text.block_hash import block_hashes, root_hash
from kvloom_common.text.detokenizer import IncrementalDetokenizer
from shard_server.engines.base import (
    AdapterError,
    Capability,
    EngineError,
    EngineInfo,
    Guide,
    GuideKind,
    Pooling,
    Sampling,
    SequenceFinishReason,
    adapters_of,
)
from tools.doctor.session import GREEDY, EngineSession, Observed

Check = Callable[[EngineSession], Awaitable[str]]
"""Returns what it found. Raises CheckFailedError, CheckSkippedError, or any exception of the engine."""

CONCURRENT: Final = 32
MAX_DIFFERENCE: Final = 0.04
"""The distance between two embeddings of one text. Where their length is 1, their cosine is then at least 0.999."""
QUEUE_SECONDS: Final = 5.0
"""How long the end of a cancelled sequence that waits may take."""
TEXT: Final = "Write three sentences about the sea, and one about the sky above it."


class CheckFailedError(Exception):
    """The engine does not do what kvloom relies on. The message has what it did instead."""


class CheckSkippedError(Exception):
    """The check does not apply. The message has the reason."""


def need(held: bool, message: str) -> None:
    if not held:
        raise CheckFailedError(message)


def need_capability(session: EngineSession, capability: Capability, why: str) -> None:
    if capability not in session.engine.info.capabilities:
        raise CheckSkippedError(why)


async def greedy_request(session: EngineSession) -> str:
    """A greedy answer to a text prompt has exactly max_tokens tokens."""
    prompt = session.tokenizer.encode_now(TEXT)
    begin = time.perf_counter()
    observed = await session.run(prompt, 16)
    _need_whole(observed, 16)
    limit = session.engine.info.vocab_size
    need(all(0 <= token < limit for token in observed.token_ids), f"a token id is not below {limit}")
    text = session.tokenizer.decode(observed.token_ids)
    return f"{time.perf_counter() - begin:.2f} s: {text!r}"


async def streaming_text(session: EngineSession) -> str:
    """The deltas of a stream add up to the text of all its tokens, and they arrive in several steps."""
    observed = await session.run(session.tokenizer.encode_now(TEXT), 32, Sampling(temperature=1.0, seed=1))
    _need_whole(observed, 32)
    detokenizer = IncrementalDetokenizer(session.tokenizer)
    deltas = [detokenizer.push(chunk) for chunk in observed.chunks]
    joined = "".join(deltas) + detokenizer.flush()
    whole = session.tokenizer.decode(observed.token_ids)
    need(joined == whole, f"the deltas give {joined!r}, the tokens {whole!r}")
    need(len(observed.chunks) > 1, "all tokens came at once: nothing was streamed")
    return f"{len(observed.token_ids)} tokens in {len(observed.chunks)} steps"


async def stop_token(session: EngineSession) -> str:
    """A stop token ends the sequence, is emitted, and is its last token."""
    prompt = session.tokenizer.encode_now(TEXT)
    tokens = (await session.run(prompt, 16)).token_ids
    stop = tokens[len(tokens) // 2]
    observed = await session.run(prompt, 64, stop_token_ids=frozenset({stop}))
    assert observed.end is not None
    found = observed.token_ids
    need(stop in found, f"token {stop} was not generated again (is the engine greedy?): {observed.end}")
    need(observed.end.reason is SequenceFinishReason.STOP, f"it ended with {observed.end.reason.value}")
    need(found.index(stop) == len(found) - 1, "there are tokens after the stop token")
    return f"stopped after {len(found)} tokens"


async def cancellation(session: EngineSession) -> str:
    """A cancelled sequence ends soon with the reason `cancelled`, and its blocks are free again."""
    info = session.engine.info
    prompt = session.prompt_of(4 * info.block_size, seed=1)
    max_tokens = info.max_model_len - len(prompt)
    observed = session.submit(prompt, max_tokens)
    await session.until(lambda: len(observed.chunks) >= 2, "a second token")
    begin = time.perf_counter()
    session.engine.cancel(observed.request.request_id)
    await session.until(lambda: observed.end is not None, "the end of a cancelled sequence", 30)
    assert observed.end is not None
    need(observed.end.reason is SequenceFinishReason.CANCELLED, f"it ended with {observed.end.reason.value}")
    load = session.load
    need(load.num_running == load.num_waiting == 0, f"{load.num_running} sequences still run")
    need(
        load.num_available_blocks == info.num_blocks,
        f"only {load.num_available_blocks} of {info.num_blocks} blocks are free",
    )
    return f"ended after {(time.perf_counter() - begin) * 1e3:.0f} ms"


async def prefix_reuse(session: EngineSession) -> str:
    """A repeated prompt is found in the cache, but only by its own tenant."""
    need_capability(session, Capability.PREFIX_CACHING, "prefix caching is off")
    mine, other = _roots(session)
    prompt = session.prompt_of(6 * session.engine.info.block_size + 3, seed=2)
    await session.run(prompt, 4, root_hash=mine)
    again = await session.run(prompt, 4, root_hash=mine)
    need(again.num_cached_tokens > 0, "the second run reused nothing")
    foreign = await session.run(prompt, 4, root_hash=other)
    need(foreign.num_cached_tokens == 0, f"another tenant reused {foreign.num_cached_tokens} tokens")
    return f"{again.num_cached_tokens} of {len(prompt)} tokens reused; none by another tenant"


async def kv_events(session: EngineSession) -> str:
    """KV events arrive and have the same block hashes that a router computes."""
    need_capability(session, Capability.PREFIX_CACHING, "prefix caching is off")
    mine, _ = _roots(session)
    size = session.engine.info.block_size
    prompt = session.prompt_of(6 * size + 3, seed=3)
    await session.run(prompt, 4, root_hash=mine)
    wanted = set(block_hashes(prompt, size, mine))
    try:
        reached = lambda: wanted <= session.cached_hashes  # noqa: E731
        await session.until(reached, "the events of a prompt's blocks", session.kv_event_seconds)
    except TimeoutError:
        found = len(wanted & session.cached_hashes)
        message = f"{found} of {len(wanted)} blocks match those of a router; {session.num_kv_events} events arrived"
        raise CheckFailedError(message) from None
    return f"{len(wanted)} of {len(wanted)} blocks match"


async def load_figures(session: EngineSession) -> str:
    """Free blocks and speeds are reported, because placement needs them."""
    load, info = session.load, session.engine.info
    need(0 <= load.num_available_blocks <= info.num_blocks, f"{load.num_available_blocks} blocks are free?")
    need(load.decode_step_seconds > 0, "the time of a decode step is not known after several requests")
    return (
        f"decode step {load.decode_step_seconds * 1e3:.1f} ms, prefill {load.prefill_tokens_per_second:.0f} tokens/s, "
        f"{info.num_blocks} blocks of {info.block_size}"
    )


async def logprobs(session: EngineSession) -> str:
    """There is one entry per token, the likeliest first, and greedy decoding picks the likeliest."""
    need_capability(session, Capability.LOGPROBS, "the engine has none")
    observed = await session.run(session.prompt_of(20, seed=4), 8, Sampling(temperature=0.0, num_logprobs=3))
    need(len(observed.logprobs) == 8, f"{len(observed.logprobs)} entries for 8 tokens")
    for token_id, entry in zip(observed.token_ids, observed.logprobs, strict=True):
        values = [logprob for _, logprob in entry.top]
        need(len(values) == 3 and values == sorted(values, reverse=True), f"odd alternatives: {values}")
        need(entry.logprob <= 0, f"a logprob above 0: {entry.logprob}")
        need(
            entry.logprob >= values[0] - 1e-3,
            f"greedy picked {token_id} at {entry.logprob:.3f}, the likeliest has {values[0]:.3f}",
        )
    return "8 entries of 3"


async def sampled_logprobs(session: EngineSession) -> str:
    """Sampled sequences have logprobs beside others without, each token its own; an engine that gives none refuses
    them, and continues to work."""
    sampling = Sampling(temperature=1.0, seed=11, num_logprobs=2)
    if Capability.LOGPROBS not in session.engine.info.capabilities:
        try:
            session.submit(session.prompt_of(20, seed=12), 4, sampling)
        except EngineError as error:
            _need_whole(await session.run(session.prompt_of(20, seed=13), 4), 4)
            return f"refused: {error}"
        raise CheckFailedError("logprobs are not offered, and a request for them was accepted")
    observed = [
        session.submit(session.prompt_of(20, seed=20 + number), 8, sampling if number % 2 else GREEDY)
        for number in range(8)
    ]
    await session.until(lambda: all(each.end is not None for each in observed), "8 ends")
    for number, each in enumerate(observed):
        _need_whole(each, 8)
        need(len(each.logprobs) == (8 if number % 2 else 0), f"{len(each.logprobs)} entries for 8 tokens")
        need(all(entry.logprob <= 0 for entry in each.logprobs), "a logprob above 0")
    return "4 sequences with, 4 without"


async def queued_cancellation(session: EngineSession) -> str:
    """A sequence that is cancelled while it waits for a place in the batch ends at once, and those that run go on."""
    info = session.engine.info
    num_tokens = min(256, info.max_model_len - 20)
    running = [session.submit(session.prompt_of(10, seed=200 + number), num_tokens) for number in range(info.max_batch)]
    try:
        waiting = session.submit(session.prompt_of(10, seed=199), 4)
        begin = time.perf_counter()
        session.engine.cancel(waiting.request.request_id)
        await session.until(
            lambda: waiting.end is not None, "the end of a cancelled sequence that waits", QUEUE_SECONDS
        )
        seconds = time.perf_counter() - begin
    finally:
        for each in running:
            session.engine.cancel(each.request.request_id)
    await session.until(lambda: all(each.end is not None for each in running), "the ends of those that ran")
    assert waiting.end is not None
    need(waiting.end.reason is SequenceFinishReason.CANCELLED, f"it ended with {waiting.end.reason.value}")
    return f"ended after {seconds * 1e3:.0f} ms, behind {info.max_batch} others"


async def handoff(session: EngineSession) -> str:
    """A prompt that is computed for another shard ends with a hand-off, and the engine continues to work."""
    need_capability(session, Capability.KV_HANDOFF, "the engine hands no KV over")
    prompt = session.prompt_of(4 * session.engine.info.block_size, seed=14)
    try:
        leg = await session.run(prompt, 1, prefill_only=True)
    except EngineError as error:
        if session.is_reading:  # it refuses, and lives
            raise CheckSkippedError(str(error)) from error
        raise
    assert leg.end is not None
    need(bool(leg.end.handoff), f"there is no hand-off: {leg.end.reason.value} {leg.end.error}".rstrip())
    fetched = await session.run(prompt, 4, handoff=leg.end.handoff)
    assert fetched.end is not None
    _need_whole(await session.run(session.prompt_of(20, seed=15), 4), 4)
    is_fetched = fetched.end.reason is SequenceFinishReason.LENGTH
    by_itself = "fetched by the engine itself" if is_fetched else f"not fetched by itself ({fetched.end.error})"
    return f"{len(leg.end.handoff)} bytes, {by_itself}"


async def unknown_adapter(session: EngineSession) -> str:
    """An adapter that does not exist is refused, by name and by directory, and the engine continues to work."""
    need_capability(session, Capability.ADAPTERS, "the engine has no adapters")
    adapters = adapters_of(session.engine)
    need(adapters is not None, "it offers adapters, and takes none")
    assert adapters is not None
    refusal = ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            state = await adapters.add("doctor", f"{folder}/none", load_now=True)
        except AdapterError as error:
            refusal = str(error)
            need(adapters.find("doctor") is None, "it was refused, and is there")
        else:
            await adapters.remove("doctor")
            need(not state.info.rank, "a directory that does not exist was taken for an adapter")
    try:
        observed = await session.run(session.prompt_of(20, seed=16), 4, adapter="doctor")
    except EngineError as error:
        if not session.is_reading:
            raise
        refusal = refusal or str(error)
    else:
        assert observed.end is not None
        need(observed.end.reason is SequenceFinishReason.ERROR, "an adapter that does not exist was used")
    _need_whole(await session.run(session.prompt_of(20, seed=17), 4), 4)
    return f"refused: {refusal}" if refusal else "refused by name; adapters have no files here"


async def penalties(session: EngineSession) -> str:
    """Penalties change the answer. Some samplers ignore them."""
    need_capability(session, Capability.PENALTIES, "the engine does not offer them")
    prompt = session.prompt_of(8, seed=5)
    plain = await session.run(prompt, 64)
    penalised = await session.run(prompt, 64, Sampling(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0))
    repeats = len(plain.token_ids) - len(set(plain.token_ids))
    if not repeats:
        raise CheckSkippedError("the answer repeats nothing that could be penalised")
    need(plain.token_ids != penalised.token_ids, "the strongest penalties change nothing: they are ignored")
    return f"{repeats} repeated tokens without, {64 - len(set(penalised.token_ids))} with"


async def guides(session: EngineSession) -> str:
    """A guided answer obeys its guide."""
    need_capability(session, Capability.GUIDED, "no guided decoding here")
    choices = ["yes", "no"]
    observed = await session.run(
        session.tokenizer.encode_now("Is water wet? "),
        8,
        guide=Guide(GuideKind.CHOICE, json.dumps(choices)),
        stop_token_ids=session.engine.info.eos_token_ids,
    )
    text = session.tokenizer.decode(observed.token_ids)
    need(text in choices, f"asked for yes or no, got {text!r}")
    return repr(text)


async def resumption(session: EngineSession) -> str:
    """A sequence continues after the tokens that another shard has delivered."""
    prompt = session.prompt_of(20, seed=6)
    sampling = Sampling(temperature=1.0, seed=7)
    whole = (await session.run(prompt, 16, sampling)).token_ids
    rest = (await session.run(prompt, 16, sampling, output_token_ids=whole[:6])).token_ids
    need(len(rest) == 10, f"10 tokens were left, but {len(rest)} arrived")
    same = whole[:6] + rest == whole
    if Capability.SEEDED_RESUME in session.engine.info.capabilities:
        need(same, "the engine promises an identical continuation, but it differs")
    return "identically" if same else "not identically, which is not promised"


async def refusal(session: EngineSession) -> str:
    """A request that can never run is rejected at once, and the engine continues to work."""
    info = session.engine.info
    try:
        session.submit(session.prompt_of(info.max_model_len, seed=8), 8)
    except EngineError as error:
        observed = await session.run(session.prompt_of(8, seed=9), 4)
        _need_whole(observed, 4)
        return str(error)
    raise CheckFailedError(f"a prompt of {info.max_model_len} tokens with 8 to come was accepted")


async def concurrency(session: EngineSession) -> str:
    """Many concurrent sequences of different lengths lose and repeat no token."""
    wanted = [8 + 5 * number % 25 for number in range(CONCURRENT)]
    begin = time.perf_counter()
    observed = [
        session.submit(session.prompt_of(10 + 13 * number % 90, seed=100 + number), count)
        for number, count in enumerate(wanted)
    ]
    await session.until(lambda: all(each.end is not None for each in observed), f"{CONCURRENT} ends")
    seconds = time.perf_counter() - begin
    for each, count in zip(observed, wanted, strict=True):
        _need_whole(each, count)
    return f"{CONCURRENT} sequences, {sum(wanted) / seconds:.0f} tokens/s"


async def embeddings(session: EngineSession) -> str:
    """An embedding has the announced size and the length 1, unless it is a cross-encoder's number, and is the same
    again beside others."""
    need_capability(session, Capability.EMBED, "the engine gives no embeddings")
    size, prompt = session.engine.info.embedding_size, session.tokenizer.encode_now(TEXT, add_special_tokens=True)
    alone = _vector(await session.run(prompt, 0, pooling=Pooling()))
    need(len(alone) == size, f"the vector has {len(alone)} numbers instead of {size}")
    if Capability.CROSS_ENCODE not in session.engine.info.capabilities:
        length = math.hypot(*alone)
        need(math.isclose(length, 1.0, rel_tol=1e-3), f"the vector has the length {length}")
    others = [session.submit(session.prompt_of(20, seed), 0, pooling=Pooling()) for seed in range(8)]
    beside = _vector(await session.run(prompt, 0, pooling=Pooling()))
    await session.until(lambda: all(other.end is not None for other in others), "the end of the other embeddings")
    difference = math.dist(alone, beside) / max(1.0, math.hypot(*alone))
    need(difference < MAX_DIFFERENCE, f"beside others it is another vector: the distance is {difference:.2g}")
    return f"{size} dimensions"


def _vector(observed: Observed) -> Sequence[float]:
    assert observed.end is not None
    found = observed.end.embedding
    need(bool(found), f"there is no vector: it ended by {observed.end.reason.value} {observed.end.error}".rstrip())
    return struct.unpack(f"<{len(found) // 4}f", found)


def checks_of(info: EngineInfo) -> Sequence[tuple[str, Check]]:
    """Those that apply to an engine that only gives embeddings, or to one that generates."""
    if Capability.EMBED in info.capabilities and Capability.GENERATE not in info.capabilities:
        return (EMBEDDINGS,)
    return (*CHECKS, EMBEDDINGS)


EMBEDDINGS: Final[tuple[str, Check]] = ("embeddings", embeddings)
CHECKS: Final[Sequence[tuple[str, Check]]] = (
    ("greedy request", greedy_request),
    ("streaming", streaming_text),
    ("stop token", stop_token),
    ("cancel", cancellation),
    ("cancel in the queue", queued_cancellation),
    ("prefix reuse", prefix_reuse),
    ("KV events", kv_events),
    ("load", load_figures),
    ("logprobs", logprobs),
    ("sampled logprobs", sampled_logprobs),
    ("penalties", penalties),
    ("guided decoding", guides),
    ("resumption", resumption),
    ("refusal", refusal),
    ("hand-off", handoff),
    ("unknown adapter", unknown_adapter),
    (f"{CONCURRENT} at once", concurrency),
)


def _need_whole(observed: Observed, max_tokens: int) -> None:
    assert observed.end is not None
    need(
        observed.end.reason is SequenceFinishReason.LENGTH and len(observed.token_ids) == max_tokens,
        f"{max_tokens} tokens were asked for; {len(observed.token_ids)} arrived, ended by {observed.end.reason.value} "
        f"{observed.end.error}".rstrip(),
    )


def _roots(session: EngineSession) -> tuple[int, int]:
    model = session.engine.info.model
    return root_hash(model, cache_salt="doctor"), root_hash(model, cache_salt="another tenant")
