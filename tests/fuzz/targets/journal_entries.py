"""What stands in the journal of an edge that has died, of a fabric with a secret and of one without.

A foreign entry is ignored and reported; what it held is then missing, which is noticed. With a secret, nothing is
accepted but what this fabric has encrypted for that very key.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from hypothesis import strategies as st

from edge_http.recovery.journal import ResumeJournal
from edge_http.resume.records import (
    AnswerState,
    AttemptRecord,
    ChoiceProgressDelta,
    ProgressDelta,
    RequestsRecord,
    ResponseRecord,
    encode,
)
from kvloom.v1.generation_pb2 import SequenceFinish, SequenceStart
from kvloom.v1.router_service_pb2 import GenerateRequest, Submit
from kvloom_common.trust.seal import PLAIN
from kvloom_common.trust.sealing import SecretSealer
from tests.fakes.redis_server import redis_server
from tests.fuzz.byte_edits import EDITS, PIECES, edited
from tests.fuzz.log_watch import LogWatch
from tests.fuzz.target import Check, Target, bytes_of, text_of
from tests.fuzz.targets.registry_records import OTHER_SECRET, SECRET

PREFIX: Final = "fuzz"
TAG: Final = "edge"
ID: Final = "chatcmpl-edge-1"
JOURNAL_KEY: Final = f"{PREFIX}:edge:{TAG}:events"
RESPONSE_KEY: Final = f"{PREFIX}:edge:{TAG}:response:{ID}"
NUM_CHOICES: Final = 2

DELTA: Final = ProgressDelta(
    1,
    0,
    [(1, b'"a"')],
    [ChoiceProgressDelta(0, 0, array("I", [5, 6]).tobytes(), 2)],
    [(0, SequenceStart(slot=1).SerializeToString())],
    [(0, SequenceFinish(slot=1).SerializeToString())],
    [(0, [AttemptRecord("link", 0, None)])],
    False,
)
RESPONSE: Final = ResponseRecord(
    *(1, "chat", ID, 1, "tiny", "fp", False, False, False, {}, NUM_CHOICES, [3], b"caller", "", "", "")
)
SUBMIT: Final = Submit(prompt_token_ids=[1], prompt_text="p", request=GenerateRequest(request_id="r", model="tiny"))
REQUESTS: Final = RequestsRecord(2e9, [SUBMIT.SerializeToString()])
RECORDS: Final = {"entry": encode([DELTA]), "e": encode(RESPONSE), "r": encode(REQUESTS), "p": encode(DELTA)}

INTEGERS = st.integers(-2, 5) | st.sampled_from([2**31, 2**63, -(2**63)])
VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.binary(max_size=6).map(text_of) | st.floats(),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)
INPUTS = st.fixed_dictionaries(
    {
        "sealed": st.booleans(),
        "record": st.sampled_from(list(RECORDS)),
        "sealed_by": st.sampled_from(["own", "own", "other secret", "other key", "none"]),
        "changes": st.lists(
            st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=4), VALUES).map(list), max_size=3
        ),
        "edits_inside": EDITS,
        "edits": EDITS,
        "raw": st.none() | PIECES | st.just("\xdd\xff\xff\xff\xff" * 3) | st.just("\x91" * 100_000),
        "field": st.sampled_from(["e", "e", "e", "other"]),
    }
)


def stored_value(value: Any, sealer: Any, key: str) -> tuple[bytes, bool]:
    """(what stands in Redis, whether it is exactly what the fabric has sealed for that key)."""
    content = msgspec.msgpack.decode(RECORDS[value["record"]])
    for path, replacement in value["changes"]:
        _replace(content, path, replacement)
    inside = edited(msgspec.msgpack.encode(content), value["edits_inside"])
    sealers = {"own": sealer, "other secret": SecretSealer(OTHER_SECRET), "other key": sealer, "none": PLAIN}
    stored_under = "another key" if value["sealed_by"] == "other key" else key
    authentic = sealers[value["sealed_by"]].encrypt(stored_under, inside)
    raw = edited(authentic if value["raw"] is None else bytes_of(value["raw"]), value["edits"])
    return raw, value["sealed_by"] == "own" and raw == authentic


def _replace(content: Any, path: list[int], value: Any) -> None:
    """Bytes stand in inputs as strings."""
    replacement = bytes_of(value) if isinstance(value, str) else value
    for step in path[:-1]:
        inner = content[step % len(content)] if content else None
        if not isinstance(inner, list) or not inner:
            break
        content = inner
    if content:
        content[path[-1] % len(content)] = replacement


@contextlib.asynccontextmanager
async def open_journal(watch: LogWatch) -> AsyncIterator[Check]:
    with redis_server() as redis:
        sealer = SecretSealer(SECRET)
        sealed = ResumeJournal(redis.connection_url, PREFIX, sealer)
        plain = ResumeJournal(redis.connection_url, PREFIX)

        async def check(value: Any) -> None:
            journal, own = (sealed, sealer) if value["sealed"] else (plain, PLAIN)
            await journal.redis.flushall()
            if value["record"] == "entry":
                await check_entry(journal, own, value)
            else:
                await check_response(journal, own, value)
            assert len(watch.events) <= 1, watch.events

        try:
            yield check
        finally:
            await sealed.close()
            await plain.close()


async def check_entry(journal: ResumeJournal, sealer: Any, value: Any) -> None:
    raw, is_authentic = stored_value(value, sealer, JOURNAL_KEY)
    await journal.redis.xadd(JOURNAL_KEY, {value["field"]: raw})
    await journal.redis.xadd(JOURNAL_KEY, {"e": sealer.encrypt(JOURNAL_KEY, RECORDS["entry"])})
    deltas, _ = await journal.read(TAG, "")
    assert deltas[-1] == DELTA, "a good entry behind a bad one is read"
    if value["sealed"] and not is_authentic:
        assert len(deltas) == 1, "an entry was accepted that the fabric has not encrypted"
    AnswerState(NUM_CHOICES, 1).apply_all(None, deltas)


async def check_response(journal: ResumeJournal, sealer: Any, value: Any) -> None:
    for name, content in RECORDS.items():
        raw, is_authentic = sealer.encrypt(f"{RESPONSE_KEY} {name}", content), True
        if name == value["record"]:
            raw, is_authentic = stored_value(value, sealer, f"{RESPONSE_KEY} {name}")
            accepts = is_authentic
        if name != "entry":
            await journal.redis.hset(RESPONSE_KEY, name, raw)
    row = await journal.read_response(TAG, ID)
    if value["sealed"] and not accepts:
        assert row is None, "a response was accepted that the fabric has not encrypted"
    if row is not None:
        AnswerState(row.response.n, len(row.response.prompt_sizes)).apply_all(row.snapshot, [])


TARGET = Target("journal_entries", INPUTS, open_journal, suite_examples=80)
