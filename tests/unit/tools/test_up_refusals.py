"""What `kvloom up` refuses before it converts a model or starts a process. (tests/e2e/test_fabric_commands.py shows a
refusal as a terminal does.)"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import structlog

from tools.cli.commands import main

BUILTIN = "smollm2-135m-instruct"


@pytest.fixture
def refusal_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command in this process, which has imported it already. A refused one starts nothing."""
    monkeypatch.setenv("KVLOOM_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("KVLOOM_MODEL_CACHE_DIR", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    ports = ("--http-port", "0", "--router-port", "0")

    def refusal_of(*args: str) -> str:
        with pytest.raises(SystemExit) as exit_info:
            main.main(["up", *ports, *args], prog_name="kvloom")
        assert exit_info.value.code in (1, 2)
        assert not (tmp_path / "models").exists(), "a model was converted first"
        logs = {path.name for path in (tmp_path / "data" / "logs").glob("*")}
        assert logs <= {"kvloom.log"}, "a process was started first"
        return capsys.readouterr().err

    umask, logging = os.umask(0o077), structlog.get_config()
    yield refusal_of
    os.umask(umask)  # the command changes it, and what logs look like
    structlog.configure(**logging)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "no-such-model"), "error: no such model: no-such-model"),
        (("--model", "."), "is not a model directory: it has no config.json"),
        (("--config", "nowhere.toml"), "nowhere.toml cannot be read: No such file or directory"),
        (("--engine", "abacus"), "'abacus' is"),
        (("--model", BUILTIN, "--model", BUILTIN), "two have the name or alias"),
        (("--model", BUILTIN, "--shards", "other=2"), f"there is no such model; there are {BUILTIN}"),
        (("--shards", "tiny=none"), "is no number from 1 to 1024"),
        (("--model", "tiny=/nowhere"), "no such model: /nowhere"),
        (("--model", BUILTIN, "--model", "no-such-model"), "no such model: no-such-model"),
    ],
)
def test_a_faulty_choice_is_named_in_one_line(refusal_of, flags: tuple[str, ...], message: str) -> None:
    """A typing mistake must not cost a start of all processes."""
    printed = refusal_of(*flags)
    assert message in printed
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "flags", "message"),
    [
        ('[control]\ndatabase_url = "postgresql://kvloom@127.0.0.1:1/kvloom"\n', ("--control",), "at 127.0.0.1:1: "),
        ('[redis]\nurl = "redis://127.0.0.1:1"\n', (), "cannot use the Redis server at redis://127.0.0.1:1"),
    ],
)
def test_a_server_that_cannot_be_used_is_told_before_a_model_is_converted(
    tmp_path: Path, refusal_of, settings: str, flags: tuple[str, ...], message: str
) -> None:
    """Up to a minute of conversion, and 261 MB on the disk, came before a mistake was told."""
    (tmp_path / "kvloom.toml").write_text(settings)
    assert message in refusal_of("--config", "kvloom.toml", *flags)
