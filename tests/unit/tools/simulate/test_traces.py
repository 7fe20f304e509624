"""Trace files become workloads: how they are read, which are rejected, and when calls arrive."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tools.failures import CommandError
from tools.simulate.traces import HashRuns, Trace, guess_format, read_trace
from tools.simulate.workload import Call

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
    {"timestamp": 0, "input_length": 1024, "output_length": 0, "hash_ids": [7, 10]},
    {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [11]},
    {"timestamp": 3000, "input_length": 100, "output_length": 2, "hash_ids": [12]},
    {"timestamp": 3000, "input_length": 2048, "output_length": 2, "hash_ids": [7, 8]},
]


def write_lines(path: Path, lines: list[Any]) -> Path:
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def arrivals(trace: Trace, load: float, seed: int = 0) -> list[tuple[float, Call]]:
    return list(trace.workload(load, seed).first_calls())


def session(requests: list[Any], **fields: Any) -> dict[str, Any]:
    return {"id": "x", "block_size": 64, "tool_tokens": 128, "system_tokens": 64, "requests": requests, **fields}


def turn(t: float, ids: list[int], think: float | None = None, **fields: Any) -> dict[str, Any]:
    request = {"t": t, "type": "n", "in": 64 * len(ids) + 1, "out": 3, "hash_ids": ids, **fields}
    return request if think is None else {**request, "think_time": think}


def play(trace: Trace, users: int, num_calls: int, seconds: float = 1.0) -> list[tuple[float, Call]]:
    """Play a workload as a fleet that answers every call in `seconds`."""
    workload = trace.workload(users, 0, num_calls)
    waiting = list(workload.first_calls())
    played: list[tuple[float, Call]] = []
    while waiting:
        waiting.sort(key=lambda entry: entry[0])
        at, call = waiting.pop(0)
        played.append((at, call))
        waiting += workload.next_calls(call, at + seconds)
    return played


def test_mooncake_blocks_are_alike_where_their_ids_are(tmp_path: Path):
    """Equal id = reusable KV; a partly filled last block cannot be reused; blocks without an id are like no other."""
    trace = read_trace(write_lines(tmp_path / "t.jsonl", MOONCAKE), "mooncake")
    calls = {call.call_id: call for _, call in arrivals(trace, 1)}
    hashes = {call_id: list(call.block_hashes) for call_id, call in calls.items()}
    assert trace.block_size == 512
    assert [len(hashes[i]) for i in range(5)] == [2, 2, 1, 0, 4]
    assert hashes[0][0] == hashes[1][0] == hashes[4][0]
    assert hashes[4][1] == hashes[0][1] != hashes[1][1]
    assert len({block for found in hashes.values() for block in found}) == 2 + 1 + 1 + 2
    assert calls[1].num_output_tokens == 1


def test_arrivals_are_spread_over_the_tick_and_scaled_by_the_rate(tmp_path: Path):
    """Calls of one 3 s tick did not come in one instant: a burst like that would be the recording's, not the users'."""
    trace = read_trace(write_lines(tmp_path / "t.jsonl", MOONCAKE), "mooncake")
    slow, fast = arrivals(trace, 1), arrivals(trace, 2)
    assert [at for at, _ in slow] == sorted(at for at, _ in slow)
    assert all(0 <= at < 3 if call.call_id < 3 else 3 <= at < 6 for at, call in slow)
    assert len({at for at, _ in slow}) == 5
    assert [2 * at for at, _ in fast] == pytest.approx([at for at, _ in slow])
    assert slow == arrivals(trace, 1)
    assert slow != arrivals(trace, 1, seed=1)


def test_exact_timestamps_stay_as_they_are(tmp_path: Path):
    """Where no two calls share a time there is no tick to spread over."""
    lines = [{**MOONCAKE[3], "timestamp": 1000 + 700 * index} for index in range(5)]
    trace = read_trace(write_lines(tmp_path / "t.jsonl", lines), "mooncake")
    assert [at for at, _ in arrivals(trace, 1)] == pytest.approx([0, 0.7, 1.4, 2.1, 2.8])


def test_a_trace_can_be_cut(tmp_path: Path):
    """--max-requests: the first calls of the file."""
    trace = read_trace(write_lines(tmp_path / "t.jsonl.gz", MOONCAKE), "mooncake")
    workload = trace.workload(1, 0, 2)
    assert {call.call_id for _, call in workload.first_calls()} == {0, 1}
    assert workload.num_measured_calls == 2


def test_azure_calls_share_nothing(tmp_path: Path):
    """The trace tells lengths and times only; seven digits of a second's fraction must not be lost or refused."""
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:17:03.9799600,1024,10\r\n"
        "2023-11-16 18:17:04.0319600,1024,0\r\n"
        "2023-11-16 18:17:05,3,8"
    )
    trace = read_trace(path, "azure")
    found = arrivals(trace, 2)
    assert [at for at, _ in found] == pytest.approx([0, 0.026, 0.51002], abs=1e-5)
    assert [call.num_output_tokens for _, call in found] == [10, 1, 8]
    hashes = [block for _, call in found for block in call.block_hashes]
    assert len(hashes) == len(set(hashes)) == 4
    assert read_trace(path, "azure", block_size=256).block_size == 256


def test_weka_shares_tools_and_system_prompt_only(tmp_path: Path):
    """Ids are local to a session; those of the tools are alike for equally many tool tokens, those of the system prompt
    where both counts are alike."""
    ids = [1, 2, 3, 4]
    lines = [
        session([turn(0, ids)]),
        session([turn(0, ids)]),
        session([turn(0, ids)], system_tokens=128),
        session([turn(0, ids)], tool_tokens=64),
    ]
    trace = read_trace(write_lines(tmp_path / "t.jsonl", lines), "weka")
    calls = [call for _, call in play(trace, users=4, num_calls=4)]
    by_session = {call.session_key: list(call.block_hashes) for call in calls}
    first, second, other_system, other_tools = (by_session[f"{index}.0"] for index in range(4))
    assert first[:3] == second[:3]
    assert first[3] != second[3]
    assert first[:2] == other_system[:2]
    assert first[2] != other_system[2]
    assert not set(first) & set(other_tools)


def test_weka_calls_follow_their_think_time(tmp_path: Path):
    """Closed loop: a slow answer delays what the user asks next, and a user has one call open."""
    requests = [turn(0, [1]), turn(20, [1, 2], think=4.0), turn(30, [1, 2, 3], think=6.0, type="s", out=0)]
    trace = read_trace(write_lines(tmp_path / "t.jsonl", [session(requests)]), "weka")
    played = play(trace, users=1, num_calls=3, seconds=2.0)
    start = played[0][0]
    assert [at - start for at, _ in played[:3]] == pytest.approx([0, 2 + 4, 6 + 2 + 6])
    assert [call.num_prompt_tokens for _, call in played[:3]] == [65, 129, 193]
    assert played[2][1].num_output_tokens == 1


def test_long_think_times_are_cut(tmp_path: Path):
    """A user who returns after a night was not at work. The caller chooses the limit."""
    requests = [turn(0, [1]), turn(9999, [1, 2], think=9990.0)]
    path = write_lines(tmp_path / "t.jsonl", [session(requests)])
    for limit, think in ((300.0, 300.0), (float("inf"), 9990.0)):
        first, second = play(read_trace(path, "weka", max_think_seconds=limit), users=1, num_calls=2)[:2]
        assert second[0] - first[0] == pytest.approx(1 + think)


def test_a_subagent_plays_between_the_calls_around_it(tmp_path: Path):
    """It is recorded with its end, and the next call's think time contains it: neither may be waited for twice."""
    inner = [turn(0, [50], think=0.0), turn(5, [50, 51], think=3.0)]
    subagent = {"t": 30.0, "type": "subagent", "duration_ms": 20_000, "requests": inner}
    requests = [turn(0, [1], api_time=8.0), subagent, turn(33, [1, 2], think=25.0)]
    trace = read_trace(write_lines(tmp_path / "t.jsonl", [session(requests)]), "weka")
    played = play(trace, users=1, num_calls=4, seconds=1.0)
    start = played[0][0]
    # The subagent began at 10, 2 s after the call before had ended at 8; the next call came 3 s after it.
    assert [at - start for at, _ in played] == pytest.approx([0, 3, 3 + 1 + 3, 7 + 1 + 3])
    assert [call.num_prompt_tokens for _, call in played] == [65, 65, 129, 129]


def test_a_session_played_again_is_a_new_one(tmp_path: Path):
    """Its KV from the time before would be a cache hit that no real user could have."""
    trace = read_trace(write_lines(tmp_path / "t.jsonl", [session([turn(0, [1, 2, 3, 4])])]), "weka")
    first, second = (list(call.block_hashes) for _, call in play(trace, users=1, num_calls=2)[:2])
    assert first[:3] == second[:3]
    assert first[3] != second[3]


def test_all_users_are_there_while_calls_count(tmp_path: Path):
    """The tail, with fewer and fewer users, would flatter any policy: it is played out but does not count."""
    lines = [session([turn(0, [1]), turn(9, [1, 2], think=8.0)]) for _ in range(3)]
    trace = read_trace(write_lines(tmp_path / "t.jsonl", lines), "weka")
    played = play(trace, users=2, num_calls=6)
    assert trace.workload(2, 0).num_measured_calls == 6
    assert 6 <= len(played) <= 6 + 2
    assert [call.call_id for _, call in play(trace, users=2, num_calls=6)] == [call.call_id for _, call in played]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ({**MOONCAKE[0], "input_length": "x"}, "input_length"),
        ({**MOONCAKE[0], "input_length": 0}, "input_length"),
        ({**MOONCAKE[0], "output_length": -1}, "output_length"),
        ({**MOONCAKE[0], "hash_ids": [1, "2"]}, r"hash_ids\[1\]"),
        ({**MOONCAKE[0], "hash_ids": [1, 2, 3, 4]}, "hash_ids"),
        ({**MOONCAKE[0], "timestamp": -1}, "timestamp"),
        ({"timestamp": 1}, "input_length"),
        ([1], "the line"),
    ],
)
def test_a_bad_mooncake_line_is_named(tmp_path: Path, line: Any, field: str):
    """The author of the file must find the place: file, line and field."""
    path = write_lines(tmp_path / "bad.jsonl", [MOONCAKE[0], line])
    with pytest.raises(CommandError, match=rf"bad\.jsonl: line 2: .*{field}"):
        read_trace(path, "mooncake")


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (session([turn(0, [1], type="robot")]), r"requests\[0\]"),
        (session([turn(0, [1]), turn(0, [1], think=-1.0)]), r"requests\[1\]\.think_time"),
        (session([{**turn(0, [1]), "in": 0}]), r"requests\[0\]\.in"),
        (session([{**turn(0, [1, 2, 3]), "in": 64}]), r"requests\[0\]\.hash_ids"),
        (session([turn(0, [1])], block_size=0), "block_size"),
        (session([turn(0, [1])], block_size=128), "block_size"),
        (session([turn(0, [1])], hash_id_scope="global"), "hash_id_scope"),
        (session([], tool_tokens=-1), "tool_tokens"),
    ],
)
def test_a_bad_weka_line_is_named(tmp_path: Path, line: Any, field: str):
    """As for the other formats, with the place inside the session."""
    path = write_lines(tmp_path / "bad.jsonl", [session([turn(0, [1])]), line])
    with pytest.raises(CommandError, match=rf"bad\.jsonl: line 2: {field}"):
        read_trace(path, "weka")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("TIMESTAMP,ContextTokens\n", "line 1: GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,x,1\n", "line 2: ContextTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,0,1\n", "line 2: ContextTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2: TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1\n", "line 2: 2 columns"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no calls"),
    ],
)
def test_a_bad_azure_line_is_named(tmp_path: Path, text: str, problem: str):
    """As for the other formats."""
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(CommandError, match=problem):
        read_trace(path, "azure")


@pytest.mark.parametrize(
    "content",
    [b"not gzip", gzip.compress(b'{"timestamp": 0}\n' * 999)[:-20], b"\x1f\x8b\x08\x00"],
    ids=["no gzip", "cut off", "no more than a header"],
)
def test_a_damaged_gzip_file_is_one_line_of_error(tmp_path: Path, content: bytes):
    """A download that broke off."""
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(CommandError, match=r"t\.jsonl\.gz: "):
        read_trace(path, "mooncake")


def test_lines_that_are_not_json_are_named(tmp_path: Path):
    """Neither text nor nesting without end may end in a stack trace."""
    path = tmp_path / "t.jsonl"
    for text in ("{", "[" * 100_000, "\x00"):
        path.write_text(f"\n{text}\n")
        with pytest.raises(CommandError, match="line 2: "):
            read_trace(path, "mooncake")


@pytest.mark.parametrize(
    ("name", "expected"), [("mooncake_x.jsonl", "mooncake"), ("weka.jsonl.gz", "weka"), ("x.csv", "azure")]
)
def test_the_format_is_derived_from_the_name(name: str, expected: str):
    """Users need not repeat what the name of the file has."""
    assert guess_format(Path(name)) == expected
    with pytest.raises(CommandError, match="--format"):
        guess_format(Path("trace.jsonl"))


def test_runs_of_hashes_are_a_sequence_like_any_other():
    """The router and the shards index, slice and iterate prompts' hashes without knowing how they are kept."""
    plain = [*range(10, 14), *range(3, 5), 99]
    runs = HashRuns((range(10, 14), range(3, 5), range(99, 100)))
    assert list(runs) == plain
    assert len(runs) == len(plain)
    for index in range(-len(plain), len(plain)):
        assert runs[index] == plain[index]
    for start in range(-8, 9):
        for stop in range(-8, 9):
            assert list(runs[start:stop]) == plain[start:stop]
    assert list(runs[::-2]) == plain[::-2]
    for index in (7, -8):
        with pytest.raises(IndexError):
            runs[index]
