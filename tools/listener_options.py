"""The flags of a command that serves another program by itself, and what they may not be together."""

from __future__ import annotations

from collections.abc import Callable

import click

from kvloom_common.access.exposure import is_loopback
from kvloom_common.config import KvloomConfig
from tools.failures import CommandError
from tools.options import F, option


def listener_options(scope: str, served: str, port: int) -> Callable[[F], F]:
    """Adds `--host`, `--port` (by default `port`), `--metrics-port` and `--insecure` to the command `scope`. `served`
    names who connects to it."""
    any_port = click.IntRange(0, 65535)
    about_host = f"The address on which {served} is served."
    flags = (
        option("--host", scope=scope, default="127.0.0.1", show_default=True, help=about_host),
        option("--port", scope=scope, type=any_port, default=port, show_default=True, metavar="N",
               help="Its port. 0 picks one."),
        option("--metrics-port", scope=scope, type=any_port, metavar="N", help="Serve /metrics there."),
        option("--insecure", scope=scope, is_flag=True, help="Listen on other addresses than loopback without TLS."),
    )  # fmt: skip

    def add(function: F) -> F:
        for flag in reversed(flags):
            function = flag(function)
        return function

    return add


def check_listener(host: str, config: KvloomConfig, risk: str, *, insecure: bool) -> None:
    """`risk` says what is accepted with `--insecure`. Raises CommandError if other machines can reach the address
    without TLS, which was not accepted either."""
    if not (is_loopback(host) or config.tls.certificate_file or insecure):
        raise CommandError(
            f"{host} can be reached from other machines: give a certificate (tls.certificate_file, tls.key_file), or "
            f"accept with --insecure that {risk}"
        )
