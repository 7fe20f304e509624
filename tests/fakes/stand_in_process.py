"""A service's outward behaviour without the service: prints a ReadyLine, obeys SIGTERM, or misbehaves as told.

python -m tests.fakes.stand_in_process [--fail MESSAGE] [--ignore-sigterm] [--grandchild FILE] [--record FILE]
    [--leave FILE]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="stand-in")
    parser.add_argument("--fail", help="print this as an error and exit 1 instead of serving")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--grandchild", type=Path, help="start a process that outlives this one; write its pid there")
    parser.add_argument("--record", type=Path, help="append this process's name there when SIGTERM stops it")
    parser.add_argument("--leave", type=Path, help="say at SIGTERM that it leaves, and end when there is such a file")
    parser.add_argument("--print-bytes", type=int, default=0, help="write that much on stderr first")
    arguments = parser.parse_args()
    if arguments.fail:
        sys.stderr.write(f"error: {arguments.fail}\n")
        sys.exit(1)
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: None if arguments.ignore_sigterm else stopped.append(True))
    if arguments.grandchild:
        code = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
        grandchild = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=sys.stdout, stderr=sys.stderr)
        arguments.grandchild.write_text(str(grandchild.pid))
    sys.stderr.write("x" * arguments.print_bytes)
    if not arguments.never_ready:
        sys.stdout.write('{"event":"ready","address":"127.0.0.1:1","metrics_address":"127.0.0.1:2"}\n')
        sys.stdout.flush()
    # A signal handler ends the pause; the limit keeps a lost stand-in from living on.
    deadline = time.monotonic() + 60
    while not stopped and time.monotonic() < deadline:
        time.sleep(0.05)  # sleep: until the signal, as a process that serves
    if arguments.leave:
        sys.stdout.write('{"event":"leaving"}\n')
        sys.stdout.flush()
        while not arguments.leave.exists() and time.monotonic() < deadline:
            time.sleep(0.05)  # sleep: until the signal, as a process that serves
    if arguments.record:
        with arguments.record.open("a") as file:
            file.write(f"{arguments.name}\n")
    os._exit(0)


if __name__ == "__main__":
    main()
