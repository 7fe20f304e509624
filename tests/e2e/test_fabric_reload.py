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
from tests.fabric_starts import count_start

pytestmark = pytest.mark.xdist_group("sim")


class ConfigFile:
    """The fabric's configuration file, to which tests add."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = path.read_text()

    def add(self, text: str) -> None:
        """In place of what was added before."""
        self._path.write_text(self._before + text)


@pytest.fixture
def fabric(sim_fabric: RunningFabric) -> RunningFabric:
    return sim_fabric


@pytest.fixture
def file(fabric: RunningFabric) -> Iterator[ConfigFile]:
    """What is shared is as it was when a test has ended."""
    file = ConfigFile(data_dir(fabric).parent / "kvloom.toml")
    yield file
    file.add("")
    run_kvloom("reload", "--restart", env=fabric.env)
    assert reload_lines(fabric) == []


def data_dir(fabric: RunningFabric) -> Path:
    return Path(fabric.env["KVLOOM_DATA_DIR"])


def reload_lines(fabric: RunningFabric, *flags: str) -> list[str]:
    done = run_kvloom("reload", *flags, env=fabric.env)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == "reloaded"
    return [line.strip() for line in lines]


def test_a_dry_run_says_what_would_change_and_changes_nothing(fabric: RunningFabric, file: ConfigFile) -> None:
    """An operator sees the difference, and what it would take, before anything happens."""
    file.add("\n[router]\nmax_queue_seconds = 7.0\n")
    for _ in range(2):
        done = run_kvloom("reload", "--dry-run", env=fabric.env)
        assert done.returncode == 0, done.stdout + done.stderr
        line, last = done.stdout.splitlines()
        assert line.startswith("  router.max_queue_seconds: ")
        assert line.endswith(" -> 7.0, would need kvloom restart router")
        assert last == "nothing was changed"
    (applied,) = reload_lines(fabric)
    assert applied == "router.max_queue_seconds: needs kvloom restart router"


def takes_a_message(fabric: RunningFabric) -> bool:
    messages = [{"role": "user", "content": "x"}]
    body = json.dumps({"model": "smollm2-135m-instruct", "messages": messages, "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"{fabric.http_url}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=20):
            return True
    except urllib.error.HTTPError as error:
        return error.code != 413


def test_each_changed_key_is_applied_or_says_what_applies_it(fabric: RunningFabric, file: ConfigFile) -> None:
    """Somebody who has changed the file must know what serves now."""
    before = fabric.pids()
    file.add(
        '[edge]\nmax_body_bytes = 2\n[shard]\nnum_shards = 3\n[shard.sim]\nstep_ms = 9.0\n[redis]\nkey_prefix = "x"\n'
    )
    lines = reload_lines(fabric)
    # The flags --shards and --sim-step-ms have precedence, as at the start.
    assert lines == ["redis.key_prefix: needs kvloom down and up", "edge.max_body_bytes: needs kvloom restart edge"]
    assert reload_lines(fabric) == lines
    assert fabric.pids() == before
    assert takes_a_message(fabric)
    lines = reload_lines(fabric, "--restart")
    assert lines[-2:] == ["edge was restarted", "edge.max_body_bytes: applied"]
    assert not takes_a_message(fabric)
    file.add("")
    assert reload_lines(fabric) == [
        "redis.key_prefix: applied: it is as at the start again",
        "edge.max_body_bytes: needs kvloom restart edge",
    ]
    file.add("[edge]\nmax_body_bytes = 2\n")
    assert reload_lines(fabric) == ["edge.max_body_bytes: applied: the processes run with it"]
    file.add("")
    assert reload_lines(fabric, "--restart") == ["edge was restarted", "edge.max_body_bytes: applied"]


def test_a_faulty_file_changes_nothing(fabric: RunningFabric, file: ConfigFile) -> None:
    """A typing mistake must not reach processes that are restarted later."""
    stored = data_dir(fabric) / "run" / "config.json"
    before = stored.read_bytes()
    for text, reason in (
        ("[edge]\nmax_mesages = 2", "max_mesages"),
        ("[edge]\nhost = '0.0.0.0'", "0.0.0.0 can be reached"),
        ("[tls]\ncertificate_file = '/nowhere'\nkey_file = '/nowhere'", "/nowhere"),
        ("[[models]]\nname = 'a'\n[[models]]\nname = 'a'", "name or alias 'a'"),
    ):
        file.add(text)
        done = run_kvloom("reload", env=fabric.env)
        assert done.returncode == 1
        assert reason in done.stderr
    file.add("")
    assert stored.read_bytes() == before
    done = run_kvloom("reload", "--config", str(data_dir(fabric) / "none.toml"), env=fabric.env)
    assert "none.toml cannot be read" in done.stderr


def test_models_of_the_file_come_and_go(fabric: RunningFabric, file: ConfigFile, model_dir: Path) -> None:
    """Which models are served is in the file; those that stay must not notice."""
    both = f'[[models]]\nname = "smollm2-135m-instruct"\n[[models]]\nname = "second"\npath = "{model_dir}"\n'
    shards = [process["pid"] for process in fabric.processes("shard")]
    file.add(both + 'aliases = ["other"]\nshard = { num_shards = 1 }\n')
    assert "models: second was loaded" in reload_lines(fabric)

    def names() -> set[str]:
        with urllib.request.urlopen(f"{fabric.http_url}/v1/models", timeout=20) as answer:
            return {model["id"] for model in json.loads(answer.read())["data"]}

    assert names() == {"smollm2-135m-instruct", "second", "other"}
    file.add(both + 'aliases = ["new"]\nshard = { num_shards = 2 }\n')
    assert reload_lines(fabric, "--restart") == [
        "models.second.shard.num_shards: needs kvloom models unload second, and then kvloom reload",
        "shard-second-0 is the only shard of its model: shard-second-0-spare serves meanwhile",
        "shard-second-0 was restarted",
        "models.second.aliases: applied",
    ]
    eventually("the new alias is known", lambda: names() == {"smollm2-135m-instruct", "second", "new"})
    file.add("")
    assert "models: second was unloaded" in reload_lines(fabric)
    assert names() == {"smollm2-135m-instruct"}
    assert [process["pid"] for process in fabric.processes("shard")] == shards


def test_a_daemon_reloads_at_sighup(fabric: RunningFabric, file: ConfigFile) -> None:
    """Service managers reload so; the fabric must go on, whatever the file is like."""
    supervisor = fabric.status()["supervisor_pid"]
    log = data_dir(fabric) / "logs" / "kvloom.log"
    before = log.stat().st_size

    def is_logged(text: str) -> bool:
        return text in log.read_bytes()[before:].decode()

    file.add("[router]\nmax_attempts = 7\n")
    os.kill(supervisor, signal.SIGHUP)
    eventually("it was reloaded", lambda: is_logged("router.max_attempts: needs kvloom restart router"))
    file.add("[router]\nmax_attempts = 'many'\n")
    eventually("the reload has ended", lambda: is_logged("the configuration was reloaded"))
    os.kill(supervisor, signal.SIGHUP)
    eventually("the fault is named", lambda: is_logged("not reloaded: The configuration file"))
    assert fabric.status()["phase"] == "ready"
    file.add("")


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
    argv = [sys.executable, "-c", in_terminal, str(terminal), str(KVLOOM), "up", "--engine", "sim", "--shards", "1"]
    with subprocess.Popen(argv, env=env, pass_fds=[terminal], start_new_session=True) as process:
        os.close(terminal)

        def output_until(end: bytes) -> None:
            output = b""
            while end not in output:
                output += os.read(controller, 4096)

        output_until(b"ready: http://")
        count_start()
        pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        os.close(controller)
        assert process.wait(60) == 0
    assert_all_gone(pids)


def test_adapters_of_the_file_come_and_go(fabric: RunningFabric, file: ConfigFile, model_dir: Path) -> None:
    """Without a restart; those that were loaded by command stay."""
    name = "smollm2-135m-instruct"

    def listed() -> set[str]:
        lines = [line.strip() for line in run_kvloom("models", "list", env=fabric.env).stdout.splitlines()]
        return {line.split()[0].removeprefix(f"{name}:") for line in lines if line.startswith(f"{name}:")}

    before = fabric.pids()
    assert run_kvloom("models", "load-adapter", name, "manual", str(model_dir), env=fabric.env).returncode == 0
    file.add('[[model.adapters]]\nname = "law"\n[[model.adapters]]\nname = "poetry"\n')
    lines = reload_lines(fabric)
    assert f"models.{name}.adapters: law was loaded" in lines
    assert listed() == {"law", "manual", "poetry"}
    file.add('[[model.adapters]]\nname = "poetry"\npath = "changed"\n')
    lines = reload_lines(fabric)
    assert f"models.{name}.adapters: law was unloaded" in lines
    assert [line for line in lines if line.startswith("models.") and "poetry" in line] == [
        f"models.{name}.adapters: poetry was unloaded",
        f"models.{name}.adapters: poetry was loaded",
    ]
    assert listed() == {"manual", "poetry"}
    assert reload_lines(fabric) == []
    file.add("")
    reload_lines(fabric)
    assert listed() == {"manual"}
    assert run_kvloom("models", "unload-adapter", name, "manual", env=fabric.env).returncode == 0
    assert fabric.pids() == before
