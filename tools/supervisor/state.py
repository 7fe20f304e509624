"""The run folder of a fabric, and its state file in `DATA_DIR/run` for `status`, `down`, `logs` and `chat`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil

from kvloom_common.private_file import make_own_folder, open_private_file, replacement
from kvloom_common.process.control_socket import stored_config
from kvloom_common.process.data_dir import make_data_dir_private
from tools.failures import EXIT_NOT_RUNNING, CommandError
from tools.supervisor.rollout.state import RolloutState
from tools.supervisor.supervised_process import ProcessStatus


class FabricState(msgspec.Struct, kw_only=True):
    supervisor_pid: int
    supervisor_started: float
    """When the supervisor started, in seconds since the epoch. The pid alone may have been reused by another
    process."""
    phase: str = "starting"
    """"starting", "ready" or "stopping"."""
    http_url: str
    """"" if this machine has no edge."""
    router_address: str
    """"" if this machine has no router."""
    model: str
    processes: list[ProcessStatus] = []
    name: str = "kvloom"
    """The supervisor's name in the registry."""
    owner: str = ""
    """The owner in the records of its processes."""
    not_ready: list[str] = []
    """Why requests that reach this machine are not served; not known from the file."""
    rollouts: list[RolloutState] = []
    """Those that have not ended; not known from the file either."""
    brownouts: list[str] = []
    """The models whose answers are degraded (docs/operate/brownout.md); not known from the file either."""
    alarms: list[str] = []
    """The processes that do not follow the table of tenants; not known from the file either."""
    warnings: list[str] = []
    """Configured things that have no effect now, in words for people."""

    @property
    def place(self) -> str:
        """Returns the name that people have for this fabric, or this machine of a fleet."""
        return self.http_url or f"{self.name} ({', '.join(dict.fromkeys(p.role for p in self.processes))})"


class RunFolder:
    """`DATA_DIR/run`, `DATA_DIR/logs` and the lock that lets only one fabric use a data directory."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.run_dir = data_dir / "run"
        self.log_dir = data_dir / "logs"
        self.config_path = stored_config(data_dir)
        self._state_path = self.run_dir / "state.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Held by `up` as long as it runs; the kernel releases it however `up` ends. Raises CommandError if another
        `up` holds it or the directory cannot be written."""
        try:
            for directory in (self.run_dir, self.log_dir):
                make_own_folder(directory)  # the config may hold a password
            file = os.fdopen(open_private_file(self.run_dir / "lock", os.O_WRONLY | os.O_CREAT), "wb")
        except OSError as error:
            raise CommandError(f"cannot use the data directory {self.data_dir}: {error.strerror}") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                state = self.read_running()
                holder = f" (pid {state.supervisor_pid}, {state.place})" if state else ""
                raise CommandError(
                    f"kvloom is already running with the data directory {self.data_dir}{holder}: "
                    "stop it with `kvloom down`, or give another --data-dir"
                ) from error
            make_data_dir_private(self.data_dir)
            try:
                yield
            finally:
                self._state_path.unlink(missing_ok=True)

    def write(self, state: FabricState) -> None:
        """Write atomically: readers see the old state or the new one."""
        with replacement(self._state_path) as file:
            file.write(msgspec.json.encode(state))

    def read_running(self) -> FabricState | None:
        """None if no fabric runs with this data directory, even if a killed one left its file."""
        try:
            state = msgspec.json.decode(self._state_path.read_bytes(), type=FabricState)
        except (OSError, msgspec.DecodeError):
            return None
        return state if self._is_alive(state) else None

    def require_running(self) -> FabricState:
        state = self.read_running()
        if state is None:
            raise CommandError(f"kvloom is not running (data directory {self.data_dir})", EXIT_NOT_RUNNING)
        return state

    def wait_until_gone(self, state: FabricState, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        while self._is_alive(state):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    @staticmethod
    def _is_alive(state: FabricState) -> bool:
        try:
            process = psutil.Process(state.supervisor_pid)
            return process.create_time() == state.supervisor_started and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class StateWriter:
    """Keeps the state file up to date as far as the disk allows. The fabric runs on without it: a supervisor that died
    of a full disk would take everything along."""

    def __init__(self, folder: RunFolder, report: Callable[[str], None], retry_seconds: float = 1.0) -> None:
        """`report` is called with a line for users."""
        self._folder = folder
        self._report = report
        self._retry_seconds = retry_seconds
        self._failed = False
        self._retry: asyncio.TimerHandle | None = None

    def write(self, state: FabricState) -> None:
        """Must be called on the event loop. A write that fails is reported once, and retried."""
        self.close()
        try:
            self._folder.write(state)
        except OSError as error:
            if not self._failed:
                self._report(
                    f"the state cannot be written to {self._folder.run_dir} ({error.strerror}): `kvloom status` is out "
                    "of date; serving continues"
                )
            self._failed = True
            self._retry = asyncio.get_running_loop().call_later(self._retry_seconds, self.write, state)
        else:
            if self._failed:
                self._report("the state can be written again")
            self._failed = False

    def close(self) -> None:
        """Give up the write that waits to be retried."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None


def own_start_time() -> float:
    return psutil.Process(os.getpid()).create_time()
