"""Runs a command that dies with the process that started it: `python -I -S die_with_parent.py PARENT_PID COMMAND...`.
PARENT_PID is 0 where the parent is not known beforehand.

The kernel is asked to kill this process when its parent dies (PR_SET_PDEATHSIG survives exec). Then the process execs
the command. This is a wrapper instead of a `preexec_fn` for Popen, because Python code between fork and exec is unsafe
once the threads of gRPC run in the parent. Only the standard library is used, so that it takes about 20 ms.
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
    # The parent may have died before the call of prctl.
    if parent_pid and os.getppid() != parent_pid:
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"error: cannot run {command[0]}: {error.strerror}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
