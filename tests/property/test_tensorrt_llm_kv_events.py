"""Whatever the fake engine's cache does, a router that hears the translated events knows what is cached."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom_common.text.block_hash import block_hashes
from shard_server.engines.base import AllBlocksCleared, BlockRemoved, BlockStored
from shard_server.engines.tensorrt_llm.kv_cache.kv_events import KvEventTranslator
from shard_server.engines.tensorrt_llm.kv_cache.kv_records import parse_events
from shard_server.engines.tensorrt_llm.kv_cache.kv_roots import RootLedger
from tests.examples import num_examples
from tests.fakes.fake_tensorrt_llm.blocks import BlockCache, EventBuffer

SIZE = 2
NUM_BLOCKS = 8


class Tenant:
    """One engine request: it references blocks until it is released."""

    def __init__(self, root: int, tokens: list[int], referenced: list[int], num_blocks: int) -> None:
        self.root, self.tokens, self.referenced, self.num_blocks = root, tokens, referenced, num_blocks


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 2), st.lists(st.integers(0, 2), min_size=1, max_size=9)),
        st.tuples(st.just("finish"), st.integers(0, 3), st.just([])),
    ),
    max_size=30,
)


@settings(max_examples=num_examples(150), deadline=None)
@given(
    actions=actions,
    tells_salts=st.booleans(),
    windows=st.sampled_from([(4096,), (4096, 512)]),
    hexadecimal=st.booleans(),
)
def test_the_translated_events_are_what_is_cached(
    actions: list[tuple[str, int, list[int]]], tells_salts: bool, windows: tuple[int, ...], hexadecimal: bool
) -> None:
    """With salts told: exactly. Without: of every tenant as many blocks of the same tokens as there are."""
    events = EventBuffer(10_000, windows, None, hexadecimal=hexadecimal)
    cache = BlockCache(NUM_BLOCKS, SIZE, events, reuse=True, tells_salts=tells_salts)
    roots = RootLedger(SIZE, 100_000)
    translator = KvEventTranslator(SIZE, NUM_BLOCKS, roots)
    heard: set[int] = set()
    stored: dict[int, int] = {}
    running: list[Tenant] = []
    for kind, number, tokens in actions:
        if kind == "submit":
            num_blocks = -(-len(tokens) // SIZE)
            referenced = cache.admit(tokens, f"{number:016x}", num_blocks)
            if referenced is None:
                continue
            roots.remember(tokens, number)
            tenant = Tenant(number, tokens, referenced, num_blocks)
            cache.store(tokens, f"{number:016x}", tenant.referenced, last=False)
            running.append(tenant)
            salt_hashes = block_hashes(tokens, SIZE, number)
            stored.update(zip(cache.identities(tokens, f"{number:016x}"), salt_hashes, strict=False))
        elif number < len(running):
            tenant = running.pop(number)
            cache.store(tenant.tokens, f"{tenant.root:016x}", tenant.referenced, last=True)
            cache.release(tenant.referenced, tenant.num_blocks)
        for event in translator.translate(parse_events(events.drain())):
            match event:
                case BlockStored(hashes):
                    assert heard.isdisjoint(hashes)
                    heard.update(hashes)
                case BlockRemoved(hashes):
                    assert heard.issuperset(hashes)
                    heard.difference_update(hashes)
                case AllBlocksCleared():
                    raise AssertionError("nothing was lost")
        truly = {stored[identity] for identity in cache._cached if identity in stored}
        if tells_salts:
            assert heard == truly
        else:
            assert len(heard) <= len(truly)
