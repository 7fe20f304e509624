"""What stands in the registry in Redis, of a fabric with a secret and of one without.

A foreign value is ignored and reported once, never raises, and never stands in the way of the others. With a secret,
nothing is accepted but what this fabric has signed for that very key.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from hypothesis import strategies as st

from kvloom_common.discovery.records import ShardRecord
from kvloom_common.discovery.registry import ShardRegistry
from kvloom_common.trust.seal import PLAIN
from kvloom_common.trust.sealing import SecretSealer
from kvloom_common.trust.secret import FabricSecret
from tests.fakes.redis_server import redis_server
from tests.fuzz.byte_edits import EDITS, PIECES, edited
from tests.fuzz.log_watch import LogWatch
from tests.fuzz.target import Check, Target, bytes_of

PREFIX: Final = "fuzz"
IDS: Final = f"{PREFIX}:shard_ids"
OWN: Final = ShardRecord("own", "127.0.0.1:1", "tiny", "1", "here")
RECORD: Final = ShardRecord("shard-0", "127.0.0.1:2", "tiny", "2", "there")
SECRET: Final = FabricSecret(b"i" * 32, (b"s" * 32,))
OTHER_SECRET: Final = FabricSecret(b"i" * 32, (b"o" * 32,))
OTHER_FABRIC: Final = FabricSecret(b"o" * 32, (b"s" * 32,))

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "shard_id": JSON,
        "address": JSON,
        "model": JSON,
        "incarnation_id": JSON,
        "owner": JSON,
        "record": JSON,
        "fabric": JSON,
        "key": JSON,
        "mac": JSON | st.text(st.characters(min_codepoint=128), max_size=4),
    },
)
"""Of a record, and of the signed envelope around it."""
INPUTS = st.fixed_dictionaries(
    {
        "sealed": st.booleans(),
        "signed_with": st.sampled_from(["own", "other secret", "other fabric", "none"]),
        "stored_under": st.sampled_from([f"{PREFIX}:shard:shard-0", f"{PREFIX}:shard:shard-1"]),
        "record": FIELDS | st.just({}),
        "envelope": FIELDS | st.just({}),
        "edits": EDITS,
        "raw": st.none() | PIECES | st.sampled_from(["[" * 100_000, '{"record":' * 50_000]),
        "type": st.sampled_from(["string"] * 6 + ["list", "hash", "set"]),
        "member": st.none() | st.binary(max_size=6).map(lambda raw: raw.decode("latin-1")),
    }
)


def stored_value(value: Any) -> tuple[bytes, bytes | None]:
    """(what stands in Redis, the record that it authentically is or is made from)."""
    signers = {"own": SECRET, "other secret": OTHER_SECRET, "other fabric": OTHER_FABRIC}
    signer = SecretSealer(signers[value["signed_with"]]) if value["signed_with"] in signers else PLAIN
    content = msgspec.json.encode(msgspec.to_builtins(RECORD) | value["record"])
    raw = signer.sign(value["stored_under"], content)
    if value["envelope"]:
        raw = msgspec.json.encode(msgspec.json.decode(raw) | value["envelope"])
    raw = edited(raw if value["raw"] is None else bytes_of(value["raw"]), value["edits"])
    is_own = value["signed_with"] == "own" and value["stored_under"].endswith("shard-0")
    return raw, content if is_own else None


@contextlib.asynccontextmanager
async def open_registry(watch: LogWatch) -> AsyncIterator[Check]:
    with redis_server() as redis:

        async def check(value: Any) -> None:
            # A new one each time: a registry remembers what it has reported.
            registry = ShardRegistry(redis.connection_url, PREFIX, SecretSealer(SECRET) if value["sealed"] else None)
            try:
                await check_registry(registry, value)
            finally:
                await registry.close()

        async def check_registry(registry: ShardRegistry, value: Any) -> None:
            client = registry._redis
            await client.flushall()
            await registry.announce(OWN)
            raw, signed = stored_value(value)
            await _store(client, raw, value["type"])
            await client.sadd(IDS, "shard-0")
            if value["member"]:
                await client.sadd(IDS, bytes_of(value["member"]))
            watch.clear()
            found = await registry.list_shards()
            again = await registry.list_shards()
            assert found.pop("own") == OWN
            assert again.pop("own") == OWN
            assert found == again
            if value["sealed"] and found:
                assert signed is not None, "a record was accepted that the fabric has not signed"
                assert found["shard-0"] == msgspec.json.decode(signed, type=ShardRecord)
            num_reports = sum(event["event"] == "registry_record_ignored" for event in watch.events)
            assert num_reports == (0 if found or value["type"] != "string" else 1), watch.events
            with contextlib.suppress(Exception):
                await registry.withdraw("shard-0", "another")

        yield check


async def _store(client: Any, raw: bytes, kind: str) -> None:
    name = f"{PREFIX}:shard:shard-0"
    match kind:
        case "list":
            await client.rpush(name, raw)
        case "hash":
            await client.hset(name, "f", raw)
        case "set":
            await client.sadd(name, raw)
        case _:
            await client.set(name, raw)


TARGET = Target("registry_records", INPUTS, open_registry, suite_examples=60)
