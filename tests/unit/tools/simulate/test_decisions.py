"""`kvloom simulate --decisions`: reading the decision file of a router, and the errors for unusable files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from router.decisions.file import RotatingFile
from router.decisions.records import FleetLine, JudgedRecord, RequestLine
from tests.fakes.decision_lines import BLOCK_SIZE, SPEED, fleet, request, shard, write
from tools.failures import CommandError
from tools.simulate.command import simulate_command
from tools.simulate.decisions import Replay, read_decision_log
from tools.simulate.statistics import Slo


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write(tmp_path / "decisions.jsonl", [fleet(), *(request(index) for index in range(40))])


def read(tmp_path: Path, *lines: FleetLine | RequestLine) -> Replay:
    return read_decision_log(write(tmp_path / "log", lines))


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(simulate_command, [*map(str, arguments), "--jobs", "1"])


def rows(*arguments: str | Path) -> list[dict[str, Any]]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_requests_are_read_as_recorded(tmp_path: Path):
    """The replay has the arrivals, lengths, hashes and sessions of the file, whose lines are in the order of ends."""
    replay = read(tmp_path, fleet(), request(2), request(0), request(1, session=""))
    assert replay.trace.timestamps == pytest.approx([0.0, 0.1, 0.2], abs=1e-6)
    assert replay.trace.block_size == BLOCK_SIZE
    assert [call.call_id for call in replay.trace.calls] == [0, 1, 2]
    assert [call.session_key for call in replay.trace.calls] == ["c0", "", "c2"]
    assert replay.trace.calls[2].block_hashes == (200, 201, 202, 203)
    assert (replay.trace.calls[2].num_prompt_tokens, replay.trace.calls[2].num_output_tokens) == (67, 5)
    assert not replay.notes


def test_the_recorded_row_has_the_recorded_outcomes(tmp_path: Path):
    """The first row must be no estimate: hit rate and TTFT are those of the lines."""
    lines = [request(index, outcome={"ttft_seconds": 0.01 * (index + 1)}) for index in range(5)]
    recorded, _ = read(tmp_path, fleet(), *lines).recorded(Slo(ttft_seconds=0.035, tpot_seconds=1.0))
    assert recorded.hit_rate == pytest.approx(16 / sum(line.num_prompt_tokens for line in lines))
    assert (recorded.ttft_mean, recorded.ttft_p50) == (pytest.approx(0.03), pytest.approx(0.03))
    assert (recorded.goodput, recorded.requests, recorded.failed) == (0.6, 5, 0)


def test_the_recorded_row_says_how_well_the_router_predicted(tmp_path: Path):
    """Predictions are judged by what really happened, of which the file has both sides. Files of earlier routers have
    none."""
    judged = [JudgedRecord(term="ttft", predicted_seconds=0.02, actual_seconds=0.03)]
    judged.append(JudgedRecord(term="end", predicted_seconds=None, actual_seconds=0.1))
    lines = [request(index, outcome={"predictions": judged}) for index in range(5)]
    _, calibration = read(tmp_path, fleet(), *lines).recorded(Slo())
    assert calibration.keys() == {"ttft"}
    assert calibration["ttft"].mean_error == pytest.approx(0.01)
    (tmp_path / "log").unlink()
    assert read(tmp_path, fleet(), request(0)).recorded(Slo())[1] == {}


def test_cancelled_requests_count_with_the_tokens_that_they_got(tmp_path: Path):
    """A request cancelled after 2 tokens loaded a shard for 2 tokens. A request without a token loaded none and
    failed."""
    left = request(0, outcome={"reason": "cancelled", "num_output_tokens": 2})
    left_at_once = request(1, outcome={"reason": "cancelled", "num_output_tokens": 0, "ttft_seconds": None})
    lost = request(2, outcome={"reason": "error", "num_output_tokens": 0, "ttft_seconds": None})
    replay = read(tmp_path, fleet(), left, left_at_once, lost)
    assert [call.num_output_tokens for call in replay.trace.calls] == [2]
    recorded, _ = replay.recorded(Slo())
    assert (recorded.requests, recorded.failed) == (3, 2)


def test_choices_are_replayed_as_one_of_mean_length(tmp_path: Path):
    """num_output_tokens of the file is of all choices together."""
    replay = read(tmp_path, fleet(), request(0, num_choices=2, outcome={"num_output_tokens": 9}))
    assert replay.trace.calls[0].num_output_tokens == 5


def test_a_usual_request_takes_what_the_router_has_learned(tmp_path: Path):
    """The model's prefill of an average request on an idle shard is the learned one, its steps are as measured."""
    found = read(tmp_path, fleet(), *(request(index) for index in range(4))).fleet
    assert (found.num_shards, found.capacity_blocks, found.speed_factors) == (2, 1000, ())
    assert (found.profile.max_batch, found.profile.step_floor_seconds) == (8, 0.02)
    assert found.profile.capacity_tokens == 1000 * BLOCK_SIZE
    num_computed_tokens = 67
    assert num_computed_tokens * found.profile.seconds_per_prefill_token == pytest.approx(0.01 + 67e-4)
    assert found.profile.seconds_per_attention_pair == 1e-9


def test_slow_shards_stay_slow(tmp_path: Path):
    """A policy must be evaluated with the mixture of speeds of a fleet, but noise in learned speeds is no mixture."""
    slow = {name: 3 * seconds for name, seconds in SPEED.items()}
    noisy = {name: 1.1 * seconds for name, seconds in SPEED.items()}
    mixed = read(tmp_path, fleet(shard("s0"), shard("s1", prefill_seconds=slow)), request(0)).fleet
    assert mixed.speed_factors == pytest.approx((0.5, 1.5))
    assert read(tmp_path, fleet(shard("s0"), shard("s1", prefill_seconds=noisy)), request(0)).fleet.speed_factors == ()


def test_unknown_speeds_are_taken_from_the_rest_of_the_file(tmp_path: Path):
    """A shard that has just restarted has measured nothing. Earlier lines are used, or else the speed of the
    answers."""
    unknown = shard("s0", decode_step_seconds=0.0)
    restarted = read(tmp_path, fleet(shard("s0", decode_step_seconds=0.05)), request(0), fleet(unknown), request(1))
    assert restarted.fleet.profile.step_floor_seconds == 0.05
    unmeasured = read(tmp_path, fleet(unknown), request(0))
    assert unmeasured.fleet.profile.step_floor_seconds == pytest.approx(0.02, rel=1e-3)


def test_the_last_fleet_is_replayed_without_shards_that_drain(tmp_path: Path):
    """A file may have several fleets. One of them must be chosen, and a note must say so."""
    later = fleet(shard("s0", draining=True), shard("s1"), shard("s2"), shard("s3"), policy="gaie")
    replay = read(tmp_path, fleet(), request(0), later, request(1), fleet(shard("x", model="other")))
    assert replay.fleet.shard_ids == ("s1", "s2", "s3")
    assert any("2 to 3 shards" in note for note in replay.notes)
    assert any("ect, gaie" in note for note in replay.notes)


def test_one_model_is_replayed(tmp_path: Path):
    """Shards of one model do not serve another's requests."""
    other = request(3, model="other")
    replay = read(tmp_path, fleet(shard("s0"), shard("x", model="other")), request(0), request(1), other)
    assert (replay.trace.num_calls, replay.fleet.shard_ids) == (2, ("s0",))
    assert any(note.startswith("1 requests are for another model than m") for note in replay.notes)


def test_missing_load_is_noticed(tmp_path: Path):
    """A sample of a quarter replayed as if it were all would show a fleet with nothing to do."""
    busy = {"e2e_latency_seconds": 1.0}
    part = [request(index, in_flight=min(4 * index, 40), outcome=busy) for index in range(40)]
    notes = read(tmp_path, fleet(), *part).notes
    assert any("only about 2" in note and "--rate 4" in note for note in notes), notes
    whole = [request(index, in_flight=min(index, 10), outcome=busy) for index in range(40)]
    assert not read(tmp_path, fleet(), *whole).notes


def test_unexplained_hits_are_noticed(tmp_path: Path):
    """Of a conversation whose first turns were not sampled the replay finds nothing cached, whatever the policy."""
    lines = [request(index, outcome={"num_cached_tokens": 64 if index > 3 else 0}) for index in range(8)]
    assert not read(tmp_path, fleet(), *lines).notes
    assert any("43% of the prompt tokens" in note for note in read(tmp_path, fleet(), *lines[3:5]).notes)


def test_the_rotated_file_is_read_first(tmp_path: Path):
    """What the router's own writer leaves behind is one log in two files, each with its head."""
    path = tmp_path / "log"
    file = RotatingFile(path, max_bytes=6000)
    header = msgspec.json.encode(fleet()) + b"\n"
    lines = [msgspec.json.encode(request(index)) + b"\n" for index in range(16)]
    file.append([(header if index == 0 else b"", line) for index, line in enumerate(lines)])
    file.close()
    assert (tmp_path / "log.1").exists()
    replay = read_decision_log(path)
    assert "log.1 was read before log" in replay.notes
    kept = b"".join(one.read_bytes() for one in (tmp_path / "log.1", path)).count(b'"type":"request"')
    assert replay.trace.num_calls == kept > path.read_bytes().count(b'"type":"request"')


def test_a_torn_line_is_skipped(tmp_path: Path):
    """A killed router leaves half a line; the rest of the file is good."""
    path = write(tmp_path / "log", [fleet(), request(0)])
    path.write_bytes(path.read_bytes() + b'{"type":"request","requ\n' + msgspec.json.encode(request(1)))
    assert read_decision_log(path).trace.num_calls == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no requests in it"),
        ([fleet()], "no requests in it"),
        ([request(0)], "line 1: type: there is a request before the first fleet"),
        ([fleet(version=3), request(0)], "line 1: version: 3, but this kvloom reads up to 2"),
        ([fleet(shard("s0", num_blocks=0)), request(0)], "line 1: shards s0: sizes must be at least 1"),
        ([fleet(shard("s0", decode_step_seconds=-1.0)), request(0)], "line 1: shards s0: speeds must not be below 0"),
        ([fleet(shard("s0", model="other")), request(0)], "no shard with the model m in it"),
        ([fleet(), request(0, num_prompt_tokens=0)], "line 2: num_prompt_tokens: 0 is not between 1 and"),
        ([fleet(), request(0, num_prompt_tokens=20)], "line 2: block_hashes: 4 blocks of 16 tokens for a prompt of 20"),
        ([fleet(), request(0, block_hashes=b"odd")], "line 2: block_hashes: "),
        ([fleet(), request(0, outcome={"e2e_latency_seconds": -1.0})], "line 2: outcome: times must not be below 0"),
        ([fleet(), request(0, outcome={"ttft_seconds": None})], "no request in it got a token"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, lines: list[FleetLine | RequestLine], message: str):
    """Files come from elsewhere, half copied or edited: what is wrong, where, and no stack trace."""
    with pytest.raises(CommandError) as raised:
        read(tmp_path, *lines)
    assert message in raised.value.message


def test_another_kind_of_file_is_rejected(tmp_path: Path):
    """A trace given as decisions is a slip that must not end in a stack trace."""
    path = tmp_path / "mooncake.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5}\n')
    with pytest.raises(CommandError, match=r"mooncake\.jsonl: line 1: "):
        read_decision_log(path)


def test_the_first_rows_are_the_recorded_run_and_its_policy(log: Path):
    """Both are always shown first, so that a reader sees how far the model can be trusted."""
    found = rows("--decisions", log, "--policy", "round_robin")
    assert [row["policy"] for row in found] == ["recorded", "ect", "round_robin", "pool", "bound"]
    assert [row["in_force"] for row in found] == [False, True, False, False, False]
    assert all(row.keys() == found[0].keys() for row in found)
    assert (found[0]["router_microseconds"], found[0]["in_flight_imbalance"]) == (None, None)
    assert {row["requests"] for row in found} == {36}
    assert found[0]["ttft_mean"] == pytest.approx(0.03)
    again = rows("--decisions", log, "--policy", "round_robin")
    assert [{**row, "router_microseconds": 0} for row in found] == [{**row, "router_microseconds": 0} for row in again]


def test_flags_override_what_was_recorded(log: Path):
    """The what-if: another fleet, another rate, fewer requests."""
    result = invoke("--decisions", log, "--shards", "5", "--rate", "2", "--profile", "8b", "--max-requests", "20")
    assert result.exit_code == 0, result.output
    title, header, recorded, in_force, *_ = result.stdout.splitlines()
    assert title.strip() == "decisions.jsonl, 5 × 8b, rate ×2"
    assert header.startswith("policy")
    assert recorded.startswith("recorded")
    assert in_force.startswith("ect (in force)")
    assert rows("--decisions", log, "--max-requests", "20")[0]["requests"] == 18


def test_a_removed_policy_is_reported(tmp_path: Path):
    """The file of an older kvloom can still be replayed, without the row that would judge the model."""
    path = write(tmp_path / "log", [fleet(policy="retired"), *(request(index) for index in range(10))])
    result = invoke("--decisions", path, "--policy", "gaie")
    assert result.exit_code == 0, result.output
    assert "'retired', does not exist in this version of kvloom" in result.stderr
    assert "in force" not in result.stdout


def test_capacity_of_recorded_requests(log: Path):
    """Decisions are an open loop, so the load that a policy bears can be searched for as for a trace."""
    found = rows("--decisions", log, "--policy", "ect", "--capacity", "--slo-ttft", "0.2")
    assert [row["load_unit"] for row in found] == ["rate"] * 3
    assert found[0]["capacity"] is None
    assert found[1]["capacity"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trace", "LOG"], "--decisions cannot be combined with --trace"),
        (["--format", "weka"], "--decisions cannot be combined with --trace"),
        (["--users", "3"], "--users is for weka"),
        (["--block-size", "16"], "--block-size is for azure"),
    ],
)
def test_flags_of_traces_are_rejected_with_decisions(log: Path, flags: list[str], message: str):
    """A flag that would be ignored is rejected."""
    result = invoke("--decisions", log, *(str(log) if flag == "LOG" else flag for flag in flags))
    assert result.exit_code != 0
    assert message in result.output


def test_something_to_replay_must_be_given():
    """Neither a trace nor decisions: usage, not a stack trace."""
    result = invoke("--policy", "all")
    assert result.exit_code == 2
    assert "--trace or --decisions" in result.output
