"""`kvloom reload` and SIGHUP: a changed configuration file is applied while requests run."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.fabric import KVLOOM, RunningFabric, assert_all_gone, eventually, kvloom_environment, run_kvloom

SIM = ("--engine", "sim", "--sim-step-ms", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reload")


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    path = folder / "kvloom.toml"
    path.write_text("")
    return path


@pytest.fixture(scope="module")
def fabric(model_dir: Path, folder: Path, file: Path) -> Iterator[RunningFabric]:
    fabric = RunningFabric.start(folder / "data", *SIM, "--shards", "1", "--config", str(file))
    yield fabric
    fabric.stop()


def reload_lines(fabric: RunningFabric, *flags: str) -> list[str]:
    done = run_kvloom("reload", *flags, env=fabric.env)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == "reloaded"
    return [line.strip() for line in lines]


def takes_three_messages(fabric: RunningFabric) -> bool:
    messages = [{"role": "user", "content": "x"}] * 3
    body = json.dumps({"model": "smollm2-135m-instruct", "messages": messages, "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"{fabric.http_url}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=20):
            return True
    except urllib.error.HTTPError as error:
        return error.code != 400


def test_each_changed_key_is_applied_or_says_what_applies_it(fabric: RunningFabric, file: Path) -> None:
    """Somebody who has changed the file must know what serves now."""
    before = fabric.pids()
    file.write_text(
        '[edge]\nmax_messages = 2\n[shard]\nnum_shards = 3\n[shard.sim]\nstep_ms = 9.0\n[redis]\nkey_prefix = "x"\n'
    )
    lines = reload_lines(fabric)
    # The flags --shards and --sim-step-ms have precedence, as at the start.
    assert lines == ["redis.key_prefix: needs kvloom down and up", "edge.max_messages: needs kvloom restart edge"]
    assert reload_lines(fabric) == lines
    assert fabric.pids() == before
    assert takes_three_messages(fabric)
    lines = reload_lines(fabric, "--restart")
    assert lines[-2:] == ["edge was restarted", "edge.max_messages: applied"]
    assert not takes_three_messages(fabric)
    file.write_text("")
    assert reload_lines(fabric) == [
        "redis.key_prefix: applied: it is as at the start again",
        "edge.max_messages: needs kvloom restart edge",
    ]
    file.write_text("[edge]\nmax_messages = 2\n")
    assert reload_lines(fabric) == ["edge.max_messages: applied: the processes run with it"]
    file.write_text("")
    assert reload_lines(fabric, "--restart") == ["edge was restarted", "edge.max_messages: applied"]


def test_a_faulty_file_changes_nothing(fabric: RunningFabric, file: Path, folder: Path) -> None:
    """A typing mistake must not reach processes that are restarted later."""
    stored = folder / "data" / "run" / "config.json"
    before = stored.read_bytes()
    for text, reason in (
        ("[edge]\nmax_mesages = 2", "max_mesages"),
        ("[edge]\nhost = '0.0.0.0'", "0.0.0.0 can be reached"),
        ("[tls]\ncertificate_file = '/nowhere'\nkey_file = '/nowhere'", "/nowhere"),
        ("[[models]]\nname = 'a'\n[[models]]\nname = 'a'", "name or alias 'a'"),
    ):
        file.write_text(text)
        done = run_kvloom("reload", env=fabric.env)
        assert done.returncode == 1
        assert reason in done.stderr
    file.write_text("")
    assert stored.read_bytes() == before
    done = run_kvloom("reload", "--config", str(folder / "none.toml"), env=fabric.env)
    assert "none.toml cannot be read" in done.stderr


def test_models_of_the_file_come_and_go(fabric: RunningFabric, file: Path, folder: Path, model_dir: Path) -> None:
    """Which models are served is in the file; those that stay must not notice."""
    both = f'[[models]]\nname = "smollm2-135m-instruct"\n[[models]]\nname = "second"\npath = "{model_dir}"\n'
    shards = [process["pid"] for process in fabric.processes("shard")]
    file.write_text(both + 'aliases = ["other"]\nshard = { num_shards = 1 }\n')
    assert "models: second was loaded" in reload_lines(fabric)

    def names() -> set[str]:
        with urllib.request.urlopen(f"{fabric.http_url}/v1/models", timeout=20) as answer:
            return {model["id"] for model in json.loads(answer.read())["data"]}

    assert names() == {"smollm2-135m-instruct", "second", "other"}
    file.write_text(both + 'aliases = ["new"]\nshard = { num_shards = 2 }\n')
    assert reload_lines(fabric, "--restart") == [
        "models.second.shard.num_shards: needs kvloom models unload second, and then kvloom reload",
        "shard-second-0 is the only shard of its model: shard-second-0-spare serves meanwhile",
        "shard-second-0 was restarted",
        "models.second.aliases: applied",
    ]
    eventually("the new alias is known", lambda: names() == {"smollm2-135m-instruct", "second", "new"})
    file.write_text("")
    assert "models: second was unloaded" in reload_lines(fabric)
    assert names() == {"smollm2-135m-instruct"}
    assert [process["pid"] for process in fabric.processes("shard")] == shards


def test_a_daemon_reloads_at_sighup(fabric: RunningFabric, file: Path, folder: Path) -> None:
    """Service managers reload so; the fabric must go on, whatever the file is like."""
    supervisor = fabric.status()["supervisor_pid"]
    log = folder / "data" / "logs" / "kvloom.log"
    file.write_text("[router]\nmax_attempts = 7\n")
    os.kill(supervisor, signal.SIGHUP)
    eventually("it was reloaded", lambda: "router.max_attempts: needs kvloom restart router" in log.read_text())
    file.write_text("[router]\nmax_attempts = 'many'\n")
    eventually("the reload has ended", lambda: "the configuration was reloaded" in log.read_text())
    os.kill(supervisor, signal.SIGHUP)
    eventually("the fault is named", lambda: "not reloaded: The configuration file" in log.read_text())
    assert fabric.status()["phase"] == "ready"
    file.write_text("")


@pytest.mark.long
def test_a_closed_terminal_stops_the_fabric_in_it(tmp_path: Path, model_dir: Path) -> None:
    """Nobody could stop it with Ctrl-C any more. (That it stops at Ctrl-C itself is tested in every run.)"""
    env = kvloom_environment(tmp_path)
    controller, terminal = pty.openpty()
    # What starts the tests may ignore the signal, as nohup does, and what it starts would as well.
    in_terminal = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.login_tty(int(sys.argv[1])); "
        "os.execv(sys.argv[2], sys.argv[2:])"
    )
    argv = [sys.executable, "-c", in_terminal, str(terminal), str(KVLOOM), "up", *SIM, "--shards", "1"]
    with subprocess.Popen(argv, env=env, pass_fds=[terminal], start_new_session=True) as process:
        os.close(terminal)

        def output_until(end: bytes) -> None:
            output = b""
            while end not in output:
                output += os.read(controller, 4096)

        output_until(b"ready: http://")
        pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        os.close(controller)
        assert process.wait(60) == 0
    assert_all_gone(pids)


def test_adapters_of_the_file_come_and_go(fabric: RunningFabric, file: Path, model_dir: Path) -> None:
    """Without a restart; those that were loaded by command stay."""
    name = "smollm2-135m-instruct"

    def listed() -> set[str]:
        lines = [line.strip() for line in run_kvloom("models", "list", env=fabric.env).stdout.splitlines()]
        return {line.split()[0].removeprefix(f"{name}:") for line in lines if line.startswith(f"{name}:")}

    before = fabric.pids()
    assert run_kvloom("models", "load-adapter", name, "manual", str(model_dir), env=fabric.env).returncode == 0
    file.write_text('[[model.adapters]]\nname = "law"\n[[model.adapters]]\nname = "poetry"\n')
    lines = reload_lines(fabric)
    assert f"models.{name}.adapters: law was loaded" in lines
    assert listed() == {"law", "manual", "poetry"}
    file.write_text('[[model.adapters]]\nname = "poetry"\npath = "changed"\n')
    lines = reload_lines(fabric)
    assert f"models.{name}.adapters: law was unloaded" in lines
    assert [line for line in lines if line.startswith("models.") and "poetry" in line] == [
        f"models.{name}.adapters: poetry was unloaded",
        f"models.{name}.adapters: poetry was loaded",
    ]
    assert listed() == {"manual", "poetry"}
    assert reload_lines(fabric) == []
    file.write_text("")
    reload_lines(fabric)
    assert listed() == {"manual"}
    assert fabric.pids() == before
