"""Run a command that dies with the process that started it: `python -I -S exec_bound.py PARENT_PID COMMAND...`.

The kernel is asked to kill this process when its parent dies (PR_SET_PDEATHSIG survives exec), then the command takes
its place. A wrapper instead of Popen's `preexec_fn`, because Python code between fork and exec is unsafe once gRPC's
threads run in the parent. Only the standard library is used, so it costs about 20 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the kernel was told.
    if os.getppid() != parent_pid:
        sys.exit(1)
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.stderr.write(f"error: cannot run {command[0]}: {error.strerror}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
