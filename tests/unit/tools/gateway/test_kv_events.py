"""KV events of vLLM and SGLang: both encodings, and what of them counts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvloom_common.text.block_hash import block_hashes, root_hash
from router.core.events import KvChange
from tools.gateway.kv_events import KvTranslator, batch_in, prefix_salt

TOKENS = list(range(100, 164))


def expected(adapter: str = "", salt: str = "") -> list[int]:
    """The hashes of a prompt that begins with TOKENS."""
    return block_hashes(TOKENS, 16, root_hash("", "", prefix_salt(adapter, salt)))


def stored(first: int, last: int, parent: object = None, **fields: Any) -> dict[str, Any]:
    """A vLLM event for those of the blocks of TOKENS."""
    tokens = TOKENS[first * 16 : last * 16]
    blocks = [f"engine-{number}".encode() for number in range(first, last)]
    event = {"type": "BlockStored", "block_hashes": blocks, "token_ids": tokens, "block_size": 16, **fields}
    return event if parent is None else {**event, "parent_block_hash": parent}


def changes(*events: object, translator: KvTranslator | None = None, as_array: bool = False) -> list[KvChange]:
    payload = msgspec.msgpack.encode([12.5, events, 0] if as_array else {"ts": 12.5, "events": events})
    batch = batch_in(payload)
    assert batch.at == 12.5
    return (translator or KvTranslator(16, 1000)).changes(batch)


def test_maps_and_arrays_say_the_same() -> None:
    """vLLM's newest source sends maps without defaults; SGLang and older vLLM send arrays."""
    maps = changes(stored(0, 2), stored(2, 4, b"engine-1"), {"type": "BlockRemoved", "block_hashes": [b"engine-3"]})
    arrays = changes(
        ["BlockStored", [71, 72], None, TOKENS[:32], 16, None, "GPU", None],
        ["BlockStored", [73, 74], 72, TOKENS[32:], 16, None],
        ["BlockRemoved", [74], "GPU"],
        as_array=True,
    )
    assert maps == arrays
    assert [one.stored for one in maps] == [expected()[:2], expected()[2:], ()]
    assert maps[2].removed == [expected()[3]]


def test_adapters_and_salts_keep_prefixes_apart() -> None:
    """The same tokens with another adapter or for another tenant are another KV."""
    assert changes(stored(0, 4, lora_name="poet", extra_keys=[["poet"]] * 4))[0].stored == expected("poet")
    assert changes(stored(0, 4, extra_keys=[["salt"], None, None, None]))[0].stored == expected("", "salt")
    both = changes(stored(0, 4, lora_name="poet", extra_keys=[["poet", "salt"], ["poet"], ["poet"], ["poet"]]))
    assert both[0].stored == expected("poet", "salt")


def test_images_match_no_prompt_of_text() -> None:
    """Their tokens are placeholders, the same for every image: a prompt must not be taken to be cached by them."""
    image = ["5f3a", 3]
    assert changes(stored(0, 4, extra_keys=[None, None, [image], None]))[0].stored[:2] == expected()[:2]
    assert not set(changes(stored(0, 4, extra_keys=[None, None, [image], None]))[0].stored[2:]) & set(expected())
    assert not set(changes(stored(0, 4, extra_keys=[[image], None, None, None]))[0].stored) & set(expected())


def test_what_is_not_on_the_gpu_or_has_no_known_beginning_does_not_count() -> None:
    """Offloaded blocks, other kinds of attention, another block size, and the rest of a prompt whose beginning was
    missed."""
    nothing = [
        stored(0, 1, medium="CPU"),
        stored(0, 1, group_idx=1),
        stored(0, 1, block_size=32),
        stored(2, 3, b"unknown"),
        {"type": "BlockRemoved", "block_hashes": [b"unknown"]},
        {"type": "SomethingNew"},
    ]
    assert not [one for one in changes(*nothing) if one.stored or one.removed or one.cleared]


def test_a_cleared_cache_is_empty() -> None:
    """What comes after it has a beginning of its own."""
    found = changes(stored(0, 2), {"type": "AllBlocksCleared"}, stored(2, 4, b"engine-1"), stored(0, 1))
    assert [(len(one.stored), one.cleared) for one in found] == [(2, False), (0, True), (0, False), (1, False)]


def test_an_engine_that_never_removes_is_bounded() -> None:
    """Knowing less is safe; growing without bound is not."""
    assert [
        len(one.stored) for one in changes(stored(0, 2), stored(2, 4, b"engine-1"), translator=KvTranslator(16, 3))
    ] == [
        2,
        0,
    ]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode("text"),
        msgspec.msgpack.encode({"ts": 1.0}),
        msgspec.msgpack.encode(["now", []]),
        msgspec.msgpack.encode([1.0, [["BlockStored", 5]]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, ["x"] * 16, 16]]]),
        msgspec.msgpack.encode({"ts": 1.0, "events": [{"type": "BlockRemoved", "block_hashes": 1}]}),
        msgspec.msgpack.encode({"ts": 1.0, "events": [5]}),
    ],
)
def test_a_malformed_batch_is_a_value_error(payload: bytes) -> None:
    """Whatever an engine sends, the picker goes on without its events."""
    with pytest.raises(ValueError, match="KV event"):
        KvTranslator(16, 1000).changes(batch_in(payload))
