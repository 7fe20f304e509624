"""Runs a fabric in the background. The command returns when it is ready or has failed, and the daemon continues."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO

from kvloom_common.private_file import open_private_file
from tools.failures import CommandError
from tools.supervisor.reporters import PipeReporter, Reporter, foreground_reporter


def run_detached(work: Callable[[Reporter], None], output_path: Path) -> None:
    """Fork a daemon that does `work` in a session of its own, and show its reports until it is ready.

    Must be called while the process has one thread (a spinner would be a second one). The stdout and stderr of
    the daemon are redirected to `output_path`.
    Raises CommandError with the reason if the daemon fails first. A Ctrl-C stops the daemon.
    """
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        _be_daemon(work, output_path, PipeReporter(write_fd))
    os.close(write_fd)
    with os.fdopen(read_fd, encoding="utf-8") as reports, foreground_reporter() as reporter:
        try:
            _relay(reports, reporter)
        except KeyboardInterrupt:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
            raise


def has_terminal() -> bool:
    """True when this process belongs to a terminal, which sends it SIGHUP when it closes."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _relay(reports: IO[str], reporter: Reporter) -> None:
    for line in reports:
        kind, text = json.loads(line)
        if kind == "ready":
            return reporter.ready(text)
        if kind == "failed":
            raise CommandError(text)
        (reporter.step if kind == "step" else reporter.line)(text)
    raise CommandError("kvloom ended before it was ready")


def _be_daemon(work: Callable[[Reporter], None], output_path: Path, pipe: PipeReporter) -> None:
    """Never returns."""
    status = 1
    try:
        os.setsid()
        os.chdir("/")
        _redirect_streams(output_path)
        work(pipe)
        status = 0
    except CommandError as error:
        pipe.send("failed", error.message)
    except Exception as error:
        traceback.print_exc()
        pipe.send("failed", f"{type(error).__name__}: {error} (see {output_path})")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: this is a fork, and the exit handlers belong to the parent.
        os._exit(status)


def _redirect_streams(output_path: Path) -> None:
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    output = open_private_file(output_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
