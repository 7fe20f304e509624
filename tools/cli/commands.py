"""The `kvloom` command."""

from __future__ import annotations

import importlib.metadata

import click

from tools.cli.lazy_group import LazyGroup


@click.group(
    cls=LazyGroup,
    commands_at={
        "up": "tools.cli.up:up",
        "down": "tools.cli.up:down",
        "status": "tools.cli.status:status",
        "restart": "tools.cli.restart:restart",
        "drain": "tools.cli.drain:drain",
        "undrain": "tools.cli.drain:undrain",
        "logs": "tools.cli.logs:logs",
        "chat": "tools.cli.chat:chat",
        "explain": "tools.cli.explain:explain",
        "models": "tools.cli.models_command:models",
        "simulate": "tools.simulate.command:simulate_command",
        "dst": "tools.dst.command:dst",
        "chaos": "tools.chaos.command:chaos",
        "bench": "tools.cli.commands:bench",
        "doctor": "tools.cli.commands:doctor",
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(importlib.metadata.version("kvloom"), prog_name="kvloom")
def main() -> None:
    """kvloom: a low-latency serving fabric for language models, on this machine.

    Every option has an environment twin: --http-port is KVLOOM_HTTP_PORT.
    """


@click.group(
    cls=LazyGroup,
    commands_at={
        "engine": "tools.bench.engine.command:bench_engine",
        "index": "tools.bench.prefix_index:bench_index",
        "conversations": "tools.bench.conversations_command:bench_conversations",
        "data-plane": "tools.bench.data_plane.command:bench_data_plane",
        "overload": "tools.bench.overload:bench_overload",
        "routing": "tools.simulate.study.command:study_command",
    },
)
def bench() -> None:
    """Measure engines, routing and the data plane."""


@click.group(cls=LazyGroup, commands_at={"engine": "tools.doctor.command:doctor_engine"})
def doctor() -> None:
    """Examine what runs on this machine."""


if __name__ == "__main__":
    main()
